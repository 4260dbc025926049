"""deepspeed: a folder whose ranks each hold a part of the fp32 weights and of the optimizer (ZeRO), as one checkpoint.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`), deepspeed/utils/zero_to_fp32.py."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import TypeVar

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.deepspeed_slice import EXPERT, ModelState, OptimizerState, Slice
from ckpt_tools.parts.merge import Held, Merger, merged
from ckpt_tools.parts.names import by_rank, check_same, check_world, zero_files
from ckpt_tools.parts.partition import SAVE_ZERO, listed_in
from ckpt_tools.text import listed, some
from ckpt_tools.tree.exchange import DROP
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Pair
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.boxes import Sizes

CONTAINER = "deepspeed"
_Value = TypeVar("_Value")
# What a model file says about the parts, which is not a part any more.
_OF_PARTS = frozenset((
    "module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
))  # fmt: skip


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    model = _Model(names, files, partial)

    def compare() -> None:
        for own in model.slices.values():
            own.check_evidence(model.layers)
        if wrong := sorted(name for own in model.slices.values() for name in own.differing_buffers()):
            text = f"buffers differ between ranks, the first rank's are taken: {some(wrong)}"
            made.warnings.append(Warned("parts-differ", text))

    root = model.merger.leave_out(model.weights)
    made = merged(CONTAINER, root, files, model.read_files, model.merger, list(model.missing), compare)
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
    text = f"without `select` you get {what}; `select` takes {', '.join(said)}"
    made.warnings.append(Warned("beside-the-weights", text, "", "info", fix))
    return made


class _Model:
    """The files of a folder as one model: of one slice, of tensor parallel ranks, or of the stages of a pipeline."""

    def __init__(self, names: Sequence[str], files: Files, partial: bool) -> None:
        self.files, self.partial, self.merger = files, partial, Merger(partial=partial)
        self.missing: dict[str, None] = {}  # files that are not there
        self.read_files: list[Checkpoint] = []
        self.found = by_rank((said, name) for name, said in zero_files(names).items())
        numbers = sorted({said[-1] for kind, said in self.found if kind in ("optimizer", "model", "whole")})
        experts, layers = self._of("expert"), self._of("layer")
        if (experts and (layers or len(numbers) > 1)) or any(part for _, part in layers):
            what = "These are experts, or stages of a pipeline, of a model that is cut in another way too, which is not read."
            raise PartError(what, fix=SAVE_ZERO)
        if self._of("optimizer") and (unnamed := [*self._of("expert-optimizer").values()]):
            raise PartError(f"{unnamed[0]} is of a save without ZeRO.", fix="Remove what is of another save.")
        self.slices = {f"mp_rank_{number:02d}": self._slice(number) for number in numbers}
        self.first = next(iter(self.slices.values()))
        check_same("step and number of ranks", {called: (own.model.step, own.world) for called, own in self.slices.items()})
        said = self.first.model.root.get("mp_world_size")
        there = {number: f"mp_rank_{number:02d}" for number in numbers}
        world = said if type(said) is int else numbers[-1] + 1
        self.missing |= dict.fromkeys(check_world(there, world, "mp_rank_{:02d}_*".format, partial=partial and bool(layers)))
        self.rules: Rules | None = None  # how tensor parallel ranks are joined
        if len(self.slices) > 1 and not layers:
            if self.first.model.rules is None:
                what = "These are tensor parallel parts, and nothing says how they were cut (no universal_checkpoint_info)."
                raise PartError(what, fix=SAVE_ZERO)
            self.rules = Rules(self.first.model.rules, self.first.model.buffers)
        self.layers: Mapping[str, Node] | None = None  # the 16-bit weights of a pipeline
        if layers:
            shapes = {name: shape for own in self.slices.values() for row in own.model.shapes for name, shape in row.items()}
            self.layers = _with_layers({name: (key[0], self._root(name)) for key, name in sorted(layers.items())}, shapes)
            # what is frozen, and buffers, are in these alone
            have = {name.partition(".")[0] for name in self.layers}
            used = dict.fromkeys(number for name in shapes if (number := name.partition(".")[0]).isdecimal())
            if gone := [f"layer_{int(number):02d}-model_states.pt" for number in used if number not in have]:
                self.missing |= dict.fromkeys(gone)
                if not partial:
                    raise PartError(f"Layers have no file: {listed(gone)}.", fix="Get the files of all layers.", rest=True)

    # --- reading

    def _of(self, kind: str, number: int | None = None) -> dict[tuple[int, ...], str]:
        """The files of a kind, in one slice or all, by the numbers in their names."""
        found = sorted((said, name) for (own, said), name in self.found.items() if own == kind)
        return {said: name for said, name in found if number in (None, said[-1])}

    def _root(self, name: str, *, renewed: bool = True) -> Node:
        self.read_files.append(decode_file(self.files.open(name)))
        root = self.read_files[-1].root
        return self.merger.keys.renew(root) if renewed else root

    def _slice(self, number: int) -> Slice:
        names = self._of("optimizer", number)
        optimizers = {said[0]: OptimizerState(name, self._root(name, renewed=False)) for said, name in names.items()}
        facts = {state.file: (state.world, state.steps, len(state.flat), state.counts) for state in optimizers.values()}
        check_same("number of ranks, of the optimizer's steps and of groups", facts)
        first = next(iter(optimizers.values()), None)
        world, is_stage_3 = (first.world, first.is_stage_3) if first is not None else (1, False)
        models, others = self._of("model", number), self._of("whole", number)
        if not is_stage_3:
            models, others = others, models
        if others or any(state.is_stage_3 != is_stage_3 for state in optimizers.values()):
            raise PartError(f"{listed([*others.values(), *names.values()])} are of different stages of ZeRO.")
        if not models:
            file = f"{'zero_pp_rank_0_' if is_stage_3 else ''}mp_rank_{number:02d}_model_states.pt"
            raise PartError(f"{file} is missing, which says the names and shapes of the weights.", fix="Get it too.")
        missing: list[str] = []
        for cut in (names, models) if is_stage_3 else (names,) if names else ():
            there = {said[0]: name for said, name in cut.items()}
            missing += check_world(there, world, f"zero_pp_rank_{{}}_mp_rank_{number:02d}_*".format, partial=self.partial)
        self.missing |= dict.fromkeys(missing)
        read = dict[int, ModelState]()
        for said, name in models.items():
            read[said[0]] = ModelState(name, self._root(name, renewed=not read), in_layers=bool(self._of("layer")))
        own = next(iter(read.values()))
        if experts := self._of("expert"):
            own.module = _with_experts(own, {said[:2]: (name, self._root(name)) for said, name in experts.items()})
        if first is None and any(model.shapes for model in read.values()):
            raise PartError(
                "There is no file of the optimizer (zero_pp_rank_0_mp_rank_00_optim_states.pt), which holds the fp32 weights.",
                fix="Get the files of all ranks. A model file by itself, in a folder of its own, is the 16-bit weights.",
            )
        worlds = {model.file: model.world for model in read.values() if model.world is not None} if optimizers else {}
        check_same("number of ranks", {state.file: world for state in optimizers.values()} | worlds)
        check_same(
            "'global_steps' and parameters", {model.file: (model.step, model.shapes, model.frozen) for model in read.values()}
        )
        return Slice(read, optimizers, self.merger, world, missing)

    # --- what it gives

    @functools.cached_property
    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        if len(self.slices) == 1 and self.layers is None:
            return self.first.weights
        found = self._joined({called: own.weights for called, own in self.slices.items()})
        for name in found.keys() & self.merger.lost.keys():  # another stage has it
            del self.merger.lost[name]
        return Dict([*({**(self.layers or {}), **found}).items()], ordered=True)

    def module(self) -> Node:
        self.merger.lost.clear()  # which is said of the fp32 weights
        if self.layers is not None:
            if missing := [name for name in self.weights.named if name not in self.layers]:
                raise PartError(f"No file layer_*-model_states.pt has {listed(missing)}.", fix="Get the files of all layers.")
            return Dict(list(self.layers.items()), ordered=True)
        if len(self.slices) == 1:
            return self.first.module()
        found = self._joined({called: own.module() for called, own in self.slices.items()})
        return self.merger.compared(Dict(list(found.items()), ordered=True))

    @property
    def has_state(self) -> bool:
        return self.first.first is not None and bool(self.first.first.states)

    def optimizer(self) -> Dict:
        """The optimizer's state dict by the parameters' names, as torch's `get_optimizer_state_dict` gives it."""
        every = {called: own.optimizer() for called, own in self.slices.items()}
        merger = Merger(self.merger.keys)
        held = _by_name({called: states for called, (states, _) in every.items()})
        state: list[Pair] = [(name, self._state(merger, name, values)) for name, values in held.items()]
        merger.compared(None)
        _, first = next(iter(every.values()))
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

    def _state(self, merger: Merger, name: str, held: Sequence[tuple[str, Dict]]) -> Dict:
        """The optimizer's state of one parameter: what has its shape is joined as it is."""
        rows = list[Pair]()
        for key, value in held[0][1].items:
            own = [(called, values.get(key)) for called, values in held] if type(key) is str else []
            is_cut = type(value) is Entry and value.shape and own and all(type(entry) is Entry for _, entry in own)
            rows.append((key, self._one(merger, name, own) if is_cut else value))
        return Dict(rows)

    def _joined(self, roots: Mapping[str, Dict]) -> dict[str, Node]:
        every = _by_name({called: root.named for called, root in roots.items()})
        one = functools.partial(self._one, self.merger)
        made = {name: self.merger.unless_lost(name, functools.partial(one, name, held)) for name, held in every.items()}
        return {name: value for name, value in made.items() if value is not DROP}

    def _one(self, merger: Merger, name: str, held: Sequence[tuple[str, Node]]) -> Node:
        """One tensor, or value, of what the slices have under a name."""
        if len(held) == 1 and self.rules is None:
            return held[0][1]
        entries: Held = [(called, entry) for called, entry in held if type(entry) is Entry]
        if self.rules is not None and len(held) < len(self.slices):
            lacking = [called for called in self.slices if called not in dict(held)]
            raise PartError(f"{name!r} is not whole: {listed(lacking)} do not have it.", rest=True)
        if not entries:
            return held[0][1]
        if len(entries) < len(held):
            raise PartError(f"{name!r} is a tensor in some slices, and something else in others.", rest=True)
        return merger.replicated(name, entries) if self.rules is None else self.rules.join(merger, name, entries)


