"""deepspeed: a folder of DeepSpeed's ZeRO 1, 2 or 3, whose ranks each hold a part of the fp32 weights and of the optimizer.

    mp_rank_00_model_states.pt                       MUST under stages 1 and 2: names, shapes, 16-bit weights, buffers
    zero_pp_rank_R_mp_rank_00_model_states.pt        MUST under stage 3, one a rank: names, shapes, buffers, frozen weights
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt MUST, one a rank: rows of fp32 weights and of the optimizer's state
    latest                                           beside the folder: its name

The tree is the state dict of the fp32 weights, in the model's order. Beside it, for `--select`, are `module` (stages 1 and 2:
the 16-bit weights), `optimizer` (as torch's `get_optimizer_state_dict` has it, by the parameters' names) and `training` (the
model, the optimizer, and what else the model file holds).

Source: deepspeed/utils/zero_to_fp32.py; states.py reads what each file says, rows.py works out what lies where.
"""

from __future__ import annotations

import shlex
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TypeAlias

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Decoded, Warned
from ckpt_tools.formats.parts.merging import Merger
from ckpt_tools.formats.parts.zero.names import ZeroFiles
from ckpt_tools.formats.parts.zero.rows import Group, groups_of
from ckpt_tools.formats.parts.zero.states import ModelState, OptimizerState, read_model, read_optimizer
from ckpt_tools.formats.sharded import Keys, joined
from ckpt_tools.io.content import read
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.text import listed, some, these_ranks
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.boxes import Sizes
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.same_bytes import same_bytes

CONTAINER = "deepspeed"
_SAVE = "Load the folder with DeepSpeed, on as many processes, and save the whole there: engine.save_16bit_model(FOLDER)."
# What a model file says about the parts, which is not a part any more.
_OF_PARTS = frozenset((
    "module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
))  # fmt: skip

_CODES = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}  # of a step that is a tensor

_NAMED = 100  # missing ranks, of which more are only counted

DecodeFile: TypeAlias = Callable[[Source], Decoded]


def decode(found: ZeroFiles, files: Files, decode_file: DecodeFile) -> Decoded:
    """Read the structure of every file and put the weights together; of tensor bytes only step counters.

    Raises:
        PartError: a part is missing, doubled, of another step or number of ranks, or sizes do not add up; experts, stages of a
        pipeline and tensor parallel parts, which are not joined.
    """
    _check_kind(found)
    read_files: list[Decoded] = []

    def root_of(name: str) -> Node:
        read_files.append(decode_file(files.open(name)))
        return read_files[-1].root

    keys = Keys()
    optimizers = {rank: read_optimizer(name, root_of(name)) for rank, name in sorted(found.optimizers.items())}
    _check_ranks(optimizers)
    models = _models(found, root_of, optimizers, keys)
    merging = _Merging(models, optimizers, keys)
    made = joined(CONTAINER, merging.weights(), files, read_files, {})
    made.globals = [node for node in reachable(made.root) if type(node) is Global]
    made.unusual, made.has_checksums = (
        [],
        False,
    )  # what weights_only and a CRC-32 say of the ranks' files is not said of the whole
    made.warnings.append(merging.beside(files.path))
    made.others = merging.others()

    def locate(root: Node) -> Node:
        made.warnings += merging.differing_buffers()
        return root

    made.locate = locate
    return made


def _check_kind(found: ZeroFiles) -> None:
    """Only data parallel parts are joined: the others are refused by name."""
    others = {"experts of a mixture": found.experts, "layers of a pipeline": found.layers}
    for what, names in others.items():
        if names:
            raise PartError(f"{names[0]} and {len(names) - 1} more are {what}, which ckpt does not join yet.", fix=_SAVE)
    if len(found.slices) > 1 or found.slices - {0}:
        raise PartError(
            f"These are tensor parallel parts, of the slices {listed(sorted(found.slices))}, which ckpt does not join yet.",
            fix=_SAVE,
        )
    if found.doubled:
        raise PartError(f"{some(found.doubled)} are parts of ranks that have a file already.", fix="Remove one of the two.")
    if not found.optimizers:
        raise PartError(
            "There is no file of the optimizer (zero_pp_rank_0_mp_rank_00_optim_states.pt), which holds the fp32 weights.",
            fix="Get the files of all ranks.",
        )


