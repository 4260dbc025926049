"""What the files of a DeepSpeed checkpoint say: facts by name out of the trees of their pickles.

Source: deepspeed/runtime/engine.py; `state_dict` in deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import prod
from operator import itemgetter

from ckpt_tools.errors import PartError
from ckpt_tools.io.content import read
from ckpt_tools.parts.merge import Held, Merger
from ckpt_tools.pickling.torch_objects import sizes_of
from ckpt_tools.text import listed
from ckpt_tools.tree.nodes import MAX_ELEMENTS, Dict, Entry, List, Node, Pair
from ckpt_tools.values.boxes import Sizes
from ckpt_tools.values.numeric import row_major

EXPERT = re.compile(r"(?P<layer>.*?)deepspeed_moe\.experts\.deepspeed_experts\.(?P<number>\d{1,6})\.(?P<rest>.*)")
_MIXTURE, _TIED = "deepspeed_moe.", "tied_modules."
_STAGE_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_CODES = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}  # of a step that is a tensor
_MOST_LAYERS = 4096


class ModelState:
    """What a model file says. `shapes`: of the parameters in the optimizer, by group."""

    def __init__(self, file: str, root: Node, *, in_layers: bool = False) -> None:
        said = _named(root)
        module = Dict(ordered=True) if in_layers and said.get("module") is None else said.get("module")
        if type(root) is not Dict or type(module) is not Dict:
            raise _malformed(file, "it has no weights (`module`)")
        self.file, self.root, self.module = file, root, module
        self.buffers = frozenset(name for name in listed_in(said.get("buffer_names")) if type(name) is str)
        self.shapes = tuple(_shapes(file, group) for group in listed_in(said.get("param_shapes")))
        self.frozen = _shapes(file, said.get("frozen_param_shapes"))
        self.fragments = {name: row for name, row in _named(said.get("frozen_param_fragments")).items() if type(row) is Entry}
        self.shared = {name: holder for name, holder in _named(said.get("shared_params")).items() if type(holder) is str}
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
        said = _named(_named(root).get("optimizer_state_dict"))
        self.file, self.is_stage_3 = file, _STAGE_3 in said
        rows = listed_in(said.get(_STAGE_3 if self.is_stage_3 else _STAGE_2))
        if "ds_zero_partition_groups" in said:
            raise _malformed(file, "its experts are cut among other ranks than the rest under stage 3, which is not read")
        counts = tuple(count for count in listed_in(said.get("partition_count")) if type(count) is int)
        self.flat = tuple(row for row in rows if type(row) is Entry and len(row.shape) == 1 and row.is_contiguous)
        if min(counts, default=0) < 1 or len(self.flat) != len(rows) or (not self.is_stage_3 and _STAGE_2 not in said):
            raise _malformed(
                file, f"it has no part of the weights ({_STAGE_2}, {_STAGE_3}), it is not rows, or no partition_count"
            )
        self.world = max(counts)
        self.counts = counts if len(counts) == len(rows) else (self.world,) * len(rows)
        paddings = [sizes_of(group) for group in listed_in(said.get("param_alignment_paddings"))]
        if any(group is None or min(group, default=0) < 0 for group in paddings):
            raise _malformed(file, "its param_alignment_paddings are not numbers")
        self.paddings = tuple(group for group in paddings if group is not None)
        inner = said.get("optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state")
        own = _named(inner).get("state")
        # an elastic checkpoint of old versions has a list of states
        found = enumerate(inner.items) if type(inner) is List else own.items if type(own) is Dict else ()
        self.states = {number: one for number, one in found if type(number) is int and type(one) is Dict}
        self.groups = tuple(group for group in listed_in(_named(inner).get("param_groups")) if type(group) is Dict)

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
    shapes = {name: sizes_of(value) for name, value in _named(node).items()}
    good = {name: shape for name, shape in shapes.items() if shape is not None and min(shape, default=0) >= 0}
    if wrong := [name for name in shapes if name not in good or prod(good[name]) > MAX_ELEMENTS]:
        raise _malformed(file, f"the shape of {wrong[0]!r} is not one")
    return good


def listed_in(node: Node) -> Sequence[Node]:
    """The elements of a list; of anything else but None, that alone."""
    if type(node) is List:
        return node.items
    return node if type(node) is tuple else () if node is None else (node,)


def _named(node: Node) -> dict[str, Node]:
    return node.named if type(node) is Dict else {}


def _malformed(file: str, why: str) -> PartError:
    return PartError(f"{file} cannot be joined with the others: {why}.")


# --- experts and layers, in files of their own


def with_experts(model: ModelState, found: Mapping[tuple[int, ...], tuple[str, Node]]) -> Dict:
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


def with_layers(roots: Mapping[str, tuple[int, Node]], shapes: Mapping[str, Sizes]) -> dict[str, Node]:
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
