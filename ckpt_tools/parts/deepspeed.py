"""deepspeed: a folder of DeepSpeed, whose ranks each hold a part of the fp32 weights and of the optimizer (ZeRO).

    mp_rank_00_model_states.pt                       MUST but under stage 3: names, shapes, 16-bit weights, buffers
    zero_pp_rank_R_mp_rank_00_model_states.pt        MUST under stage 3, one a rank: names, shapes, buffers, frozen weights
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt MUST under ZeRO, one a rank: rows of fp32 weights, of the optimizer
    ... mp_rank_01 ...                               the same of every tensor parallel rank, or stage of a pipeline
    layer_0_expert_3_mp_rank_00_model_states.pt      experts of a mixture; layer_03-model_states.pt: layers of a pipeline
    latest                                           beside the folder: its name

The tree is the state dict of the fp32 weights, in the model's order. Beside it, for `--select`, are `module` (not under
stage 3: the 16-bit weights), `optimizer` (as torch's `get_optimizer_state_dict` has it, by the parameters' names) and
`training` (the model, the optimizer, and what else the model file holds).

Source: deepspeed/runtime/engine.py (`_save_checkpoint`), deepspeed/utils/zero_to_fp32.py. deepspeed_files.py reads what each
file says, deepspeed_slice.py makes a model of the ranks of one slice.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Keys, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.deepspeed_files import (
    ModelState,
    OptimizerState,
    Rules,
    check_experts,
    read_model,
    read_optimizer,
    with_experts,
    with_layers,
)
from ckpt_tools.parts.deepspeed_slice import Slice, optimizer_of
from ckpt_tools.parts.merge import Merger, check_same, check_world, merged
from ckpt_tools.parts.names import ZeroFiles, zero_files
from ckpt_tools.parts.sharded import partly
from ckpt_tools.text import listed, some
from ckpt_tools.tree.exchange import DROP
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Pair, as_dict
from ckpt_tools.tree.visit import reachable

CONTAINER = "deepspeed"
_SAVE = "Load the folder with DeepSpeed, on as many processes, and save the whole there: engine.save_16bit_model(FOLDER)."
# What a model file says about the parts, which is not a part any more.
_OF_PARTS = frozenset((
    "module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
))  # fmt: skip


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    found = zero_files(names)
    if found.doubled:
        raise PartError(f"{some(found.doubled)} are parts of ranks that have a file already.", fix="Remove one of the two.")
    reading = _Reading(found, files, partial=partial)
    model = reading.model()
    made = merged(CONTAINER, model.weights, files, reading.read_files)
    made.globals = [node for node in reachable(made.root) if type(node) is Global]
    made.unusual = []  # these are said of the ranks' files, not of the whole
    made.warnings.append(_beside(reading.first, files.path))
    gone = [f"zero_pp_rank_{rank}_mp_rank_{number:02d}_*" for number, own in reading.slices.items() for rank in own.missing]
    if missing := reading.missing + gone:
        made.warnings.append(partly("files of ranks are", missing))
    made.others = _others(model, reading.first)
    made.lost = list(model.lost.items())
    if model.lost and not model.weights.items:
        name, why = made.lost[0]
        raise PartError(f"No tensor is whole in these files: {name!r} {why}, and {len(model.lost) - 1} more.")

    def locate(root: Node) -> Node:
        model.check_evidence()
        if wrong := model.differing_buffers():
            text = f"buffers differ between ranks, the first rank's are taken: {some(sorted(wrong))}"
            made.warnings.append(Warned("parts-differ", text))
        return root

    made.locator = locate
    return made


class _Reading:
    """The files of a folder on their way into one model."""

    def __init__(self, found: ZeroFiles, files: Files, *, partial: bool) -> None:
        self.found, self.files, self.partial = found, files, partial
        self.keys, self.read_files = Keys(), list[Checkpoint]()
        self.experts, self.layers = found.kinds["expert"], found.kinds["layer"]
        self.slices: dict[int, Slice] = {}
        self.missing = list[str]()

    @property
    def first(self) -> Slice:
        return next(iter(self.slices.values()))

    def root_of(self, name: str, *, renewed: bool = False) -> Node:
        """What a file holds; `renewed` if its tensors come into the tree as they are."""
        self.read_files.append(decode_file(self.files.open(name)))
        root = self.read_files[-1].root
        return self.keys.renew(root) if renewed else root

    def model(self) -> Slice | Slices:
        slices, unnamed = self.found.slices, [*self.found.kinds["expert-optimizer"].values()]
        if self.experts and (self.layers or len(slices) > 1):
            raise PartError(
                f"{next(iter(self.experts.values()))} and {len(self.experts) - 1} more are experts of a mixture "
                "whose model is cut in another way too, which is not read.", fix=_SAVE,
            )  # fmt: skip
        if unnamed and self.found.kinds["optimizer"]:
            raise PartError(f"{unnamed[0]} is of a save without ZeRO.", fix="Remove what is of another save.")
        self.slices = {number: self._slice(number) for number in slices}
        if self._check_slices() == 1 and not self.layers:
            return self.first
        layers = None  # the 16-bit weights of a pipeline
        if self.layers:
            shapes = {name: shape for own in self.slices.values() for row in own.model.shapes for name, shape in row.items()}
            roots = {name: (key[0], self.root_of(name, renewed=True)) for key, name in sorted(self.layers.items())}
            layers = with_layers(roots, shapes)
        return Slices(self.slices, self.keys, self._rules(), layers, partial=self.partial)

    def _slice(self, number: int) -> Slice:
        names = self.found.of_slice("optimizer", number)
        optimizers = {rank: read_optimizer(name, self.root_of(name)) for rank, name in names.items()}
        check_same("number of ranks", {state.file: state.world for state in optimizers.values()})
        check_same("number of the optimizer's steps", {state.file: state.steps for state in optimizers.values()})
        world = next((state.world for state in optimizers.values()), 1)
        if optimizers:
            said = f"The checkpoint has {world} files *_optim_states.pt, one a rank"
            check_world(said, optimizers, world, partial=self.partial)
        models = self._models(number, optimizers, world)
        if not optimizers and any(model.shapes for model in models.values()):
            raise PartError(
                "There is no file of the optimizer (zero_pp_rank_0_mp_rank_00_optim_states.pt), which holds the fp32 weights.",
                fix="Get the files of all ranks. A model file by itself, in a folder of its own, is the 16-bit weights.",
            )
        return Slice(models, optimizers, self.keys, world, partial=self.partial)

    def _models(self, number: int, optimizers: Mapping[int, OptimizerState], world: int) -> dict[int, ModelState]:
        """The model files by rank: one for all but under stage 3."""
        is_stage_3 = any(state.is_stage_3 for state in optimizers.values())
        whole, models_of_ranks = self.found.of_slice("whole", number), self.found.of_slice("model", number)
        names, others = (models_of_ranks, whole) if is_stage_3 else (whole, models_of_ranks)
        if others:
            other = next(iter(others.values()))
            raise PartError(
                f"{other} is of another stage of ZeRO than the optimizer's parts.", fix="Remove what is of another save."
            )
        if not names:
            missing = f"{'zero_pp_rank_0_' if is_stage_3 else ''}mp_rank_{number:02d}_model_states.pt"
            raise PartError(f"{missing} is missing, which says the names and shapes of the weights.", fix="Get it too.")
        models = dict[int, ModelState]()
        for rank, name in names.items():
            models[rank] = read_model(name, self.root_of(name, renewed=not models), in_layers=bool(self.layers))
        if self.experts:
            first = models[min(models)]
            roots = [(file, self.root_of(file, renewed=True)) for _, file in sorted(self.experts.items())]
            check_experts(first, {(layer, expert) for layer, expert, _ in self.experts})
            models[min(models)] = replace(first, module=with_experts(first.module, roots))
        if is_stage_3:
            said = f"The checkpoint has {world} files *_model_states.pt, one a rank"
            check_world(said, models, world, partial=self.partial)
        worlds = {model.file: model.world for model in models.values() if model.world is not None}
        if optimizers:
            check_same("number of ranks", {next(iter(optimizers.values())).file: world, **worlds})
        check_same("'global_steps'", {model.file: model.step for model in models.values()})
        check_same("parameters", {model.file: (model.shapes, model.frozen, model.names) for model in models.values()})
        return models

    def _check_slices(self) -> int:
        """How many there should be; all are of one step, and of as many ranks."""
        first = self.first
        steps = {f"mp_rank_{number:02d}": (own.model.step, own.world) for number, own in self.slices.items()}
        check_same("step and number of ranks", steps)
        said = first.model.root.get("mp_world_size")
        count = said if type(said) is int else max(self.slices) + 1
        slices = f"The checkpoint has {count} slices mp_rank_*, one a stage of the pipeline or tensor parallel rank"
        check_world(slices, self.slices, count, partial=self.partial and bool(self.layers))
        self.missing = [f"mp_rank_{number:02d}_*" for number in range(count) if number not in self.slices]
        return count

    def _rules(self) -> Rules | None:
        """How tensor parallel ranks are joined; None for the stages of a pipeline."""
        if not self.layers:
            info = self.first.model.rules
            if info is None:
                raise PartError(
                    f"These are tensor parallel parts, of {len(self.slices)} ranks, and nothing says how they were cut.",
                    why="A checkpoint of Megatron-DeepSpeed or AutoTP says it as universal_checkpoint_info.", fix=_SAVE,
                )  # fmt: skip
            return Rules(info, self.first.model.buffers)
        if several := sorted({rank for _, rank in self.layers} - {0}):
            raise PartError(
                f"These are stages of a pipeline, each cut among {len(several) + 1} tensor parallel ranks, which is not read.",
                fix=_SAVE,
            )
        return None


# --- what `--select` takes instead of the weights


def _beside(first: Slice, path: Path) -> Warned:
    is_zero = first.first is not None
    found = [f"{name} ({what})" for name, what in (
        ("module", "" if first.is_stage_3 else "the weights as they were trained with"),
        ("optimizer", "its state by the parameters' names" if first.first is not None and first.first.states else ""),
        ("training", "model, optimizer and what else was saved" if is_zero else ""),
    ) if what]  # fmt: skip
    fix = f"ckpt convert {shlex.quote(str(path))} training.pth --select training" if is_zero else ""
    what = "the fp32 weights" if is_zero else "the weights"
    return Warned("beside-the-weights", f"without `select` it is {what}; `select` takes {', '.join(found)}", "", "info", fix)


def _others(model: Slice | Slices, first: Slice) -> dict[str, Callable[[], Node]]:
    """Made when it is wanted. Without ZeRO the optimizer's state has no names."""

    def training() -> Node:
        """The model, the optimizer, and what else the model file holds (steps, epochs, a scheduler)."""
        rest = [(key, value) for key, value in first.model.root.items if key not in _OF_PARTS and key != "model"]
        has_state = first.first is not None and first.first.states
        state: list[Pair] = [("optimizer", model.optimizer())] if has_state else []
        return Dict([("model", model.weights), *state, *rest])

    if first.first is None:
        return {"module": model.module}
    return {"module": model.module, "optimizer": model.optimizer, "training": training}


