"""`--fill-from`: what a checkpoint lacks comes from another one. Its bytes stream as all others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.errors import ConvertError
from ckpt_tools.fit.fit import NewStorages
from ckpt_tools.fit.initialisers import Blank
from ckpt_tools.fit.targets import choose_state_dict
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.matching.records import Shape
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import shape_text, some
from ckpt_tools.tree.nodes import Dict, Entry, Node, as_dict
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.numeric import row_major, view_of


@dataclass(slots=True, eq=False)
class Filling:
    """The checkpoint that fills, open, and what came from it: name -> where it is from."""

    path: str
    node: Dict
    storages: NewStorages
    made: dict[object, Node] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    taken: dict[str, Node] = field(default_factory=dict)

    def fill(self, node: Dict) -> list[str]:
        """Put what a state dict lacks into it; the names that only it has, which stay."""
        there, all_names = tensors_by_name(node), tensors_by_name(self.node)
        if there and not there.keys() & all_names.keys():
            raise ConvertError(
                f"IN and {self.path} have no name in common: {next(iter(there))!r} and {next(iter(all_names), '')!r}.",
                fix="Give IN the names of the other: `strip_module`, `unwrap`, `rename` are done before the filling.",
            )
        for name, tensor in there.items():
            if name in all_names and _shape(tensor) != _shape(all_names[name]):
                own_shape, shape = shape_text(_shape(all_names[name])), shape_text(_shape(tensor))
                raise ConvertError(
                    f"{name!r} has the shape {own_shape} in {self.path}, and {shape} in IN.",
                    fix=f"Leave IN's out, and it is filled: `drop={name!r}`.",
                )
        own: dict[object, str] = {}
        for name, entry in all_names.items():
            if name in there and type(entry) is Entry and entry.nbytes:
                own.setdefault(view_of(entry), name)
        node.items.extend((name, self.take(name, all_names[name], own, there)) for name in all_names if name not in there)
        return [name for name in there if name not in all_names]

    def take(self, name: str, entry: Node, own: Mapping[object, str], there: Mapping[str, Node]) -> Node:
        """One tensor. What is tied to one that IN has (`own`) is tied to that, since it would be another model else."""
        if type(entry) is not Entry:
            raise ConvertError(
                f"{self.path}: {name!r} is a sparse, quantised, nested or meta tensor, which cannot be filled in."
            )
        view: object = view_of(entry) if entry.nbytes else name
        tied = own.get(view)
        self.filled[name] = self.path if tied is None else f"tied to {tied!r}, as in {self.path}"
        if tied is not None:
            return there[tied]
        if view not in self.made:
            blank = Blank(name, entry.shape, entry.dtype)
            self.made[view] = self.storages.entry(row_major(entry), blank, entry)
        self.taken[name] = self.made[view]
        return self.made[view]


@contextmanager
def opened(path: str | os.PathLike[str], root: Node) -> Iterator[Filling]:
    """The checkpoint that fills what is missing below `root`, open while its tensors are read."""
    with open_whole(path) as checkpoint:
        checkpoint.locate()
        chosen = to_little_endian(choose_state_dict(checkpoint, of_target=True).node, checkpoint.byteorder)
        yield Filling(str(path), as_dict(chosen), NewStorages(reachable(root)))
        checkpoint.source.check_unchanged()


def said_to_stay(names: Sequence[str], path: str) -> str:
    """The sentence for tensors that only IN has."""
    return f"{len(names)} tensors are not in {path}, and stay: {some(names)}." if len(names) > 1 else (
        f"{names[0]!r} is not in {path}, and stays."
    )  # fmt: skip


def _shape(node: Node) -> Shape:
    return node.shape if type(node) is Entry else ()