def _by_name(slices: Mapping[str, Mapping[str, _Value]]) -> dict[str, list[tuple[str, _Value]]]:
    """What each slice has under every name."""
    names = dict.fromkeys(name for own in slices.values() for name in own)
    return {name: [(called, own[name]) for called, own in slices.items() if name in own] for name in names}


# --- experts and layers, in files of their own

_MIXTURE, _TIED = "deepspeed_moe.", "tied_modules."
_MOST_LAYERS = 4096


def _with_experts(model: ModelState, found: Mapping[tuple[int, ...], tuple[str, Node]]) -> Dict:
    """The 16-bit weights with those of the experts, each behind what else its mixture has; `found`: by layer and expert."""
    rows = [count for count in listed_in(model.root.get("num_experts")) if type(count) is int]
    for layer, count in enumerate(rows[:_MOST_LAYERS]):
        if missing := [expert for expert in range(min(count, _MOST_LAYERS)) if (layer, expert) not in found]:
            raise PartError(f"Experts are missing: layer_{layer}_expert_{missing[0]}_*.", fix="Get the files of all experts.")
    items = model.module.items
    last = {str(name).partition(_MIXTURE)[0]: number for number, (name, _) in enumerate(items) if _MIXTURE in str(name)}
    names, placed = set(model.module.named), list[tuple[int, Pair]](enumerate(items))
    for _, (file, root) in sorted(found.items()):
        for name, value in root.items if type(root) is Dict else [(None, None)]:
            match = EXPERT.fullmatch(name) if isinstance(name, str) else None
            if match is None or type(value) is not Entry or match.string in names:
                raise PartError(
                    f"{file} holds something else than an expert's tensors, or what another file holds too: {name!r}."
                )
            names.add(match.string)
            placed.append((last.get(match["layer"], len(items)), (name, value)))
    made = Dict([item for _, item in sorted(placed, key=itemgetter(0))], ordered=True)
    made.attributes = model.module.attributes
    return made