# --- several slices of a DeepSpeed checkpoint as one model


def _items(node: Node) -> Sequence[Node]:
    return node.items if type(node) is List else ()


class Slices:
    """Several slices on their way into one model. `rules`: of tensor parallel ranks; None for the stages of a pipeline."""

    def __init__(
        self, slices: Mapping[int, Slice], keys: Keys, rules: Rules | None, layers: Dict | None, *, partial: bool
    ) -> None:
        self.slices, self.rules, self.layers = slices, rules, layers.named if layers is not None else None
        self.merger = Merger(keys, {number: f"mp_rank_{number:02d}" for number in slices}, partial=partial)

    @property
    def lost(self) -> dict[str, str]:
        return self.merger.lost

    @cached_property
    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        if not self.merger.partial:
            self._check_layers()
        found = self._joined({number: own.weights for number, own in self.slices.items()})
        for own in self.slices.values():
            self.lost.update({name: why for name, why in own.lost.items() if name not in found})
        rest = {name: value for name, value in (self.layers or {}).items() if name not in self.lost}
        return Dict([*({**rest, **found}).items()], ordered=True)

    def _check_layers(self) -> None:
        """Each layer with weights in the optimizer has its file: what is frozen, and buffers, are in there alone."""
        if self.layers is None:
            return
        there = {name.partition(".")[0] for name in self.layers}
        names = [name for own in self.slices.values() for name in own.model.names]
        numbers = dict.fromkeys(number for name in names if (number := name.partition(".")[0]).isdecimal())
        if missing := [number for number in numbers if number not in there]:
            raise PartError(
                f"Layers have no file: {listed([f'layer_{int(number):02d}-model_states.pt' for number in missing])}.",
                why="Frozen weights and buffers of a pipeline are in there alone.", fix="Get the files of all layers.",
                rest=True,
            )  # fmt: skip

    def module(self) -> Dict:
        if self.layers is None:
            found = self._joined({number: own.module() for number, own in self.slices.items()})
            self.merger.check_replicas()
            return Dict(list(found.items()), ordered=True)
        if missing := [name for name in self.weights.named if name not in (self.layers or {})]:
            raise PartError(f"No file layer_*-model_states.pt has {listed(missing)}.", fix="Get the files of all layers.")
        return Dict(list(self.layers.items()), ordered=True)

    def optimizer(self) -> Dict:
        every = {number: own.optimizer() for number, own in self.slices.items()}
        found: dict[str, dict[int, Dict]] = {}
        for number, own in every.items():
            for name, values in as_dict(own.get("state")).named.items():
                found.setdefault(name, {})[number] = as_dict(values)
        made = {name: self._state(name, held) for name, held in found.items()}
        self.merger.check_replicas()
        first, *rest = ([as_dict(group) for group in _items(own.get("param_groups"))] for own in every.values())
        for at, group in enumerate(first):
            others = [groups[at] for groups in rest if at < len(groups)]
            names = dict.fromkeys(name for own in (group, *others) for name in _items(own.get("params")))
            group.items[-1] = ("params", List(list(names)))
        return optimizer_of(made, first)

    def check_evidence(self) -> None:
        """What the bytes say against the names of the files."""
        for own in self.slices.values():
            own.check_evidence(self.layers)

    def differing_buffers(self) -> list[str]:
        """What each slice says of its own; and what several slices have whole is compared."""
        found = [name for own in self.slices.values() for name in own.differing_buffers()]
        self.merger.check_replicas()
        return found

    def _state(self, name: str, held: Mapping[int, Dict]) -> Dict:
        """The optimizer's state of one parameter: what has its shape is joined as it is."""
        (first, *_) = held.values()
        rows = list[Pair]()
        for key, value in first.items:
            own = [(number, values.get(key)) for number, values in held.items()] if type(key) is str else []
            is_cut = type(value) is Entry and value.shape and own and all(type(entry) is Entry for _, entry in own)
            rows.append((key, self._one(name, own) if is_cut else value))
        return Dict(rows)

    def _joined(self, roots: Mapping[int, Dict]) -> dict[str, Node]:
        every: dict[str, list[tuple[int, Node]]] = {}
        for number, root in roots.items():
            for name, value in root.named.items():
                every.setdefault(name, []).append((number, value))
        made = {name: self.merger.unless_lost(name, partial(self._one, name, held)) for name, held in every.items()}
        return {name: value for name, value in made.items() if value is not DROP}

    def _one(self, name: str, held: Sequence[tuple[int, Node]]) -> Node:
        """One tensor, or value, of what the slices have under a name."""
        if len(held) == 1 and self.rules is None:
            return held[0][1]
        entries = [(number, entry) for number, entry in held if type(entry) is Entry]
        if self.rules is not None and len(held) < len(self.slices):
            lacking = [f"mp_rank_{number:02d}" for number in self.slices if number not in dict(held)]
            raise PartError(f"{name!r} is not whole: {listed(lacking)} do not have it.", rest=True)
        if not entries:
            return held[0][1]
        if len(entries) < len(held):
            raise PartError(f"{name!r} is a tensor in some slices, and something else in others.", rest=True)
        return self.merger.replicated(name, entries) if self.rules is None else self.rules.join(self.merger, name, entries)
