"""Where a parameter's elements lie in the rows of a DeepSpeed ZeRO optimizer.

Stages 1 and 2 put the parameters of a group behind one another and cut that row into equal parts, a rank each. Stage 3 cuts
every parameter by itself, and each rank puts its parts behind one another. Experts of a mixture are on some ranks alone: their
groups are cut among those.

Source: deepspeed/utils/zero_to_fp32.py; deepspeed/utils/groups.py (`_create_expert_and_data_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckpt_tools.errors import PartError
from ckpt_tools.parts import zero_experts
from ckpt_tools.parts.merge import Piece, Row
from ckpt_tools.parts.zero_states import ModelState, OptimizerState
from ckpt_tools.text import listed, some
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.boxes import Sizes

_ALIGNMENT = 2  # elements a rank, to which stages 1 and 2 fill a group up


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that lie behind one another."""

    shapes: Mapping[str, Sizes]
    paddings: Sizes
    rows: tuple[int, ...]
    ranks: Sequence[int]
    part: int | None = None

    @property
    def numel(self) -> int:
        """Elements of all of them, with the paddings."""
        return sum(map(prod, self.shapes.values())) + sum(self.paddings)

    @property
    def each(self) -> int:
        """Elements that each rank has where each parameter is cut by itself."""
        return sum(-(-prod(shape) // len(self.ranks)) for shape in self.shapes.values())

    def cut(self, pieces: Mapping[int, Sequence[Entry]]) -> Iterator[tuple[str, Sizes, list[Piece]]]:
        """Each parameter with its shape and where it lies."""
        if self.part is None:
            yield from self._cut_one_by_one(pieces)
            return
        row, start = Row([piece for rank in self.ranks for piece in self._in_row(rank, pieces.get(rank))]), 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            yield name, shape, list(row.cut(start, prod(shape)))
            start += prod(shape) + padding

    def _in_row(self, rank: int, entries: Sequence[Entry] | None) -> Iterator[tuple[int, int, Entry | None]]:
        assert self.part is not None, "these are cut one by one"
        if entries is None:
            yield rank, self.part, None
        else:
            yield from ((rank, entry.numel, entry) for entry in entries)

    def _cut_one_by_one(self, pieces: Mapping[int, Sequence[Entry]]) -> Iterator[tuple[str, Sizes, list[Piece]]]:
        at = {rank: number for number, rank in enumerate(self.ranks) if rank in pieces}
        rows = {number: Row([(rank, entry.numel, entry) for entry in pieces[rank]]) for rank, number in at.items()}
        start = 0
        for name, shape in self.shapes.items():
            numel = prod(shape)
            part = -(-numel // len(self.ranks))
            found = list[Piece]()
            for number, row in rows.items():  # the last part is filled up; ranks behind it hold nothing but filling
                found += row.cut(start, max(0, min(part, numel - number * part)), number * part)
            yield name, shape, found
            start += part


def groups_of(model: ModelState, optimizers: Mapping[int, OptimizerState], world: int) -> list[Group]:
    """The groups of parameters, each with the rows that it lies in."""
    first = next(iter(optimizers.values()))
    for rank, state in optimizers.items():
        if len(state.flat) != len(first.flat) or state.is_stage_3 != first.is_stage_3:
            raise PartError(
                f"{state.file} has {len(state.flat)} groups of weights on rank {rank}, {first.file} {len(first.flat)}."
            )
        if state.counts != first.counts:
            raise PartError(f"{state.file} says that its groups are cut among other numbers of ranks than {first.file}.")
    return _groups_one_by_one(model, optimizers, world) if first.is_stage_3 else _groups_in_rows(model, optimizers, world)


def _groups_one_by_one(model: ModelState, optimizers: Mapping[int, OptimizerState], world: int) -> list[Group]:
    first, ranks = next(iter(optimizers.values())), range(world)
    groups = [Group(shapes, (), (number,), ranks) for number, shapes in enumerate(model.shapes)]
    alone = len(groups) == len(first.flat) and all(
        group.each == entry.numel for group, entry in zip(groups, first.flat, strict=True)
    )
    if not alone:  # sub-groups that are cut elsewhere: one row of all
        shapes = {name: shape for group in model.shapes for name, shape in group.items()}
        groups = [Group(shapes, (), tuple(range(len(first.flat))), ranks)]
    for group in groups:
        held = {rank: sum(state.flat[row].numel for row in group.rows) for rank, state in optimizers.items()}
        if wrong := {rank: count for rank, count in held.items() if count != group.each}:
            raise _not_adding_up(group, wrong, f"{group.each}")
    return groups


def _groups_in_rows(model: ModelState, optimizers: Mapping[int, OptimizerState], world: int) -> list[Group]:
    first = next(iter(optimizers.values()))
    paddings = first.paddings or tuple((0,) * len(shapes) for shapes in model.shapes)
    counts = {len(first.flat), len(model.shapes), len(paddings)}
    if len(counts) > 1 or any(len(one) != len(other) for one, other in zip(paddings, model.shapes, strict=True)):
        raise PartError(
            f"{model.file} has {len(model.shapes)} groups of parameters, and {first.file} has other ones.",
            why="The names belong to another checkpoint.",
        )
    found = list[Group]()
    for number, (shapes, padding) in enumerate(zip(model.shapes, paddings, strict=True)):
        for ranks, names in zero_experts.holders(model, shapes, first.counts[number], world):
            held = {rank: optimizers[rank].flat[number].numel for rank in ranks if rank in optimizers}
            found.append(_in_rows(Group(names, padding, (number,), ranks), held))
    return found


def _in_rows(group: Group, held: Mapping[int, int]) -> Group:
    """The group with the length of its parts, told by those that are there."""
    last = group.ranks[-1]  # whose filling is left out by some versions
    step = _ALIGNMENT * len(group.ranks)
    longest = -(-group.numel // step) * _ALIGNMENT
    part = next((count for rank, count in held.items() if rank != last), held.get(last) if len(group.ranks) == 1 else longest)
    part = longest if part is None else part
    if wrong := {rank: held[rank] for rank in held if (held[rank] != part if rank != last else held[rank] > part)}:
        raise _not_adding_up(group, wrong, f"rank {group.ranks[0]} {part}")
    total = part * (len(group.ranks) - 1) + held.get(last, part)
    if not group.numel <= total <= longest * len(group.ranks):
        raise _not_adding_up(group, held, f"{group.numel} in all")
    return replace(group, part=part)


def _not_adding_up(group: Group, held: Mapping[int, int], wanted: str) -> PartError:
    counts = listed([f"rank {rank} holds {count}" for rank, count in sorted(held.items())])
    return PartError(
        f"The parts do not add up: {counts} elements of {some(list(group.shapes))}; it should be {wanted}.",
        why="A part is of another step, another number of ranks, or cut off.",
    )
