"""Whole parts of a checkpoint that the target lacks: an auxiliary head, tables of positions; each as one glob."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape

from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.parametrized import is_part


@dataclass(frozen=True, slots=True)
class Extra:
    """Tensors that the target lacks.

    Attributes:
        glob: matches them, and nothing else in the checkpoint. names: they, in order.
    """

    glob: str
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it is said: 'AuxLogits.*', 14 tensors: not in the target."""
        count = len(self.names)
        return f"{self.glob!r}, {count} tensor{'s' * (count != 1)}: not in the target"


def extras(unexpected: Sequence[str], source: Mapping[str, Shape], wanted: Mapping[str, Shape] | None = None) -> list[Extra]:
    """What is left over of a checkpoint, in as few globs as say it:"""
    names = list(source)
    lone = set(unexpected)
    counts = Counter(path for name in names for path in _paths(name))
    free = Counter(path for name in lone for path in _paths(name))
    tails, free_tails = (Counter(name.rpartition(".")[2] for name in side) for side in (names, lone))
    found: dict[str, list[str]] = {}
    for name in unexpected:
        path = next((path for path in _paths(name) if counts[path] == free[path] < len(names)), None)
        tail = name.rpartition(".")[2]
        if path is not None:
            pattern = f"{escape(path)}.*"
        else:
            everywhere = free_tails[tail] == tails[tail] > 1 and tail != name
            pattern = f"*.{escape(tail)}" if everywhere else escape(name)
        found.setdefault(pattern, []).append(name)
    near = {path for name in wanted or () for path in _paths(name)}  # what is missing may be there in another form
    shapes, lasts = set((wanted or {}).values()), {f"*.{name.rpartition('.')[2]}" for name in wanted or ()}
    return [
        Extra(glob, tuple(rows))
        for glob, rows in found.items()
        if glob not in lasts and _above(glob) not in near and not any(is_part(name) or source[name] in shapes for name in rows)
    ]


def _above(glob: str) -> str:
    """The module that the highest module of a glob is in; nothing where that is the whole, or the glob a last name."""
    return "" if glob.startswith("*") else glob.removesuffix(".*").rpartition(".")[0]


def _paths(name: str) -> Iterator[str]:
    """The modules that a name is in, the highest first."""
    at = name.find(".")
    while at > 0:
        yield name[:at]
        at = name.find(".", at + 1)
