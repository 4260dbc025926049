"""One slice of a DeepSpeed checkpoint as a model: its fp32 weights, and its optimizer's state by the parameters' names.

Source: deepspeed/utils/zero_to_fp32.py; states.py reads what each file says, rows.py works out what lies where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, product
from math import prod

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Keys
from ckpt_tools.parts import evidence
from ckpt_tools.parts.merge import Merger
from ckpt_tools.parts.zero_rows import Group, groups_of
from ckpt_tools.parts.zero_states import ModelState, OptimizerState
from ckpt_tools.text import listed, some, these_ranks
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Pair
from ckpt_tools.values.boxes import Sizes
from ckpt_tools.values.same_bytes import same_bytes

_COMPARED = 4096  # weights of a group, at most, with their 16-bit cast


@dataclass(frozen=True, slots=True)
class NamedState:
    """An optimizer's state by the parameters' names; of each group what it says, and its parameters."""

    state: Mapping[str, Dict]
    groups: Sequence[tuple[Sequence[Pair], Sequence[str]]]

    @property
    def node(self) -> Dict:
        """As torch's `get_optimizer_state_dict` has it."""
        groups: list[Node] = [Dict([*said, ("params", List(list(names)))]) for said, names in self.groups]
        return Dict([("state", Dict(list(self.state.items()))), ("param_groups", List(groups))])


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
        self.merger = Merger(keys)
        self.groups = groups_of(self.model, optimizers, world) if optimizers else []
        self.partial, self.lost = partial, dict[str, str]()

    @property
    def missing(self) -> list[int]:
        """The ranks whose part of the optimizer is not there."""
        return [rank for rank in range(self.world) if rank not in self.optimizers] if self.optimizers else []

    @cached_property
    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        if self.first is None:  # without ZeRO the model file has them
            return self.model.module
        made: dict[str, Node] = {}
        for group in self.groups:
            pieces = self._flat_of(group)
            made.update(self._cut(group, pieces, "the weights"))
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

    def _cut(self, group: Group, pieces: Mapping[int, list[Entry]], what: str) -> Iterator[tuple[str, Entry]]:
        """The parameters of a group, put together from each rank's rows of it."""
        dtypes = {entry.dtype.name: entry.dtype for entries in pieces.values() for entry in entries}
        if len(dtypes) != 1:
            raise PartError(f"The ranks have {what} of {some(list(group.shapes))} in several dtypes: {listed(list(dtypes))}.")
        (dtype,) = dtypes.values()
        for name, shape, shares in group.cut(pieces):
            try:
                yield name, self.merger.tensor(name, dtype, shape, shares, measured=(prod(shape),))
            except PartError as error:
                if not (self.partial and error.rest):
                    raise
                self.lost[name] = error.what.removeprefix(f"{name!r} ").rstrip(".")

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

    def optimizer(self) -> NamedState:
        """The optimizer's state by the parameters' names."""
        if self.first is None or not self.first.states:
            raise PartError("The files have no optimizer state.")
        if self.missing:
            raise PartError(f"The optimizer's state needs the files of all ranks; missing: {these_ranks(self.missing)}.")
        state = dict(pair for group in self.groups for pair in self._states(group))
        names: dict[int, list[str]] = {}
        for group in self.groups:
            names.setdefault(group.rows[0], []).extend(group.shapes)
        groups = []
        for values in self.first.groups:
            rows = values.get("params")
            numbers = [row for row in (rows.items if type(rows) is List else ()) if type(row) is int]
            own = [name for row in numbers for name in names.get(row, ())]
            groups.append(([(key, value) for key, value in values.items if key != "params"], own))
        return NamedState(state, groups)

    def _states(self, group: Group) -> Iterator[tuple[str, Dict]]:
        """The state of each parameter of a group: rows cut as the weights are, and steps as they are."""
        first = [self.optimizers[group.ranks[0]].states.get(row, Dict()) for row in group.rows]
        made: dict[str, list[Pair]] = {name: [] for name in group.shapes}
        for key, value in first[0].items:
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
            evidence.check_not_twice(self._flat_of(group), self.merger.shown)
        evidence.check_casts(self._casts(self.model.module.named if module is None else module))

    def _casts(self, module: Mapping[str, Node]) -> Iterator[tuple[str, str, Entry, Entry]]:
        """Each rank's runs of the weights, with the same runs of the 16-bit ones."""
        groups = () if self.is_stage_3 else self.groups
        cuts = chain.from_iterable(islice(group.cut(self._flat_of(group)), _COMPARED) for group in groups)
        for name, _, shares in cuts:
            cast = module.get(name)
            if type(cast) is not Entry or not cast.is_contiguous:
                continue
            for share in shares:
                if cast.numel >= share.offsets[0] + share.sizes[0]:
                    run = replace(cast, shape=share.sizes, stride=(1,), offset=cast.offset + share.offsets[0])
                    yield self.optimizers[share.rank].file, name, share.entry, run

    def differing_buffers(self) -> list[str]:
        """Compare the buffers of all ranks, which each of them may count by itself (batch norm)."""
        wrong = []
        (rank_of_first, *_) = self.models
        for name in self.model.buffers:
            own = self.model.module.get(name)
            others = [model.module.get(name) for rank, model in self.models.items() if rank != rank_of_first]
            if type(own) is Entry and not all(_same(own, other) for other in others):
                wrong.append(name)
        return wrong


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
