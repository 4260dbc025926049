"""One slice of a DeepSpeed checkpoint as a model: its fp32 weights, and its optimizer's state by the parameters' names.

Stages 1 and 2 put the parameters of a group behind one another and cut that row into equal parts, a rank each. Stage 3 cuts
every parameter by itself, and each rank puts its parts behind one another. Experts of a mixture are on some ranks alone: their
groups are cut among those, under the number that an expert has among those of its rank.

Source: deepspeed/utils/zero_to_fp32.py; deepspeed/utils/groups.py (`_create_expert_and_data_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, product
from math import prod

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Keys
from ckpt_tools.parts.deepspeed_files import EXPERT, ModelState, OptimizerState
from ckpt_tools.parts.merge import Merger, Piece, Row, check_casts, check_not_twice, check_same
from ckpt_tools.text import listed, some, these_ranks
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Pair
from ckpt_tools.values.boxes import Sizes
from ckpt_tools.values.same_bytes import same_bytes

_ALIGNMENT = 2  # elements a rank, to which stages 1 and 2 fill a group up
_MOST_EXPERTS = 1 << 16
_COMPARED = 4096  # weights of a group, at most, with their 16-bit cast


# --- where a parameter's elements lie in the rows of the optimizer


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that lie behind one another in `rows` of `ranks`. `part`: of how many elements each rank's part of all is."""

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

    def cut(self, held: Mapping[int, Sequence[Entry]]) -> Iterator[tuple[str, Sizes, list[Piece]]]:
        """Each parameter with its shape and where it lies."""
        if self.part is None:
            yield from self._cut_one_by_one(held)
            return
        missing = [(self.part, None)]
        row = Row(
            (rank, numel, entry)
            for rank in self.ranks
            for numel, entry in ([(entry.numel, entry) for entry in held[rank]] if rank in held else missing)
        )
        start = 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            yield name, shape, list(row.cut(start, prod(shape)))
            start += prod(shape) + padding

    def _cut_one_by_one(self, held: Mapping[int, Sequence[Entry]]) -> Iterator[tuple[str, Sizes, list[Piece]]]:
        numbered = [(number, rank) for number, rank in enumerate(self.ranks) if rank in held]
        rows = [(number, Row((rank, entry.numel, entry) for entry in held[rank])) for number, rank in numbered]
        start = 0
        for name, shape in self.shapes.items():
            numel = prod(shape)
            part = -(-numel // len(self.ranks))
            found = list[Piece]()
            for number, row in rows:  # the last part is filled up; ranks behind it hold nothing but filling
                found += row.cut(start, max(0, min(part, numel - number * part)), number * part)
            yield name, shape, found
            start += part


def groups_of(model: ModelState, optimizers: Mapping[int, OptimizerState], world: int) -> list[Group]:
    """The groups of parameters, each with the rows that it lies in."""
    groups = {state.file: (len(state.flat), state.is_stage_3, state.counts) for state in optimizers.values()}
    check_same("groups of weights, cut among as many ranks", groups)
    is_stage_3 = next(iter(optimizers.values())).is_stage_3
    return _groups_one_by_one(model, optimizers, world) if is_stage_3 else _groups_in_rows(model, optimizers, world)


def _groups_one_by_one(model: ModelState, optimizers: Mapping[int, OptimizerState], world: int) -> list[Group]:
    first, ranks = next(iter(optimizers.values())), range(world)
    groups = [Group(shapes, (), (number,), ranks) for number, shapes in enumerate(model.shapes)]
    if [group.each for group in groups] != [entry.numel for entry in first.flat]:  # sub-groups, cut elsewhere: one row of all
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
    if len(first.flat) != len(model.shapes) or list(map(len, paddings)) != list(map(len, model.shapes)):
        raise PartError(
            f"{model.file} has {len(model.shapes)} groups of parameters, and {first.file} has other ones.",
            why="The names belong to another checkpoint.",
        )
    found = list[Group]()
    for number, (shapes, padding) in enumerate(zip(model.shapes, paddings, strict=True)):
        for ranks, names in _holders(model, shapes, first.counts[number], world):
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


def _holders(
    model: ModelState, shapes: Mapping[str, Sizes], count: int, world: int
) -> Iterator[tuple[Sequence[int], Mapping[str, Sizes]]]:
    """The ranks among which a group is cut, and its names in the whole model; experts of several ranks are several groups."""
    if count == world:
        yield range(world), shapes
        return
    matches = {name: EXPERT.fullmatch(name) for name in shapes}
    experts = {name: (match["layer"], int(match["number"]), match) for name, match in matches.items() if match is not None}
    if len(experts) < len(shapes) or world % count:
        raise PartError(f"{some(list(shapes))} are cut among {count} of {world} ranks, and not all are experts of a mixture.")
    numbers: dict[str, set[int]] = {}
    for layer, number, _ in experts.values():
        numbers.setdefault(layer, set()).add(number)
    times = world // count
    if times * sum(map(len, numbers.values())) > _MOST_EXPERTS:
        raise PartError(f"{model.file} says that {world} ranks have {count} parts of experts, which is impossible.")
    config = model.root.get("ds_config")
    data_first = type(config) is Dict and config.get("use_data_before_expert_parallelism") is True
    for own in range(times):
        renamed = {}
        for name, (layer, number, match) in experts.items():
            start, end = match.span("number")
            renamed[f"{name[:start]}{own * len(numbers[layer]) + number}{name[end:]}"] = shapes[name]
        yield range(own * count, (own + 1) * count) if data_first else range(own, world, times), renamed


# --- a slice


class Slice:
    """What the files of one slice say: a tensor parallel rank, a stage of a pipeline, or all of the model."""

    def __init__(
        self, models: Mapping[int, ModelState], optimizers: Mapping[int, OptimizerState], keys: Keys, world: int, *,
        partial: bool,
    ) -> None:  # fmt: skip
        self.models, self.optimizers, self.keys, self.world = models, optimizers, keys, world
        self.model = next(iter(models.values()))
        self.first = next(iter(optimizers.values()), None)
        self.is_stage_3 = self.first is not None and self.first.is_stage_3
        self.merger = Merger(keys, partial=partial)
        self.groups = groups_of(self.model, optimizers, world) if optimizers else []

    @property
    def lost(self) -> dict[str, str]:
        return self.merger.lost

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.optimizers] if self.optimizers else []

    @cached_property
    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        if self.first is None:  # without ZeRO the model file has them
            return self.model.module
        made: dict[str, Node] = {}
        for group in self.groups:
            made.update(self._cut(group, self._flat_of(group), "the weights"))
        for name, shape in self.model.frozen.items():
            made.update(self._frozen(name, shape))
        module = self.model.module.named
        known = (*made, *self.lost)
        tied = {_place(entry): name for name in known if type(entry := module.get(name)) is Entry and entry.numel}
        for name, value in module.items():
            holder = tied.get(_place(value), "")
            if name in made or name in self.lost or name in self.model.shared:
                continue
            if holder in self.lost and name not in self.model.buffers:
                self.lost[name] = self.lost[holder]
            elif self.missing and self._is_blank(name, value) and holder not in made:
                self.lost[name] = "no rank that is here holds a part of it"
            else:
                made[name] = self._as_it_is(name, value, made.get(holder))
        for name in self.model.shared:
            if name not in made:
                self._tie(name, made)
        order = dict.fromkeys((*module, *made))
        root = Dict([(name, made[name]) for name in order if name in made], ordered=True)
        root.attributes = self.model.module.attributes
        return root

    def _flat_of(self, group: Group) -> dict[int, list[Entry]]:
        """The rows of fp32 weights of a group, by rank, of those that are there."""
        there = [rank for rank in group.ranks if rank in self.optimizers]
        return {rank: [self.optimizers[rank].flat[row] for row in group.rows] for rank in there}

    def _cut(self, group: Group, held: Mapping[int, list[Entry]], what: str) -> Iterator[tuple[str, Entry]]:
        """The parameters of a group, put together from each rank's rows of it."""
        dtypes = {entry.dtype.name: entry.dtype for entries in held.values() for entry in entries}
        if len(dtypes) != 1:
            raise PartError(f"The ranks have {what} of {some(list(group.shapes))} in several dtypes: {listed(list(dtypes))}.")
        (dtype,) = dtypes.values()
        for name, shape, pieces in group.cut(held):
            make = partial(self.merger.tensor, name, dtype, shape, pieces, measured=(prod(shape),))
            if type(entry := self.merger.unless_lost(name, make)) is Entry:
                yield name, entry

    def _frozen(self, name: str, shape: Sizes) -> Iterator[tuple[str, Entry]]:
        """A weight that is not trained: whole under stage 2, a part on each rank under stage 3."""
        fragments = {rank: model.fragments.get(name) for rank, model in self.models.items()}
        if missing := [rank for rank, entry in fragments.items() if entry is None]:
            raise PartError(f"The frozen weight {name!r} is not in the files of {these_ranks(missing)}.")
        parts = {rank: _flat(entry) for rank, entry in fragments.items() if entry is not None}
        group = Group({name: shape}, (0,), (0,), range(self.world if self.is_stage_3 else 1))
        wanted = group.each if self.is_stage_3 else prod(shape)
        if wrong := {rank: entry.numel for rank, entry in parts.items() if entry.numel != wanted}:
            held = listed([f"rank {rank} holds {count}" for rank, count in wrong.items()])
            raise PartError(f"The frozen weight {name!r} does not add up: {held} elements; it should be {wanted}.")
        yield from self._cut(group, {rank: [entry] for rank, entry in parts.items()}, "a frozen weight")

    def _as_it_is(self, name: str, value: Node, tied: Node) -> Node:
        """What lies in the model file itself: buffers, extra states, under stage 1 frozen weights, tied ones without a word."""
        if tied is not None and name not in self.model.buffers:
            return tied
        if self._is_blank(name, value):
            raise PartError(
                f"The model has {name!r}, and no rank holds a part of it.",
                why="The files say neither its shape nor where it lies.",
            )
        return value

    def _is_blank(self, name: str, value: Node) -> bool:
        """Whether it is what stage 3 leaves of a weight in the model file."""
        return self.is_stage_3 and type(value) is Entry and name not in self.model.buffers and value.shape == (0,)

    def _tie(self, name: str, made: dict[str, Node]) -> None:
        """The weight that a tied name stands for, under this name too."""
        holder, seen = self.model.shared[name], {name}
        while holder not in made and holder in self.model.shared and holder not in seen:
            seen.add(holder)
            holder = self.model.shared[holder]
        if holder in self.lost:
            self.lost[name] = self.lost[holder]
        elif holder in made:
            made[name] = made[holder]
        else:
            raise PartError(f"{name!r} is tied to {holder!r}, which is not in the checkpoint.")

    # --- what is there beside the weights

    def module(self) -> Dict:
        """The weights as they were trained with."""
        if self.is_stage_3:
            raise PartError(
                "ZeRO 3 saves no 16-bit weights.", why="The model files hold tensors without elements.",
                fix="Take the fp32 ones, and cast them: `dtype='bf16'`.",
            )  # fmt: skip
        return self.model.module

    def optimizer(self) -> Dict:
        """The optimizer's state by the parameters' names, as torch's `get_optimizer_state_dict` has it."""
        if self.first is None or not self.first.states:
            raise PartError("The files have no optimizer state.")
        if self.missing:
            raise PartError(f"The optimizer's state needs the files of all ranks; missing: {these_ranks(self.missing)}.")
        state = dict(pair for group in self.groups for pair in self._states(group))
        names: dict[int, list[str]] = {}
        for group in self.groups:
            names.setdefault(group.rows[0], []).extend(group.shapes)
        groups = list[Dict]()
        for values in self.first.groups:
            rows = values.get("params")
            own = [
                name for row in (rows.items if type(rows) is List else ()) if type(row) is int for name in names.get(row, ())
            ]
            groups.append(Dict([*(item for item in values.items if item[0] != "params"), ("params", List(list(own)))]))
        return optimizer_of(state, groups)

    def _states(self, group: Group) -> Iterator[tuple[str, Dict]]:
        """The state of each parameter of a group: rows cut as the weights are, and steps as they are."""
        first = self.optimizers[group.ranks[0]].states.get(group.rows[0], Dict())
        made: dict[str, list[Pair]] = {name: [] for name in group.shapes}
        for key, value in first.items:
            if type(value) is not Entry or not value.shape:
                kept = self.keys.renew(value)
                for items in made.values():
                    items.append((key, kept))
                continue
            for name, entry in self._cut(group, self._rows(group, key), f"{key!r}"):
                made[name].append((key, entry))
        yield from ((name, Dict(items)) for name, items in made.items())

    def _rows(self, group: Group, key: Node) -> dict[int, list[Entry]]:
        """One state of each rank's rows of a group."""
        found: dict[int, list[Entry]] = {}
        for rank, row in product(group.ranks, group.rows):
            state = self.optimizers[rank]
            entry = state.states.get(row, Dict()).get(key) if type(key) is str else None
            held, wanted = entry.shape if type(entry) is Entry else (), state.flat[row].numel
            if type(entry) is not Entry or len(held) != 1 or held < (wanted,) or (self.is_stage_3 and held > (wanted,)):
                shown = listed(held) if held else "no"
                raise PartError(
                    f"The optimizer's {key!r} of {some(list(group.shapes))} has {shown} elements on rank {rank}.",
                    why=f"The weights there have {wanted}.",
                )
            found.setdefault(rank, []).append(entry)
        return found

    def check_evidence(self, module: Mapping[str, Node] | None = None) -> None:
        """What the bytes say against the names of the optimizer's files."""
        for group in self.groups:
            check_not_twice(self._flat_of(group), self.merger.shown)
        check_casts(self._casts(self.model.module.named if module is None else module))

    def _casts(self, module: Mapping[str, Node]) -> Iterator[tuple[str, str, Entry, Entry]]:
        """Each rank's runs of the weights, with the same runs of the 16-bit ones."""
        groups = () if self.is_stage_3 else self.groups
        for name, _, pieces in chain.from_iterable(islice(group.cut(self._flat_of(group)), _COMPARED) for group in groups):
            cast = module.get(name)
            for piece in pieces if type(cast) is Entry and cast.is_contiguous else ():
                assert type(cast) is Entry, "seen above"
                if cast.numel >= piece.offsets[0] + piece.sizes[0]:
                    run = replace(cast, shape=piece.sizes, stride=(1,), offset=cast.offset + piece.offsets[0])
                    yield self.optimizers[piece.rank].file, name, piece.entry, run

    def differing_buffers(self) -> list[str]:
        """Compare the buffers of all ranks, which each of them may count by itself (batch norm)."""
        _, *others = self.models.values()
        every = ((name, self.model.module.get(name)) for name in self.model.buffers)
        return [
            name
            for name, own in every
            if type(own) is Entry and not all(_same(own, other.module.get(name)) for other in others)
        ]


def optimizer_of(state: Mapping[str, Dict], groups: Sequence[Dict]) -> Dict:
    """An optimizer's state dict."""
    return Dict([("state", Dict(list(state.items()))), ("param_groups", List(list(groups)))])


def _same(one: Entry, other: Node) -> bool:
    if type(other) is not Entry or (one.shape, one.dtype.name) != (other.shape, other.dtype.name):
        return False
    return not one.numel or same_bytes(one, other)


def _flat(entry: Entry) -> Entry:
    """A tensor as a row of its elements; one that does not lie row-major is as DeepSpeed never saves it."""
    if not entry.is_contiguous:
        raise PartError("A frozen weight does not lie row by row.")
    return Entry(entry.storage, entry.dtype, (entry.numel,), (1,), entry.offset)


def _place(node: Node) -> tuple[object, ...]:
    return (id(node.storage), node.offset, node.shape, node.stride) if type(node) is Entry else (id(node),)
