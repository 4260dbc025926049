"""Where a parameter's elements lie in the rows of a DeepSpeed ZeRO optimizer.

Stages 1 and 2 put the parameters of a group behind one another and cut that row into equal parts, a rank each. Stage 3 cuts
every parameter by itself, and each rank puts its parts behind one another.

Source: deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ckpt_tools.errors import PartError
from ckpt_tools.formats.parts.merging import Share
from ckpt_tools.formats.parts.zero.states import ModelState, OptimizerState
from ckpt_tools.text import listed, some
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.boxes import Sizes

_ALIGNMENT = 2  # elements a rank, to which stages 1 and 2 fill a group up


class Row:
    """Entries of one dimension, one behind the other: an element's place tells its entry."""

    def __init__(self, pieces: Sequence[tuple[int, Entry]]) -> None:
        self.pieces = [(rank, entry) for rank, entry in pieces if entry.numel]
        self.ends = list(accumulate(entry.numel for _, entry in self.pieces))

    def shares(self, start: int, count: int, at: int = 0) -> Iterator[Share]:
        """Elements from `start` on, as shares of a flattened tensor from its element `at` on; fewer where the row ends."""
        number = bisect_right(self.ends, start)
        while count > 0 and number < len(self.ends):
            rank, entry = self.pieces[number]
            inside = start - (self.ends[number] - entry.numel)
            taken = min(count, entry.numel - inside)
            cut = Entry(entry.storage, entry.dtype, (taken,), (1,), entry.offset + inside)
            yield Share(rank, (at,), (taken,), cut)
            start, at, count, number = start + taken, at + taken, count - taken, number + 1


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that lie behind one another: their shapes, what is behind each of them, and the numbers of the rows."""

    shapes: Mapping[str, Sizes]
    paddings: Sizes
    rows: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of all of them, with the paddings."""
        return sum(map(prod, self.shapes.values())) + sum(self.paddings)

    def part(self, world: int) -> int:
        """Elements that each of so many ranks has of them under stage 3."""
        return sum(-(-prod(shape) // world) for shape in self.shapes.values())

    def cut(self, pieces: Mapping[int, Sequence[Entry]], *, one_by_one: bool) -> Iterator[tuple[str, Sizes, list[Share]]]:
        """Each parameter with its shape and where it lies.

        Args:
            pieces: each rank's rows of this group: weights, or a state of the optimizer. one_by_one: as stage 3 cuts.
        """
        if one_by_one:
            yield from self._cut_one_by_one([Row([(rank, entry) for entry in pieces[rank]]) for rank in sorted(pieces)])
            return
        row, start = Row([(rank, entry) for rank in sorted(pieces) for entry in pieces[rank]]), 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            yield name, shape, list(row.shares(start, prod(shape)))
            start += prod(shape) + padding

    def _cut_one_by_one(self, rows: Sequence[Row]) -> Iterator[tuple[str, Sizes, list[Share]]]:
        start = 0
        for name, shape in self.shapes.items():
            numel = prod(shape)
            part = -(-numel // len(rows))
            found = list[Share]()
            holders = rows[: -(-numel // part)] if part else []
            for rank, row in enumerate(holders):  # the last one's part is filled up; those behind it hold nothing but filling
                found += row.shares(start, min(part, numel - rank * part), rank * part)
            yield name, shape, found
            start += part


def groups_of(model: ModelState, optimizers: Mapping[int, OptimizerState]) -> list[Group]:
    """The groups of parameters, each with the rows that it lies in.

    Raises:
        PartError: ranks have other numbers of groups, or rows of sizes that do not add up.
    """
    first = optimizers[0]
    for rank, state in optimizers.items():
        if len(state.flat) != len(first.flat) or state.is_stage_3 != first.is_stage_3:
            raise PartError(
                f"{state.file} has {len(state.flat)} groups of weights on rank {rank}, {first.file} {len(first.flat)}."
            )
    if not first.is_stage_3:
        return _groups_in_rows(model, optimizers)
    groups = [Group(shapes, (), (number,)) for number, shapes in enumerate(model.shapes)]
    world = len(optimizers)
    alone = len(groups) == len(first.flat) and all(
        group.part(world) == entry.numel for group, entry in zip(groups, first.flat, strict=True)
    )
    if not alone:  # sub-groups that are cut elsewhere: one row of all
        shapes = {name: shape for group in model.shapes for name, shape in group.items()}
        groups = [Group(shapes, (), tuple(range(len(first.flat))))]
    for group in groups:
        held = {rank: sum(state.flat[row].numel for row in group.rows) for rank, state in optimizers.items()}
        if wrong := {rank: count for rank, count in held.items() if count != group.part(world)}:
            raise _not_adding_up(group, wrong, f"{group.part(world)}")
    return groups


def _groups_in_rows(model: ModelState, optimizers: Mapping[int, OptimizerState]) -> list[Group]:
    first, world = optimizers[0], len(optimizers)
    paddings = first.paddings or tuple((0,) * len(shapes) for shapes in model.shapes)
    counts = {len(first.flat), len(model.shapes), len(paddings)}
    if len(counts) > 1 or any(len(one) != len(other) for one, other in zip(paddings, model.shapes, strict=True)):
        raise PartError(
            f"{model.file} has {len(model.shapes)} groups of parameters, and {first.file} has other ones.",
            why="The names belong to another checkpoint.",
        )
    found = []
    for number, (shapes, padding) in enumerate(zip(model.shapes, paddings, strict=True)):
        group = Group(shapes, padding, (number,))
        held = {rank: state.flat[number].numel for rank, state in optimizers.items()}
        last = world - 1  # whose filling is left out by some versions
        if wrong := {rank: held[rank] for rank in held if (held[rank] != held[0] if rank != last else held[rank] > held[0])}:
            raise _not_adding_up(group, wrong, f"rank 0 {held[0]}")
        step = _ALIGNMENT * world
        if not group.numel <= sum(held.values()) <= -(-group.numel // step) * step:
            raise _not_adding_up(group, held, f"{group.numel} in all")
        found.append(group)
    return found


def _not_adding_up(group: Group, held: Mapping[int, int], wanted: str) -> PartError:
    counts = listed([f"rank {rank} holds {count}" for rank, count in sorted(held.items())])
    return PartError(
        f"The parts do not add up: {counts} elements of {some(list(group.shapes))}; it should be {wanted}.",
        why="A part is of another step, another number of ranks, or cut off.",
    )