def _check_ranks(optimizers: Mapping[int, OptimizerState]) -> None:
    worlds = {state.world for state in optimizers.values()}
    if len(worlds) > 1:
        said = listed([f"rank {rank} of {state.world}" for rank, state in optimizers.items()])
        raise PartError(f"The optimizer's parts are of several jobs: {said}.", why="They were saved by other numbers of ranks.")
    _check_world("optim_states.pt", sorted(optimizers), worlds.pop())
    steps = {rank: list(_steps(state)) for rank, state in optimizers.items()}
    if other := [rank for rank in steps if steps[rank] != steps[0]]:
        own, theirs = (listed(list(dict.fromkeys(steps[rank]))) or "no" for rank in (0, other[0]))
        raise PartError(
            f"The optimizer has made {own} steps on rank 0, and {theirs} on {these_ranks(other)}.",
            why="They were saved at different steps.",
        )


def _check_world(kind: str, ranks: list[int], world: int) -> None:
    there = frozenset(ranks)
    missing = [rank for rank in range(min(world, len(ranks) + _NAMED)) if rank not in there]  # a file may say any number
    beyond = [rank for rank in ranks if rank >= world]
    if missing or beyond:
        what = f"missing: {world - len(ranks)}" if len(missing) >= _NAMED else ""
        what = what or f"missing: {these_ranks(missing)}" if missing else f"{these_ranks(beyond)} would be beyond it"
        raise PartError(
            f"The checkpoint has {world} files *_{kind}, one a rank; {what}.", why=f"{len(ranks)} are there.",
            fix="Get the others too: every rank holds a part of every weight.",
        )  # fmt: skip


def _steps(state: OptimizerState) -> Iterator[object]:
    """How often each group was stepped, by the state (torch) or by the group (Apex)."""
    for values in (*(values for _, values in sorted(state.states.items())), *state.groups):
        step = values.get("step")
        if type(step) is Entry and step.numel == 1 and step.dtype.name in _CODES:
            yield struct.unpack(_CODES[step.dtype.name], read(row_major(step)))[0]
        elif type(step) in (int, float):
            yield step


def _models(
    found: ZeroFiles, root_of: Callable[[str], Node], optimizers: Mapping[int, OptimizerState], keys: Keys
) -> dict[int, ModelState]:
    """The model files by rank: one for all under stages 1 and 2."""
    is_stage_3 = optimizers[0].is_stage_3
    names = found.models if is_stage_3 else {0: found.whole} if found.whole is not None else {}
    if other := [found.whole] if is_stage_3 and found.whole else [] if is_stage_3 else list(found.models.values()):
        raise PartError(
            f"{other[0]} is of another stage of ZeRO than the optimizer's parts.", fix="Remove what is of another save."
        )
    if not names and not is_stage_3:
        raise PartError(
            "mp_rank_00_model_states.pt is missing, which says the names and shapes of the weights.", fix="Get it too."
        )
    models = {}
    for rank, name in sorted(names.items()):
        root = root_of(name)
        models[rank] = read_model(name, keys.renew(root) if rank == 0 else root)
    if is_stage_3:
        _check_world("model_states.pt", sorted(models), len(optimizers))
    _check_models(models, len(optimizers))
    return models


def _check_models(models: Mapping[int, ModelState], world: int) -> None:
    first = models[0]
    for rank, model in models.items():
        if model.world is not None and model.world != world:
            raise PartError(f"{model.file} is of a job of {model.world} ranks; here are the optimizer's files of {world}.")
        if model.step != first.step:
            raise PartError(
                f"'global_steps' is {first.step} in {first.file}, and {model.step} in {model.file}.",
                why="They were saved at different steps.",
            )
        if (model.shapes, model.frozen) != (first.shapes, first.frozen) or list(model.names) != list(first.names):
            raise PartError(f"{model.file} has other parameters on rank {rank} than {first.file}.")