def _with_layers(roots: Mapping[str, tuple[int, Node]], shapes: Mapping[str, Sizes]) -> dict[str, Node]:
    """The 16-bit weights of a pipeline's layers by their names in the model; `shapes`: of the weights in the optimizer."""
    tied: dict[str, dict[str, Sizes]] = {}
    for name, shape in shapes.items():
        key, found, rest = name.removeprefix(_TIED).partition(".")
        if name.startswith(_TIED) and found:
            tied.setdefault(key, {})[rest] = shape
    known = {name.partition(".")[0] for name in shapes}
    made: dict[str, Node] = {}
    for file, (number, root) in roots.items():
        if type(root) is not Dict or any(type(name) is not str for name, _ in root.items):
            raise PartError(f"{file} holds something else than the weights of a layer by name.")
        own = {name: value.shape for name, value in root.named.items() if type(value) is Entry}
        fitting = [key for key, shapes in tied.items() if all(own.get(name) == shape for name, shape in shapes.items())]
        if str(number) in known or not fitting:  # or else a tied layer, of which the optimizer has no weight under its number
            prefix = f"{number}."
        elif len(fitting) == 1:
            prefix = f"{_TIED}{fitting[0]}."
        else:
            raise PartError(f"{file} may be each of several layers that stages share: {listed(sorted(fitting))}.")
        for name, value in root.named.items():
            made.setdefault(f"{prefix}{name}", value)
    return made


