"""The sizes that a plan calls by name, and who says them: the user, the plan, a config.json beside the checkpoint, a shape."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_tools.errors import MatchError, NotACheckpointError
from ckpt_tools.fit.axes import MissingSizesError, read_side
from ckpt_tools.fit.fields import check_value
from ckpt_tools.fit.patterns import Index, NamePattern
from ckpt_tools.fit.rows import PatternPlan, ValueRow
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import open_regular
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.modules import attributes
from ckpt_tools.tree.nodes import Dict, Node

_FILES = ("config.json", "params.json", "huggingface/config.json")  # Hugging Face's, Meta's, verl's
_ARGUMENTS = (("args",), ("common", "args"), ("model_args",))  # Megatron's in two containers, nanoGPT's
_MOST_BYTES = 10_000_000


class Config:
    """What a checkpoint, and the files beside it, say of a model; the files are read when something is asked."""

    def __init__(self, folder: Path | None, own: Sequence[tuple[str, dict[str, Any]]] = ()) -> None:
        self.folder, self.own = folder, own
        self._read: list[tuple[str, dict[str, Any]]] | None = None

    @classmethod
    def beside(cls, path: str | os.PathLike[str], root: Node) -> Config:
        """Those of a checkpoint: in it, in its folder, or beside its file."""
        here = Path(path)
        return cls(here if here.is_dir() else here.parent if here.is_file() else None, list(_arguments(root)))

    @property
    def files(self) -> list[tuple[str, dict[str, Any]]]:
        """Those who say something: name, what they say."""
        if self._read is None:
            self._read = [*self.own, *(() if self.folder is None else _documents(self.folder))]
        return self._read

    @property
    def label(self) -> str:
        return " and ".join(name for name, _ in self.files) or "config.json"

    def find(self, keys: Iterable[str]) -> tuple[int, str] | None:
        """The number under one of these keys, and who says so."""
        found: list[tuple[int, str]] = []
        for name, document in self.files:
            for key in keys:
                value = _inside(document, key)
                if type(value) is int and value > 0:
                    found.append((value, f"{key} of {name}"))
                    break
        if len({value for value, _ in found}) > 1:
            raise MatchError(f"{found[0][1]} is {found[0][0]}, and {found[1][1]} is {found[1][0]}.",
                                 fix=f"Say which: `plan_value='NAME={found[0][0]}'`.")  # fmt: skip
        return found[0] if found else None

    def says(self, key: str, wanted: bool = True) -> bool:
        """Whether a file says that something is so, or is not."""
        return any(_inside(document, key) is wanted for _, document in self.files)


def _documents(folder: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    for name in _FILES:
        try:
            fd = open_regular(folder / name)
        except (NotACheckpointError, OSError):
            continue
        with open(fd, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        try:
            document = load_json(data) if len(data) <= _MOST_BYTES else None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise MatchError(f"{folder / name} cannot be read: it is not a JSON object.",
                                 fix="Give what the plan needs by `plan_value`, in a folder without it.")  # fmt: skip
        yield name, document


def _arguments(root: Node) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of the job that wrote a checkpoint, which some keep in it."""
    for where in _ARGUMENTS:
        node = root
        for key in where:
            node = node.get(key) if type(node) is Dict else None
        said = node if type(node) is Dict else attributes(node)
        if said is not None:
            yield ".".join(where), {key: value for key, value in said.items if type(key) is str}


def _inside(document: Any, key: str) -> Any:
    for part in key.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


class Values:
    def __init__(self, given: Mapping[str, int], config: Config) -> None:
        self.given, self.config = given, config
        self.sizes: dict[str, int] = {}
        self.said: dict[str, str] = {}

    def settle(self, plan: PatternPlan, shapes: Mapping[str, Shape]) -> None:
        """Find the sizes that the plan names: given ones, those of the plan or a config, those that tensors say."""
        names = {row.name for row in plan.values}
        if unknown := [name for name in self.given if name not in names]:
            why = f"It names {', '.join(sorted(names))}." if names else "It names none."
            raise MatchError(f"The plan {plan.label} has no value {unknown[0]!r}.", why=why)
        for row in plan.values:
            if row.name in self.given:
                self._say(row.name, check_value(self.given[row.name], f"the value {row.name!r}"), "given")
            elif row.number is not None:
                self._say(row.name, row.number, "the plan")
            elif (found := self.config.find(row.config)) is not None:
                self._say(row.name, *found)
        self._from_shapes([row for row in plan.values if row.old is not None and row.name not in self.sizes], plan, shapes)

    def _from_shapes(self, left: list[ValueRow], plan: PatternPlan, shapes: Mapping[str, Shape]) -> None:
        """Sizes that tensors say, one after another: one may need another."""
        index = Index()
        for row in left:
            if row.old is not None:
                index.add(NamePattern.read(row.old.text.removeprefix(plan.prefix_old)), row.name)
        seen: dict[str, dict[Shape, str]] = {row.name: {} for row in left}
        for name, shape in shapes.items() if left else ():
            for what, _ in index.find(name):
                seen[what].setdefault(shape, name)
        while done := [row for row in left if self._from_shape(row, seen[row.name])]:
            left = [row for row in left if row not in done]

    def _say(self, name: str, size: int, who: str) -> None:
        self.sizes[name], self.said[name] = size, who

    def _from_shape(self, row: ValueRow, seen: Mapping[Shape, str]) -> bool:
        sizes: dict[int, str] = {}
        for shape, name in seen.items():
            try:
                solved = read_side(row.axes or "").solve(shape, self.sizes, name)
            except MissingSizesError:
                return False
            sizes.setdefault(solved.sizes[row.name], name)
        if len(sizes) > 1:
            shown = ", ".join(f"{size} in {name}" for size, name in list(sizes.items())[:2])
            raise MatchError(f"The checkpoint says different sizes for {row.name}: {shown}.")
        for size, name in sizes.items():
            self._say(row.name, size, f"the shape of {name}")
        return bool(sizes)

    def told(self) -> dict[str, str]:
        return {name: f"{size} ({self.said[name]})" for name, size in self.sizes.items()}

    def missing(self, error: MissingSizesError, plan: PatternPlan) -> MatchError:
        """The error for a size that is not said anywhere."""
        rows = [row for row in plan.values if row.name in error.names]
        if not rows:
            return error
        keys = [key for row in rows for key in row.config]
        why = error.what
        if keys:
            files = self.config.files
            said = f"{self.config.label} does not say it" if files else "There is no config.json beside the checkpoint"
            why += f" {said} ({', '.join(keys)})."
        name = rows[0].name
        return MatchError(f"The plan {plan.label} needs {name}.", why=why, fix=f"Give it: `plan_value='{name}=N'`.")