class _Merging:
    """What all files say, on its way into one checkpoint."""

    def __init__(self, models: Mapping[int, ModelState], optimizers: Mapping[int, OptimizerState], keys: Keys) -> None:
        self.models, self.optimizers, self.keys = models, optimizers, keys
        self.model, self.first = models[0], optimizers[0]
        self.merger = Merger(keys)
        self.groups = groups_of(self.model, optimizers)

    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        return self._weights

    @cached_property
    def _weights(self) -> Dict:
        made: dict[str, Node] = {}
        for group in self.groups:
            pieces = {rank: [state.flat[row] for row in group.rows] for rank, state in self.optimizers.items()}
            made.update(self._cut(group, pieces, "the weights"))
        made.update((name, self._frozen(name, shape)) for name, shape in self.model.frozen.items())
        module = self.model.module.named
        tied = {_place(entry): name for name in made if type(entry := module.get(name)) is Entry and entry.numel}
        for name, value in module.items():
            if name not in made and name not in self.model.shared:
                made[name] = self._as_it_is(name, value, made.get(tied.get(_place(value), "")))
        for name in self.model.shared:
            made.setdefault(name, self._holder(name, made))
        order = dict.fromkeys((*module, *made))
        root = Dict([(name, made[name]) for name in order if name in made], ordered=True)
        root.attributes = self.model.module.attributes
        return root

    def _cut(self, group: Group, pieces: Mapping[int, list[Entry]], what: str) -> Iterator[tuple[str, Entry]]:
        """The parameters of a group, put together from each rank's rows of it."""
        dtypes = {entry.dtype.name: entry.dtype for entries in pieces.values() for entry in entries}
        if len(dtypes) != 1:
            raise PartError(f"The ranks have {what} of {some(list(group.shapes))} in several dtypes: {listed(list(dtypes))}.")
        (dtype,) = dtypes.values()
        for name, shape, shares in group.cut(pieces, one_by_one=self.first.is_stage_3):
            yield name, self.merger.tensor(name, dtype, shape, shares, measured=(prod(shape),))

    def _frozen(self, name: str, shape: Sizes) -> Entry:
        """A weight that is not trained: whole under stage 2, a part on each rank under stage 3."""
        fragments = {rank: model.fragments.get(name) for rank, model in self.models.items()}
        if missing := [rank for rank, entry in fragments.items() if entry is None]:
            raise PartError(f"The frozen weight {name!r} is not in the files of {these_ranks(missing)}.")
        parts = {rank: _flat(entry) for rank, entry in fragments.items() if entry is not None}
        group = Group({name: shape}, (0,), (0,))
        wanted = group.part(len(parts)) if self.first.is_stage_3 else prod(shape)
        if wrong := {rank: entry.numel for rank, entry in parts.items() if entry.numel != wanted}:
            held = listed([f"rank {rank} holds {count}" for rank, count in wrong.items()])
            raise PartError(f"The frozen weight {name!r} does not add up: {held} elements; it should be {wanted}.")
        return next(entry for _, entry in self._cut(group, {rank: [entry] for rank, entry in parts.items()}, "a frozen weight"))

    def _as_it_is(self, name: str, value: Node, tied: Node) -> Node:
        """What lies in the model file itself: buffers, extra states, under stage 1 frozen weights, tied ones without a word."""
        if tied is not None and name not in self.model.buffers:
            return tied
        if self.first.is_stage_3 and type(value) is Entry and name not in self.model.buffers and value.shape == (0,):
            raise PartError(
                f"The model has {name!r}, and no rank holds a part of it.",
                why="The files say neither its shape nor where it lies.",
            )
        return value

    def _holder(self, name: str, made: Mapping[str, Node]) -> Node:
        """The weight that a tied name stands for."""
        holder, seen = self.model.shared[name], {name}
        while holder not in made and holder in self.model.shared and holder not in seen:
            seen.add(holder)
            holder = self.model.shared[holder]
        if holder not in made:
            raise PartError(f"{name!r} is tied to {holder!r}, which is not in the checkpoint.")
        return made[holder]

    # --- what is there beside the weights

    def beside(self, path: Path) -> Warned:
        """What `--select` takes instead of the weights."""
        found = [f"{name} ({what})" for name, what in (
            ("module", "" if self.first.is_stage_3 else "the weights as they were trained with"),
            ("optimizer", "its state by the parameters' names" if self.first.states else ""),
            ("training", "model, optimizer and what else was saved"),
        ) if what]  # fmt: skip
        fix = f"ckpt convert {shlex.quote(str(path))} training.pth --select training"
        return Warned(
            "beside-the-weights", f"without --select it is the fp32 weights; --select takes {', '.join(found)}", "", "info", fix
        )

    def others(self) -> dict[str, Callable[[], Node]]:
        """What `--select` takes instead of the weights, made when it is wanted."""
        return {"module": self.module, "optimizer": self.optimizer, "training": self.training}

    def module(self) -> Node:
        """The weights as they were trained with.

        Raises:
            PartError: stage 3 keeps none.
        """
        if self.first.is_stage_3:
            raise PartError(
                "ZeRO 3 saves no 16-bit weights.", why="The model files hold tensors without elements.",
                fix="Take the fp32 ones, and cast them: --dtype bf16.",
            )  # fmt: skip
        return self.model.module

    def training(self) -> Node:
        """The model, the optimizer, and what else the model file holds (steps, epochs, a scheduler)."""
        rest = [(key, value) for key, value in self.model.root.items if key not in _OF_PARTS and key != "model"]
        return Dict([("model", self.weights()), ("optimizer", self.optimizer()), *rest])

    def optimizer(self) -> Node:
        """The optimizer's state as torch's `get_optimizer_state_dict` has it: by the parameters' names.

        Raises:
            PartError: a rank has no state where others have one, or one of another size; there is none at all.
        """
        if not self.first.states:
            raise PartError("The files have no optimizer state.")
        state = [pair for group in self.groups for pair in self._states(group)]
        names = {row: list(group.shapes) for group in self.groups for row in group.rows[:1]}
        groups: list[Node] = []
        for values in self.first.groups:
            rows = values.get("params")
            numbers = [row for row in (rows.items if type(rows) is List else ()) if type(row) is int]
            own = [name for row in numbers for name in names.get(row, ())]
            rest = [(key, value) for key, value in values.items if key != "params"]
            groups.append(Dict([*rest, ("params", List(list(own)))]))
        return Dict([("state", Dict(state)), ("param_groups", List(groups))])

    def _states(self, group: Group) -> Iterator[tuple[Node, Node]]:
        """The state of each parameter of a group: rows cut as the weights are, and steps as they are."""
        first = [self.first.states.get(row, Dict()) for row in group.rows]
        made: dict[str, list[tuple[Node, Node]]] = {name: [] for name in group.shapes}
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
        for rank, state in self.optimizers.items():
            for row in group.rows:
                entry = state.states.get(row, Dict()).get(key) if type(key) is str else None
                held, wanted = entry.shape if type(entry) is Entry else (), state.flat[row].numel
                too_long = self.first.is_stage_3 and held > (wanted,)
                if type(entry) is not Entry or len(held) != 1 or held < (wanted,) or too_long:
                    shown = listed(held) if held else "no"
                    raise PartError(
                        f"The optimizer's {key!r} of {some(list(group.shapes))} has {shown} elements on rank {rank}.",
                        why=f"The weights there have {wanted}.",
                    )
                found.setdefault(rank, []).append(entry)
        return found

    def differing_buffers(self) -> list[Warned]:
        """Compare the buffers of all ranks, which each of them may count by itself (batch norm)."""
        wrong = []
        for name in self.model.buffers:
            own = self.model.module.get(name)
            others = [model.module.get(name) for rank, model in self.models.items() if rank]
            if type(own) is Entry and not all(_same(own, other) for other in others):
                wrong.append(name)
        text = f"buffers differ between ranks, the first rank's are taken: {some(sorted(wrong))}"
        return [Warned("parts-differ", text)] if wrong else []


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