# --- how tensor parallel ranks were cut


_SWIGLU, _ROWS = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_row_parallelism_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_WHOLE = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
# A text, single characters of any kind, digits; what is repeated may be so three times: more can take for ever.
_MOST = 1000
_PATTERN = re.compile(r"(?:(?:\w|[-/:,@ .]|\\d|\\\W)(?:[+*](?!(?:.*[+*]){3}))?)*", re.ASCII)


class Rules:
    """How tensor parallel ranks are joined, by `universal_checkpoint_info`. It speaks of parameters; buffers are whole."""

    def __init__(self, info: Dict, buffers: AbstractSet[str]) -> None:
        self.buffers = buffers
        self.patterns = {key: _patterns(info.get(key)) for key in (*_WHOLE, _SWIGLU, _ROWS, _UNSUPPORTED)}
        several = info.get("parameter_with_sub_params")
        for row in several.items if type(several) is List else ():
            self.patterns[_UNSUPPORTED] += _patterns(row.get("patterns") if type(row) is Dict else None)

    def _fits(self, name: str, *kinds: str) -> bool:
        return any(pattern.match(name) for kind in kinds for pattern in self.patterns[kind])

    def join(self, merger: Merger, name: str, held: Held) -> Entry:
        """One tensor of what each slice has of it."""
        if self._fits(name, _UNSUPPORTED):
            raise PartError(f"{name!r} is several matrices in one, cut among tensor parallel ranks in a way that is not read.")
        if name in self.buffers or self._fits(name, *_WHOLE) or not held[0][1].shape:
            return merger.replicated(name, held)
        return merger.along(name, int(self._fits(name, _ROWS)), [held], count=2 if self._fits(name, _SWIGLU) else 1)


def _patterns(node: Node) -> list[re.Pattern[str]]:
    """The patterns of one list, or the keys of a dict, each of which fits from a name's beginning on."""
    rows = [key for key, _ in node.items] if type(node) is Dict else listed_in(node)
    texts = [text.removeprefix("^") for text in rows if type(text) is str]
    for text in texts:
        if len(texts) > _MOST or len(text) > _MOST or not _PATTERN.fullmatch(re.sub(r"(?<!\\)\$$", "", text)):
            raise PartError(f"universal_checkpoint_info tells names by the pattern {text[:100]!r}, which is not read.")
    return [re.compile(text, re.ASCII) for text in texts]
