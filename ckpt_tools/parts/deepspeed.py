"""deepspeed: a folder whose ranks each hold a part of the fp32 weights and of the optimizer (ZeRO), as one checkpoint.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`), deepspeed/utils/zero_to_fp32.py."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Collection, Mapping, Sequence

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Keys, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.deepspeed_files import ModelState, OptimizerState, Rules, check_experts, with_experts, with_layers
from ckpt_tools.parts.deepspeed_slice import Slice
from ckpt_tools.parts.merge import Merger, check_same, check_world, merged
from ckpt_tools.parts.names import ZeroFiles
from ckpt_tools.parts.sharded import partly
from ckpt_tools.text import listed, some
from ckpt_tools.tree.exchange import DROP
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Pair
from ckpt_tools.tree.visit import reachable

CONTAINER = "deepspeed"
_SAVE = "Load the folder with DeepSpeed, on as many processes, and save the whole there: engine.save_16bit_model(FOLDER)."
# What a model file says about the parts, which is not a part any more.
_OF_PARTS = frozenset((
    "module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
))  # fmt: skip


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    found = ZeroFiles(names)
    if found.doubled:
        raise PartError(f"{some(found.doubled)} are parts of ranks that have a file already.", fix="Remove one of the two.")
    model = _Model(found, files, partial)

    def compare() -> None:
        for own in model.slices.values():
            own.check_evidence(model.layers)
        if wrong := [name for own in model.slices.values() for name in own.differing_buffers()]:
            text = f"buffers differ between ranks, the first rank's are taken: {some(sorted(wrong))}"
            made.warnings.append(Warned("parts-differ", text))

    made = merged(CONTAINER, model.merger.leave_out(model.weights), files, model.read_files, model.merger, compare)
    made.warnings += [partly("files of ranks are", list(model.missing))] if model.missing else []
    made.globals = [node for node in reachable(made.root) if type(node) is Global]
    made.unusual = []  # these are said of the ranks' files, not of the whole
    made.others = {"module": model.module}
    what, fix = "the weights", ""
    said = [] if model.first.is_stage_3 else ["module (the weights as they were trained with)"]
    if model.first.first is not None:  # without ZeRO the optimizer's state has no names
        what, fix = "the fp32 weights", f"ckpt convert {shlex.quote(str(files.path))} training.pth --select training"
        said += ["optimizer (its state by the parameters' names)"] if model.has_state else []
        said.append("training (model, optimizer and what else was saved)")
        made.others |= {"optimizer": model.optimizer, "training": model.training}
    text = f"without `select` it is {what}; `select` takes {', '.join(said)}"
    made.warnings.append(Warned("beside-the-weights", text, "", "info", fix))
    return made


class _Model:
    """The files of a folder as one model: of one slice, of tensor parallel ranks, or of the stages of a pipeline."""

    def __init__(self, found: ZeroFiles, files: Files, partial: bool) -> None:
        self.found, self.files, self.partial = found, files, partial
        self.missing: dict[str, None] = {}  # files that are not there
        self.keys, self.read_files = Keys(), list[Checkpoint]()
        self.experts, layers = found.kinds["expert"], found.kinds["layer"]
        if self.experts and (layers or len(found.slices) > 1):
            raise PartError(
                "These are experts of a mixture whose model is cut in another way too, which is not read.", fix=_SAVE
            )
        if found.kinds["optimizer"] and (unnamed := [*found.kinds["expert-optimizer"].values()]):
            raise PartError(f"{unnamed[0]} is of a save without ZeRO.", fix="Remove what is of another save.")
        self.slices = {number: self._slice(number) for number in found.slices}
        self.first = next(iter(self.slices.values()))
        self._check_slices(in_stages=bool(layers))
        self.rules = self._rules()
        self.merger = Merger(self.keys, {number: f"mp_rank_{number:02d}" for number in self.slices}, partial=partial)
        self.layers: Mapping[str, Node] | None = None  # the 16-bit weights of a pipeline
        if layers:
            shapes = {name: shape for own in self.slices.values() for row in own.model.shapes for name, shape in row.items()}
            roots = {name: (key[0], self._root_of(name, renewed=True)) for key, name in sorted(layers.items())}
            self.layers = with_layers(roots, shapes)
            self._check_layers(shapes)

    # --- reading

    def _root_of(self, name: str, *, renewed: bool = False) -> Node:
        self.read_files.append(decode_file(self.files.open(name)))
        root = self.read_files[-1].root
        return self.keys.renew(root) if renewed else root

    def _slice(self, number: int) -> Slice:
        names = self.found.of_slice("optimizer", number)
        optimizers = {rank: OptimizerState(name, self._root_of(name)) for rank, name in names.items()}
        check_same("number of ranks", {state.file: state.world for state in optimizers.values()})
        check_same("number of the optimizer's steps", {state.file: state.steps for state in optimizers.values()})
        world = next((state.world for state in optimizers.values()), 1)
        if optimizers:
            self._check_ranks(number, "optim", optimizers, world)
        models = self._models(number, optimizers, world)
        if not optimizers and any(model.shapes for model in models.values()):
            raise PartError(
                "There is no file of the optimizer (zero_pp_rank_0_mp_rank_00_optim_states.pt), which holds the fp32 weights.",
                fix="Get the files of all ranks. A model file by itself, in a folder of its own, is the 16-bit weights.",
            )
        return Slice(models, optimizers, Merger(self.keys, partial=self.partial), world)

    def _check_ranks(self, number: int, kind: str, there: Collection[int], world: int) -> None:
        what = f"The checkpoint has {world} files *_{kind}_states.pt, one a rank"
        missing = check_world(what, there, world, partial=self.partial)
        self.missing |= dict.fromkeys(f"zero_pp_rank_{rank}_mp_rank_{number:02d}_*" for rank in missing)

    def _models(self, number: int, optimizers: Mapping[int, OptimizerState], world: int) -> dict[int, ModelState]:
        """The model files by rank: one for all but under stage 3."""
        is_stage_3 = any(state.is_stage_3 for state in optimizers.values())
        kinds = ("model", "whole") if is_stage_3 else ("whole", "model")
        names, others = (self.found.of_slice(kind, number) for kind in kinds)
        if others:
            raise PartError(f"{next(iter(others.values()))} is of another stage of ZeRO than the optimizer's parts.")
        if not names:
            missing = f"{'zero_pp_rank_0_' if is_stage_3 else ''}mp_rank_{number:02d}_model_states.pt"
            raise PartError(f"{missing} is missing, which says the names and shapes of the weights.", fix="Get it too.")
        models = dict[int, ModelState]()
        for rank, name in names.items():
            root = self._root_of(name, renewed=not models)
            models[rank] = ModelState(name, root, in_layers=bool(self.found.kinds["layer"]))
        if self.experts:
            first = models[min(models)]
            check_experts(first, {(layer, expert) for layer, expert, _ in self.experts})
            roots = [(file, self._root_of(file, renewed=True)) for _, file in sorted(self.experts.items())]
            first.module = with_experts(first.module, roots)
        if is_stage_3:
            self._check_ranks(number, "model", models, world)
        worlds = {model.file: model.world for model in models.values() if model.world is not None}
        check_same("number of ranks", {state.file: world for state in optimizers.values()} | (worlds if optimizers else {}))
        check_same("'global_steps'", {model.file: model.step for model in models.values()})
        check_same("parameters", {model.file: (model.shapes, model.frozen) for model in models.values()})
        return models

    def _check_slices(self, *, in_stages: bool) -> None:
        """All are there, of one step, and of as many ranks."""
        steps = {f"mp_rank_{number:02d}": (own.model.step, own.world) for number, own in self.slices.items()}
        check_same("step and number of ranks", steps)
        said = self.first.model.root.get("mp_world_size")
        count = said if type(said) is int else max(self.slices) + 1
        what = f"The checkpoint has {count} slices mp_rank_*, one a stage of the pipeline or tensor parallel rank"
        missing = check_world(what, self.slices, count, partial=self.partial and in_stages)
        self.missing |= dict.fromkeys(f"mp_rank_{number:02d}_*" for number in missing)

    def _rules(self) -> Rules | None:
        """How tensor parallel ranks are joined; None for the stages of a pipeline, and for one slice."""
        if layers := self.found.kinds["layer"]:
            if any(rank for _, rank in layers):
                raise PartError(
                    "These are stages of a pipeline, each cut among tensor parallel ranks, which is not read.", fix=_SAVE
                )
            return None
        if len(self.slices) == 1:
            return None
        if self.first.model.rules is None:
            what = f"These are tensor parallel parts, of {len(self.slices)} ranks, and nothing says how they were cut."
            raise PartError(what, why="They have no universal_checkpoint_info.", fix=_SAVE)
        return Rules(self.first.model.rules, self.first.model.buffers)

    def _check_layers(self, names: Collection[str]) -> None:
        """Each layer with weights in the optimizer has its file: what is frozen, and buffers, are in there alone."""
        there = {name.partition(".")[0] for name in self.layers or ()}
        numbers = dict.fromkeys(number for name in names if (number := name.partition(".")[0]).isdecimal())
        if missing := [f"layer_{int(number):02d}-model_states.pt" for number in numbers if number not in there]:
            self.missing |= dict.fromkeys(missing)
            if not self.partial:
                raise PartError(f"Layers have no file: {listed(missing)}.", fix="Get the files of all layers.", rest=True)

    # --- what it gives

    @functools.cached_property
    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        roots = {number: own.weights for number, own in self.slices.items()}
        is_one = len(roots) == 1 and self.layers is None
        found = self.first.weights.named if is_one else self._joined(roots)
        for own in self.slices.values():
            self.merger.lost |= {name: why for name, why in own.merger.lost.items() if name not in found}
        return self.first.weights if is_one else Dict([*({**(self.layers or {}), **found}).items()], ordered=True)

    def module(self) -> Node:
        self.merger.lost.clear()  # which is said of the fp32 weights
        if self.layers is not None:
            if missing := [name for name in self.weights.named if name not in self.layers]:
                raise PartError(f"No file layer_*-model_states.pt has {listed(missing)}.", fix="Get the files of all layers.")
            return Dict(list(self.layers.items()), ordered=True)
        if len(self.slices) == 1:
            return self.first.module()
        found = self._joined({number: own.module() for number, own in self.slices.items()})
        return self.merger.compared(Dict(list(found.items()), ordered=True))

    @property
    def has_state(self) -> bool:
        return self.first.first is not None and bool(self.first.first.states)

    def optimizer(self) -> Dict:
        """The optimizer's state dict by the parameters' names, as torch's `get_optimizer_state_dict` gives it."""
        every = {number: own.optimizer() for number, own in self.slices.items()}
        held: dict[str, dict[int, Dict]] = {}
        for number, (states, _) in every.items():
            for name, values in states.items():
                held.setdefault(name, {})[number] = values
        state: list[Pair] = [(name, self._state(name, values)) for name, values in held.items()]
        self.merger.check_replicas()
        _, first = every[min(every)]
        rows = list[Node]()
        for at, (own, _) in enumerate(first):
            names = dict.fromkeys(name for _, groups in every.values() if at < len(groups) for name in groups[at][1])
            rows.append(Dict([*own, ("params", List(list(names)))]))
        return Dict([("state", Dict(state)), ("param_groups", List(rows))])

    def training(self) -> Dict:
        """The model, the optimizer, and what else the model file holds (steps, epochs, a scheduler)."""
        rest = [(key, value) for key, value in self.first.model.root.items if key not in _OF_PARTS and key != "model"]
        state: list[Pair] = [("optimizer", self.optimizer())] if self.has_state else []
        return Dict([("model", self.weights), *state, *rest])

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
        made = {name: self.merger.unless_lost(name, functools.partial(self._one, name, held)) for name, held in every.items()}
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
