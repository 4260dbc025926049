"""One slice of a DeepSpeed checkpoint: what its files say, its fp32 weights, its optimizer's state by the parameters' names.

Source: deepspeed/utils/zero_to_fp32.py; deepspeed/utils/groups.py (`_create_expert_and_data_parallel`); `state_dict` in
deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from math import prod
from typing import TypeAlias

from ckpt_tools.errors import PartError
from ckpt_tools.io.content import read
from ckpt_tools.parts.merge import Merger, Piece, check_casts, check_not_twice
from ckpt_tools.parts.partition import listed_in, named_in
from ckpt_tools.pickling.torch_objects import sizes_of
from ckpt_tools.text import listed, some
from ckpt_tools.tree.exchange import DROP, Drop
from ckpt_tools.tree.nodes import MAX_ELEMENTS, Dict, Entry, List, Node, Pair
from ckpt_tools.values.boxes import Sizes
from ckpt_tools.values.numeric import row_major, same_bytes

EXPERT = re.compile(r"(?P<layer>.*?)deepspeed_moe\.experts\.deepspeed_experts\.(?P<number>\d{1,6})\.(?P<rest>.*)")
_STAGE_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_CODES = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}  # of a step that is a tensor
_ALIGNMENT = 2  # elements a rank, to which stages 1 and 2 fill a group up
_MOST_EXPERTS = 1 << 16
_COMPARED = 4096  # weights of a group, at most, with their 16-bit cast
Rows: TypeAlias = Mapping[int, Sequence[Entry]]  # of each rank, what it holds one behind the other
Made: TypeAlias = tuple[str, Callable[[], Entry]]  # a parameter, and what puts it together


# --- what the files say


class ModelState:
    """What a model file says. `shapes`: of the parameters in the optimizer, by group."""

    def __init__(self, file: str, root: Node, *, in_layers: bool = False) -> None:
        said = named_in(root)
        module = Dict(ordered=True) if in_layers and said.get("module") is None else said.get("module")
        if type(root) is not Dict or type(module) is not Dict:
            raise _malformed(file, "it has no weights (`module`)")
        self.file, self.root, self.module = file, root, module
        self.buffers = frozenset(name for name in listed_in(said.get("buffer_names")) if type(name) is str)
        self.shapes = tuple(_shapes(file, group) for group in listed_in(said.get("param_shapes")))
        self.frozen = _shapes(file, said.get("frozen_param_shapes"))
        self.fragments = {name: row for name, row in named_in(said.get("frozen_param_fragments")).items() if type(row) is Entry}
        self.shared = {name: holder for name, holder in named_in(said.get("shared_params")).items() if type(holder) is str}
        self.world, self.step = (
            size if type(size) is int else None for size in map(said.get, ("dp_world_size", "global_steps"))
        )
        rules = said.get("universal_checkpoint_info")
        self.rules = rules if type(rules) is Dict else None
        names = [name for group in self.shapes for name in group]
        if len(names) != len(set(names)):
            raise _malformed(file, "a parameter is in two groups")


class OptimizerState:
    """What one rank's optimizer file says. `flat`: its row of each group's weights; `counts`: how many ranks share a group."""

    def __init__(self, file: str, root: Node) -> None:
        said = named_in(named_in(root).get("optimizer_state_dict"))
        self.file, self.is_stage_3 = file, _STAGE_3 in said
        rows = listed_in(said.get(_STAGE_3 if self.is_stage_3 else _STAGE_2))
        if "ds_zero_partition_groups" in said:
            raise _malformed(file, "its experts are cut among other ranks than the rest under stage 3, which is not read")
        counts = tuple(count for count in listed_in(said.get("partition_count")) if type(count) is int)
        self.flat = tuple(row for row in rows if type(row) is Entry and len(row.shape) == 1 and row.is_contiguous)
        if min(counts, default=0) < 1 or len(self.flat) != len(rows) or (not self.is_stage_3 and _STAGE_2 not in said):
            raise _malformed(file, "it has no part of the weights, or it is not rows, or no partition_count")
        self.world = max(counts)
        self.counts = counts if len(counts) == len(rows) else (self.world,) * len(rows)
        paddings = [sizes_of(group) for group in listed_in(said.get("param_alignment_paddings"))]
        if any(group is None or min(group, default=0) < 0 for group in paddings):
            raise _malformed(file, "its param_alignment_paddings are not numbers")
        self.paddings = tuple(group for group in paddings if group is not None)
        inner = said.get("optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state")
        own = named_in(inner).get("state")
        # an elastic checkpoint of old versions has a list of states
        found = enumerate(inner.items) if type(inner) is List else own.items if type(own) is Dict else ()
        self.states = {number: one for number, one in found if type(number) is int and type(one) is Dict}
        self.groups = tuple(group for group in listed_in(named_in(inner).get("param_groups")) if type(group) is Dict)

    @property
    def steps(self) -> list[object]:
        """How often each group was stepped, by the state (torch) or by the group (Apex)."""
        found = list[object]()
        for values in (*(values for _, values in sorted(self.states.items())), *self.groups):
            step = values.get("step")
            if type(step) is Entry and step.numel == 1 and step.dtype.name in _CODES:
                found += struct.unpack(_CODES[step.dtype.name], read(row_major(step)))
            elif type(step) in (int, float):
                found.append(step)
        return found


def _shapes(file: str, node: Node) -> dict[str, Sizes]:
    shapes = {name: sizes_of(value) for name, value in named_in(node).items()}
    good = {name: shape for name, shape in shapes.items() if shape is not None and min(shape, default=0) >= 0}
    if wrong := [name for name in shapes if name not in good or prod(good[name]) > MAX_ELEMENTS]:
        raise _malformed(file, f"the shape of {wrong[0]!r} is not one")
    return good


def _malformed(file: str, why: str) -> PartError:
    return PartError(f"{file} cannot be joined with the others: {why}.")


# --- where a parameter's elements lie in the rows of the optimizer. Stages 1 and 2 put the parameters of a group behind one
# another and cut that row, stage 3 cuts each parameter by itself. Experts are on some ranks alone, which count their own.


class _Row:
    """Elements behind one another: of each part of them whose it is, its entry, None where that is missing, and its length."""

    def __init__(self, parts: Sequence[tuple[int, Entry | None, int]]) -> None:
        self.parts, self.ends = parts, list(accumulate(length for _, _, length in parts))

    def run(self, start: int, count: int, at: int) -> Iterator[Piece]:
        """Elements as pieces of a flattened tensor from its element `at` on; fewer where the row ends."""
        number = bisect_right(self.ends, start)
        while count > 0 and number < len(self.ends):
            rank, entry, length = self.parts[number]
            inside = start - (self.ends[number] - length)
            taken = min(count, length - inside)
            if entry is not None:
                yield Piece((at,), replace(entry, shape=(taken,), stride=(1,), offset=entry.offset + inside), rank)
            start, at, count, number = start + taken, at + taken, count - taken, number + 1


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters behind one another in `rows` of `ranks`. `paddings`: behind each; None where each is cut by itself."""

    shapes: Mapping[str, Sizes]
    rows: tuple[int, ...]
    ranks: Sequence[int]
    paddings: Sizes | None = None

    def _part(self, held: Mapping[int, int]) -> int:
        """How many elements each rank has, by those that are there, whose parts add up; the last one may have fewer."""
        last, count = self.ranks[-1], len(self.ranks)
        if self.paddings is None:
            part = sum(-(-prod(shape) // count) for shape in self.shapes.values())
            wrong = {rank: found for rank, found in held.items() if found != part}
        else:  # the last one's filling is left out by some versions
            numel = sum(map(prod, self.shapes.values())) + sum(self.paddings)
            longest = -(-numel // (_ALIGNMENT * count)) * _ALIGNMENT
            part = next((held[rank] for rank in held if rank != last or count == 1), longest)
            wrong = {rank: found for rank, found in held.items() if found > part or (found < part and rank != last)}
            total = part * (count - 1) + held.get(last, part)
            wrong = wrong or ({} if numel <= total <= longest * count else dict(held))
        if wrong:
            counts = listed([f"rank {rank} holds {found}" for rank, found in sorted(wrong.items())])
            raise PartError(f"The parts do not add up: {counts} elements of {some(list(self.shapes))}; others hold {part}.")
        return part

    def cut(self, held: Rows) -> Iterator[tuple[str, Sizes, list[Piece]]]:
        """Each parameter with its shape and where it lies on the ranks that are there."""
        count, rows = len(self.ranks), dict[int, _Row]()
        whole = self._part({rank: sum(entry.numel for entry in entries) for rank, entries in held.items()})
        if self.paddings is None:  # the last part is filled up; rows behind it hold nothing but filling
            for number, rank in enumerate(self.ranks):
                rows[number] = _Row([(rank, entry, entry.numel) for entry in held.get(rank, ())])
        else:  # one row of all ranks
            every = [(rank, *held.get(rank, (None,))) for rank in self.ranks]
            rows[0] = _Row([(rank, one, whole if one is None else one.numel) for rank, one in every])
        start = 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings or (0,) * len(self.shapes), strict=True):
            numel = prod(shape)
            part = -(-numel // count) if self.paddings is None else numel
            parts = ((row, number * part) for number, row in rows.items())
            yield name, shape, [piece for row, at in parts for piece in row.run(start, min(part, numel - at), at)]
            start += part + padding


def groups_of(model: ModelState, optimizers: Mapping[int, OptimizerState], world: int) -> list[Group]:
    """The groups of parameters, each with the rows that it lies in."""
    first = next(iter(optimizers.values()))
    if not first.is_stage_3:
        paddings = first.paddings or tuple((0,) * len(shapes) for shapes in model.shapes)
        if len(first.flat) != len(model.shapes) or list(map(len, paddings)) != list(map(len, model.shapes)):
            raise PartError(f"{model.file} has {len(model.shapes)} groups of parameters, and {first.file} has other ones.")
        return [
            Group(names, (number,), holders, paddings[number])
            for number, shapes in enumerate(model.shapes)
            for holders, names in _holders(model, shapes, first.counts[number], world)
        ]
    needed = [sum(-(-prod(shape) // world) for shape in shapes.values()) for shapes in model.shapes]
    if needed == [entry.numel for entry in first.flat]:
        return [Group(shapes, (number,), range(world)) for number, shapes in enumerate(model.shapes)]
    # sub-groups, cut elsewhere: one row of all
    every = {name: shape for shapes in model.shapes for name, shape in shapes.items()}
    return [Group(every, tuple(range(len(first.flat))), range(world))]


def _holders(
    model: ModelState, shapes: Mapping[str, Sizes], count: int, world: int
) -> Iterator[tuple[Sequence[int], Mapping[str, Sizes]]]:
    """The ranks among which a group is cut, and its names in the whole model; experts of several ranks are several groups."""
    if count == world:
        yield range(world), shapes
        return
    experts = [match for name in shapes if (match := EXPERT.fullmatch(name))]
    numbers: dict[str, set[int]] = {}
    for match in experts:
        numbers.setdefault(match["layer"], set()).add(int(match["number"]))
    times = world // count
    if len(experts) < len(shapes) or world % count or times * sum(map(len, numbers.values())) > _MOST_EXPERTS:
        raise PartError(f"{some(list(shapes))} are cut among {count} of {world} ranks, and not all are experts of a mixture.")
    config = model.root.get("ds_config")
    data_first = type(config) is Dict and config.get("use_data_before_expert_parallelism") is True
    for own in range(times):
        renamed = {}
        for match in experts:
            start, end = match.span("number")
            number = own * len(numbers[match["layer"]]) + int(match["number"])
            renamed[f"{match.string[:start]}{number}{match.string[end:]}"] = shapes[match.string]
        yield range(own * count, (own + 1) * count) if data_first else range(own, world, times), renamed


# --- a slice


class Slice:
    """What the files of one slice say: a tensor parallel rank, a stage of a pipeline, or all of the model."""

    def __init__(
        self, models: Mapping[int, ModelState], optimizers: Mapping[int, OptimizerState], merger: Merger, world: int,
        missing: Sequence[str],
    ) -> None:  # fmt: skip
        self.models, self.optimizers, self.merger, self.world, self.missing = models, optimizers, merger, world, missing
        self.model, self.first = next(iter(models.values())), next(iter(optimizers.values()), None)
        self.is_stage_3 = self.first is not None and self.first.is_stage_3
        self.groups = groups_of(self.model, optimizers, world) if optimizers else []

    @cached_property
    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        if self.first is None:  # without ZeRO the model file has them
            return self.model.module
        parameters = chain.from_iterable(self._cut(group, self._flat_of(group)) for group in self.groups)
        made: dict[str, Node | Drop] = {
            name: self.merger.unless_lost(name, make) for name, make in chain(parameters, self._frozen())
        }
        module, buffers, shared = self.model.module.named, self.model.buffers, self.model.shared
        tied = {_place(entry): name for name in made if type(entry := module.get(name)) is Entry and entry.numel}
        for name, value in module.items():
            if name in made or name in shared:
                continue
            if name not in buffers and _place(value) in tied:
                made[name] = made[tied[_place(value)]]
            elif self.is_stage_3 and type(value) is Entry and name not in buffers and value.shape == (0,):
                made[name] = self.merger.unless_lost(name, partial(self._nowhere, name))
            else:  # buffers, extra states, under stage 1 frozen weights
                made[name] = value
        for name, holder in shared.items():
            if name in made:
                continue
            if holder not in made:
                raise PartError(f"{name!r} is tied to {holder!r}, which is not in the checkpoint, or only by a tie too.")
            made[name] = made[holder]
        order = dict.fromkeys((*module, *made))
        root = Dict([(name, whole) for name in order if (whole := made[name]) is not DROP], ordered=True)
        gone = (name for name in order if made[name] is DROP and name not in self.merger.lost)
        self.merger.lost |= dict.fromkeys(gone, "is tied to what is not whole")
        root.attributes = self.model.module.attributes
        return root

    def _flat_of(self, group: Group) -> Rows:
        there = [rank for rank in group.ranks if rank in self.optimizers]
        return {rank: [self.optimizers[rank].flat[row] for row in group.rows] for rank in there}

    def _cut(self, group: Group, held: Rows) -> Iterator[Made]:
        """The parameters of a group, and what puts each together from the ranks' rows of it."""
        # of experts whose ranks are all missing there are no rows
        dtype = next(chain(*held.values(), *(state.flat for state in self.optimizers.values()))).dtype
        for name, shape, pieces in group.cut(held):
            yield name, partial(self.merger.tensor, name, dtype, shape, pieces, measured=(prod(shape),))

    def _nowhere(self, name: str) -> Node:
        raise PartError(f"The model has {name!r}, and no rank holds a part of it.", rest=bool(self.missing))

    def _frozen(self) -> Iterator[Made]:
        """The weights that are not trained: whole under stage 2, a part on each rank under stage 3."""
        for name, shape in self.model.frozen.items():
            parts = {rank: entry for rank, model in self.models.items() if (entry := model.fragments.get(name)) is not None}
            if not all(entry.is_contiguous for entry in parts.values()):  # as DeepSpeed never saves one
                raise PartError(f"The frozen weight {name!r} does not lie row by row.")
            rows = {rank: [replace(entry, shape=(entry.numel,), stride=(1,))] for rank, entry in parts.items()}
            group = Group({name: shape}, (0,), range(self.world) if self.is_stage_3 else list(self.models))
            yield from self._cut(group, rows)

    # --- what is there beside the weights

    def module(self) -> Dict:
        if self.is_stage_3:
            raise PartError("ZeRO 3 saves no 16-bit weights.", fix="Take the fp32 ones, and cast them: `dtype='bf16'`.")
        return self.model.module

    def optimizer(self) -> tuple[dict[str, Dict], list[tuple[list[Pair], list[str]]]]:
        """The optimizer's state by the parameters' names, and its groups: their values, and the names of their parameters."""
        if self.first is None or not self.first.states:
            raise PartError("The files have no optimizer state.")
        if self.missing:
            raise PartError(f"The optimizer's state needs the files of all ranks; missing: {listed(self.missing)}.")
        state = dict(pair for group in self.groups for pair in self._states(group))
        names: dict[int, list[str]] = {}
        for group in self.groups:
            names.setdefault(group.rows[0], []).extend(group.shapes)
        groups = []
        for values in self.first.groups:
            numbers = [row for row in listed_in(values.get("params")) if type(row) is int]
            own = [name for row in numbers for name in names.get(row, ())]
            groups.append(([item for item in values.items if item[0] != "params"], own))
        return state, groups

    def _states(self, group: Group) -> list[tuple[str, Dict]]:
        """The state of each parameter of a group: rows cut as the weights are, and steps as they are."""
        first = self.optimizers[group.ranks[0]].states.get(group.rows[0], Dict())
        made: dict[str, list[Pair]] = {name: [] for name in group.shapes}
        for key, value in first.items:
            if type(value) is Entry and value.shape:
                rows = {rank: [self._row(rank, row, key) for row in group.rows] for rank in group.ranks}
                for name, make in self._cut(group, rows):
                    made[name].append((key, make()))
            else:
                for items in made.values():  # each has a tensor `step` of its own: torch counts it up in place
                    items.append((key, self.merger.keys.renew(value)))
        return [(name, Dict(items)) for name, items in made.items()]

    def _row(self, rank: int, row: int, key: Node) -> Entry:
        """One state of a rank's row, which is as long as the weights there; stages 1 and 2 may fill it up."""
        state = self.optimizers[rank]
        entry, wanted = state.states.get(row, Dict()).get(key) if type(key) is str else None, state.flat[row].numel
        length = entry.numel if type(entry) is Entry and len(entry.shape) == 1 and entry.is_contiguous else -1
        if type(entry) is not Entry or length < wanted or (self.is_stage_3 and length > wanted):
            raise PartError(f"{state.file} has {wanted} weights in a row, and its optimizer's {key!r} has not as many.")
        return replace(entry, shape=(wanted,))

    # --- what the bytes say

    def check_evidence(self, module: Mapping[str, Node] | None) -> None:
        """Against the names of the optimizer's files: that none is there twice, and the 16-bit weights are those rounded."""
        for group in self.groups:
            check_not_twice({self.optimizers[rank].file: rows for rank, rows in self._flat_of(group).items()})
        if self.is_stage_3:
            check_not_twice({model.file: [*model.fragments.values()] for model in self.models.values()})
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
                    yield self.optimizers[int(piece.rank)].file, name, piece.entry, run

    def differing_buffers(self) -> Iterator[str]:
        """Compare the buffers of all ranks, which each of them may count by itself (batch norm)."""
        for name in self.model.buffers:
            every = [entry for model in self.models.values() if type(entry := model.module.get(name)) is Entry]
            if type(self.model.module.get(name)) is Entry and (
                len(every) < len(self.models)
                or len({(entry.shape, entry.dtype.name) for entry in every}) > 1
                or not all(same_bytes(every[0], other) for other in every[1:] if other.numel)
            ):
                yield name


def _place(node: Node) -> tuple[object, ...]:
    return (id(node.storage), node.offset, node.shape, node.stride) if type(node) is Entry else (id(node),)
