"""FSDP1's LOCAL_STATE_DICT: the parameters of a wrapped module in one row (`_flat_param`), without names or shapes.

A target has both, in the order in which FSDP puts parameters into a row. With `use_orig_params=True` every parameter begins at
a multiple of 16 bytes, the row is filled up to equal parts, and what each rank has of every parameter stands beside it, as runs
under its name. Buffers are whole on every rank.

Source: torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`), torch/distributed/fsdp/_state_dict_utils.py
(`_local_post_state_dict_hook`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpt_tools.errors import PartError
from ckpt_tools.parts.merge import Merger, Piece, Row
from ckpt_tools.parts.rank_parts import Part
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import Dict, Entry, Node, Where
from ckpt_tools.values.boxes import Sizes

FLAT = "_flat_param"
_ALIGNMENT = 16  # bytes


def is_flat(where: Where) -> bool:
    """Whether a tensor is a row of parameters, by its name."""
    return bool(where) and str(where[-1]).rpartition(".")[2] in (FLAT, "flat_param")


@dataclass(frozen=True, slots=True)
class Names:
    """What a target tells: the shapes of its tensors by name, in order, and of tied ones the first name of each."""

    shapes: Mapping[str, Sizes]
    first: Mapping[str, str]


@dataclass(slots=True)
class Splitting:
    """The rows of one checkpoint on their way into tensors."""

    names: Names
    merger: Merger
    world: int
    made: dict[Where, dict[str, Entry]] = field(default_factory=dict)

    def split(self, rows: Mapping[Where, Mapping[int, Part]], tensors: Mapping[int, Mapping[Where, Node]]) -> set[Where]:
        """Cut rows into tensors; returns the places of what the files have in their place."""
        gone = set(rows)
        for where, parts in rows.items():
            holder, prefix = where[:-1], str(where[-1]).rpartition(".")[0]
            deeper = [_below(str(other[-1]).rpartition(".")[0]) for other in rows if other[:-1] == holder and other != where]
            inside = [head for head in deeper if head.startswith(_below(prefix)) and head != _below(prefix)]
            names = [
                name for name in self.names.shapes
                if name.startswith(_below(prefix)) and not name.startswith(tuple(inside)) and self.names.first[name] == name
                and not self._is_buffer((*holder, name), tensors)
            ]  # fmt: skip
            made = self.made.setdefault(holder, {})
            made.update(self._cut(where, names, parts))
            made.update({name: made[first] for name, first in self.names.first.items() if first in made})
            gone |= {(*holder, name) for name in made}
        return gone

    def put(self, root: Node) -> None:
        """Put the tensors into their mappings, in the target's order."""
        for holder, made in self.made.items():
            node = root
            for key in holder:
                node = node.named[str(key)] if type(node) is Dict else None
            if type(node) is not Dict:
                raise PartError(f"{dotted(holder)!r} is not a mapping of names to tensors.")
            rest = node.named
            order = [name for name in self.names.shapes if name in made or name in rest]
            others = [(key, value) for key, value in node.items if key not in order]
            node.items[:] = [*((name, made[name] if name in made else rest[name]) for name in order), *others]

    def _is_buffer(self, where: Where, tensors: Mapping[int, Mapping[Where, Node]]) -> bool:
        """Whether every rank has it whole."""
        shape = self.names.shapes[str(where[-1])]
        return all(type(entry := own.get(where)) is Entry and entry.shape == shape for own in tensors.values())

    def _cut(self, where: Where, names: Sequence[str], parts: Mapping[int, Part]) -> dict[str, Entry]:
        first = next(iter(parts.values()))
        boxes = sorted(
            (box.offsets[0], rank, box.entry) for rank, part in parts.items() for box in part.held if box.entry.numel
        )
        pieces = [Piece((at,), entry, rank) for at, rank, entry in boxes]
        self.merger.tensor(dotted(where), first.dtype, first.shape, pieces)  # which sees to it that all of it is here, once
        starts = self._starts(where, names, first)
        row = Row([(rank, entry.numel, entry) for _, rank, entry in boxes])
        made = {}
        for name, start in zip(names, starts, strict=True):
            shape = self.names.shapes[name]
            found = list(row.cut(start, prod(shape)))
            made[name] = self.merger.tensor(name, first.dtype, shape, found, measured=(prod(shape),))
        return made

    def _starts(self, where: Where, names: Sequence[str], part: Part) -> list[int]:
        """Where in a row each parameter begins."""
        counts = [prod(self.names.shapes[name]) for name in names]
        ends = list[int]()
        for aligned in (1, _ALIGNMENT // part.dtype.itemsize):
            starts, at = list[int](), 0
            for count in counts:
                at += -at % aligned
                starts.append(at)
                at += count
            at += -at % self.world if aligned > 1 else 0
            if at == part.shape[0]:
                return starts
            ends.append(at)
        raise PartError(
            f"{dotted(where)!r} has {part.shape[0]} elements, and the {len(names)} parameters of the target that belong into "
            f"it have {sum(counts)}.", why=f"Filled up as FSDP does with use_orig_params they have {ends[-1]}.",
            fix="Is the target the model that was saved?",
        )  # fmt: skip


def _below(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
