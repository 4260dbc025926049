"""A checkpoint of Flax or Keras as torch would have it: names, shapes, and for every tensor the way back to the file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ckpt_tools.matching.lexicon import concepts, words
from ckpt_tools.matching.order import in_order_of_names, turned
from ckpt_tools.matching.records import Ambiguous, Framework, Match, Matching, Param, Shape

Path: TypeAlias = tuple[str, ...]
LINEAR = "inputs outputs -> outputs inputs"
_SPACE = {1: "width", 2: "height width", 3: "depth height width"}


@dataclass(frozen=True, slots=True)
class Turn:
    """A tensor as torch has it; without axes it is as it was, under another name."""

    role: str
    shape: Shape
    axes: str = ""


Turns: TypeAlias = dict[str, Turn]  # the tensors of one layer, by their own last names


def _kernel(shape: Shape) -> Turn | None:
    """The kernel of a dense layer or of a convolution: inputs and outputs come last, and first in torch."""
    space = _SPACE.get(len(shape) - 2)
    axes = LINEAR if len(shape) == 2 else f"{space} inputs outputs -> outputs inputs {space}" if space else ""
    return Turn("weight", (*shape[:-3:-1], *shape[:-2]), axes) if axes else None


def _depthwise(shape: Shape) -> Turn | None:
    """Keras's depthwise kernel [height, width, inputs, multiplier]: torch has one group for each input."""
    space = _SPACE.get(len(shape) - 2) if len(shape) < 5 else None
    if space is None:
        return None
    axes = f"(1 {space.split()[0]}){space.removeprefix(space.split()[0])} inputs multiplier -> (inputs multiplier) 1 {space}"
    return Turn("weight", (shape[-2] * shape[-1], 1, *shape[:-2]), axes)


def _vectors(names: Mapping[str, str], shapes: Mapping[str, Shape]) -> Turns | None:
    """The vectors of a norm, all of one length; None where something else is beside them."""
    if set(shapes) - set(names) or len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        return None
    return {leaf: Turn(names[leaf], shape) for leaf, shape in shapes.items()}


# --- layers of Flax

_FLAX_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_TRANSPOSED = re.compile(r"transpose|deconv|up_?conv|conv_?up", re.IGNORECASE)
_IS_TURNED = "a transposed convolution of Flax has its kernel turned around"
_MAY_BE = "it may be a transposed convolution, whose kernel Flax has turned around: nothing says which of the two it is"


def _flax_layer(path: Path, shapes: Mapping[str, Shape]) -> Turns | None:
    if set(shapes) == {"embedding"}:
        return {"embedding": Turn("weight", shapes["embedding"])}
    if "kernel" not in shapes:
        return _vectors(_FLAX_NORM, shapes)
    weight = _kernel(shapes["kernel"])
    bias = shapes.get("bias", shapes["kernel"][-1:])
    if path[-1:] and path[-1].startswith("ConvTranspose"):
        return None
    if weight is None or set(shapes) - {"kernel", "bias"} or bias != shapes["kernel"][-1:]:
        return None
    return {"kernel": weight, **({"bias": Turn("bias", bias)} if "bias" in shapes else {})}


def _why_not(name: str, target: Param) -> str:
    """Why the kernel of a convolution is not the target's; "" where it is."""
    if target.module is not None:
        return _IS_TURNED if _TRANSPOSED.search(target.module) else ""
    if _TRANSPOSED.search(f"{name} {target.name}"):
        return _IS_TURNED
    square = target.shape[:1] == target.shape[1:2]
    return _MAY_BE if square and "conv" not in f"{name} {target.name}".lower() else ""


# --- layers of Keras

_KERNELS = re.compile(r"dense|conv[123]d|conv[123]d_transpose|depthwise_conv[12]d")
_OTHERS = re.compile(r".*(normalization|embedding|dense|conv[123]d.*|lstm|gru|rnn|attention)")
_NORMS = {
    ("batch_normalization", 4): ("weight", "bias", "running_mean", "running_var"),
    ("batch_normalization", 2): ("running_mean", "running_var"),
    ("layer_normalization", 2): ("weight", "bias"),
    ("group_normalization", 2): ("weight", "bias"),
    ("rms_normalization", 1): ("weight",),
}
_NAMED = {
    "gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var",
}  # fmt: skip


def _keras_layer(path: Path, shapes: Mapping[str, Shape]) -> Turns | None:
    """A Dense, a convolution, an Embedding or a norm, where the file says which it is."""
    kind = re.sub(r"_\d+$", "", path[-1]) if path else ""
    if all(leaf.startswith("vars.") for leaf in shapes):
        leaves = [f"vars.{number}" for number in range(len(shapes))]
        found = _by_class(kind, [shapes[leaf] for leaf in leaves], path) if set(leaves) == set(shapes) else None
        return None if found is None else dict(zip(leaves, found, strict=False))
    plain = {leaf.partition(":")[0]: leaf for leaf in shapes}
    own = {word: shapes[leaf] for word, leaf in plain.items()}
    turns = {"embeddings": Turn("weight", own["embeddings"])} if set(own) == {"embeddings"} else _vectors(_NAMED, own)
    word = next((name for name in ("kernel", "depthwise_kernel") if name in own), None)
    if turns is None and word is not None and not set(own) - {word, "bias"}:
        given = [name for name in (word, "bias") if name in own]
        pair = _layer("depthwise_conv2d" if word == "depthwise_kernel" else kind, [own[name] for name in given])
        turns = None if pair is None else dict(zip(given, pair, strict=True))
    return None if turns is None else {plain[name]: turn for name, turn in turns.items()}


def _by_class(kind: str, shapes: Sequence[Shape], path: Path) -> list[Turn] | None:
    if kind == "embedding" and len(shapes) == 1 and len(shapes[0]) == 2:
        return [Turn("weight", shapes[0])]
    if (roles := _NORMS.get((kind, len(shapes)))) is not None:
        return _norm(roles, shapes)
    if _KERNELS.fullmatch(kind):
        return _layer(kind, shapes)
    if _OTHERS.fullmatch(kind):
        return None
    if len(shapes) == 2 and path and {"ln", "layernorm", "layer"} & set(words(path[-1])):
        return _norm(_NORMS["layer_normalization", 2], shapes) or _layer("", shapes)
    if len(shapes) == 4:
        return _norm(_NORMS["batch_normalization", 4], shapes)
    if len(shapes) == 1 and len(shapes[0]) == 2:  # a Dense without a bias has the same shape
        is_table = any(group == "embedding" for group, _ in concepts(path[-1]))
        return [Turn("weight", shapes[0])] if is_table else None
    return _layer("", shapes)


def _norm(roles: Sequence[str], shapes: Sequence[Shape]) -> list[Turn] | None:
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        return None
    return [Turn(role, shape) for role, shape in zip(roles, shapes, strict=True)]


def _layer(kind: str, shapes: Sequence[Shape]) -> list[Turn] | None:
    """A kernel, and the bias whose length is the outputs'. Of an unknown class the bias tells which of two readings it is."""
    first, *rest = shapes
    if len(first) < 2 or len(rest) > 1 or (kind == "dense" and len(first) != 2):
        return None
    plain, grouped = (_kernel(first), first[-1:]), (_depthwise(first), (first[-2] * first[-1],))
    readings = [plain]
    if kind.endswith("_transpose"):
        readings = [(_kernel(first), first[-2:-1])]
    elif kind.startswith("depthwise"):
        readings = [grouped]
    elif not kind and len(first) > 2 and first[-2:] != (1, 1):
        readings = [plain, (_kernel(first), first[-2:-1]), grouped]
    fitting = {turn for turn, outputs in readings if turn is not None and rest in ([], [outputs])}
    return [fitting.pop(), *(Turn("bias", shape) for shape in rest)] if len(fitting) == 1 else None


# --- a whole checkpoint

_READ = {"flax": _flax_layer, "keras": _keras_layer}
_COLLECTIONS = ("params", "batch_stats")
_STATE = ("opt_state", "optimizer", "optimizer_weights")
_VARS = "vars"
_COUNTED = re.compile(r"(.+)_\d+")


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint as torch would have it."""

    params: tuple[Param, ...]
    known: dict[str, str]
    turns: Mapping[str, Turn]
    own: Mapping[str, Param]
    framework: Framework


@dataclass(slots=True)
class _Layer:
    """The tensors below one path, by their last names; `place` is that of its first parameter, running statistics last."""

    path: Path
    leaves: dict[str, str] = field(default_factory=dict)
    place: tuple[int, int] = (2, 0)


def as_in_torch(params: Iterable[Param], known: Mapping[str, str], framework: Framework) -> Reading:
    """Read every layer. What is in none that is known keeps its shape; a kernel there takes no part in the structure."""
    own = {param.name: param for param in params}
    layers = _layers(own, known)
    paths = _counted(layers)
    turns: dict[str, Turn] = {}
    names: dict[str, str] = {}
    for layer in layers:
        found = _READ[framework](layer.path, {leaf: own[name].shape for leaf, name in layer.leaves.items()}) or {}
        for leaf, name in layer.leaves.items():
            names[name] = ".".join((*paths[layer.path], found[leaf].role if leaf in found else leaf))
        turns.update((name, found[leaf]) for leaf, name in layer.leaves.items() if leaf in found)
    if len(set(names.values())) < len(own):  # two tensors of one name, as `params.a.bias` and `batch_stats.a.bias` would be
        turns, names = {}, dict(known)
    ordered = dict.fromkeys(name for layer in layers for name in layer.leaves.values() if name in names)
    ordered.update(dict.fromkeys(own))
    rows = tuple(_as_compared(own[name], turns.get(name), known[name]) for name in ordered)
    return Reading(rows, names, turns, own, framework)


def _layers(own: Mapping[str, Param], known: Mapping[str, str]) -> list[_Layer]:
    """The layers in order. Files that sort their names have conv_10 before conv_2: those are put in counting order."""
    found: dict[Path, _Layer] = {}
    for number, name in enumerate(own):
        parts = known[name].split(".")
        later = parts[0] == "batch_stats"
        while len(parts) > 1 and parts[0] in _COLLECTIONS:
            del parts[0]
        at = len(parts) - (2 if len(parts) > 1 and parts[-2] == _VARS and parts[-1].isdecimal() else 1)
        layer = found.setdefault(tuple(parts[:at]), _Layer(tuple(parts[:at])))
        layer.leaves.setdefault(".".join(parts[at:]), name)
        layer.place = min(layer.place, (later, number))
    layers = sorted(found.values(), key=lambda layer: layer.place)
    if [layer.path for layer in layers] == sorted(layer.path for layer in layers):
        layers.sort(key=lambda layer: [_natural(part) for part in layer.path])
    return layers


def _natural(part: str) -> list[tuple[int, str]]:
    return [(int(text[:18]), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", part)]


def _counted(layers: Sequence[_Layer]) -> dict[Path, Path]:
    """Paths in which what stands beside `conv2d_1` as `conv2d` is `conv2d_0`, so that they count."""
    below: dict[Path, set[str]] = defaultdict(set)
    for layer in layers:
        for length, part in enumerate(layer.path):
            below[layer.path[:length]].add(part)
    stems = {path: {match[1] for part in parts if (match := _COUNTED.fullmatch(part))} for path, parts in below.items()}
    made: dict[Path, Path] = {}
    for layer in layers:
        rows = [(part, layer.path[:length]) for length, part in enumerate(layer.path)]
        first = [part in stems[path] and f"{part}_0" not in below[path] for part, path in rows]
        made[layer.path] = tuple(f"{part}_0" if is_first else part for (part, _), is_first in zip(rows, first, strict=True))
    return made


def _as_compared(param: Param, turn: Turn | None, known: str) -> Param:
    if known.partition(".")[0] in _STATE:
        return replace(param, kind="state of an optimizer")
    if turn is not None:
        sample = param.sample
        if sample is not None and turn.axes:  # what is turned in another way than a matrix is not sampled
            sample = turned(sample, param.shape) if turn.axes == LINEAR else None
        return replace(param, shape=turn.shape, sample=sample, digest=None)
    leaf = known.rpartition(".")[2]
    of_layer = "kernel" in leaf or (leaf.isdecimal() and f".{_VARS}." in known)
    return replace(param, kind="of an unknown layer") if of_layer else param


# --- the way back: a matching of what was read as in torch, said of the tensors as the file has them


_TWO_STEPS = "its dimensions are exchanged, and it is split, joined or reshaped besides: no one step does that"
_SIZES = "its sizes are others, once its dimensions are exchanged"
_INPUTS = (
    "its inputs may be a flattened image, whose channels come last there and first here: a plan says which: "
    'a transpose, or a permute with axes = "(height width {channels}) out -> out ({channels} height width)", height as a number'
)
_OUTPUTS = "its outputs may be an image, whose channels come last there and first here: a plan says which"


def as_in_file(matching: Matching, reading: Reading, target: Sequence[Param]) -> Matching:
    """Matches of what was turned get the step that turns it; what needs more than one step becomes ambiguous."""
    exchanged = {name for name, turn in reading.turns.items() if turn.axes}
    flattened, wanted = _Flattened(target), {param.name: param for param in target}
    fates: list[Match | Ambiguous] = [*matching.ambiguous]
    fates += [_fate(row, reading, flattened, wanted[row.new]) for row in matching.matched]
    for offer in matching.offers:
        old, shape = offer.old[0], reading.own[offer.old[0]].shape
        turn = reading.turns.get(old)
        if offer.step == "transpose" and turn is not None and turn.axes == LINEAR:  # [in, out] there too: twice is as it was
            fates.append(Match(old, offer.new[0], offer.reason, offer.confidence, shape, shape))
        elif not exchanged.isdisjoint(offer.old):
            fates += [Ambiguous(new, offer.old, _TWO_STEPS) for new in offer.new]
    fates += [Ambiguous(row.new, (row.old,), _SIZES) for row in matching.mismatched if row.old in exchanged]
    by_name = {row.new: row for row in fates}
    rows = [by_name[param.name] for param in target if param.name in by_name]
    matched = tuple(row for row in rows if isinstance(row, Match))
    mismatched = tuple(row for row in matching.mismatched if row.old not in exchanged)
    used = {*(row.old for row in matched), *(row.old for row in mismatched)}
    return replace(
        matching, matched=matched, mismatched=mismatched,
        offers=tuple(offer for offer in matching.offers if exchanged.isdisjoint(offer.old)),
        ambiguous=tuple(row for row in rows if isinstance(row, Ambiguous)),
        missing=tuple(name for name in matching.missing if name not in by_name),
        unexpected=tuple(name for name in reading.own if name not in used),
    )  # fmt: skip


def _fate(row: Match, reading: Reading, flattened: _Flattened, target: Param) -> Match | Ambiguous:
    """A match with the step that makes it true of the file."""
    turn = reading.turns.get(row.old)
    if turn is None or not turn.axes:
        return row
    why, step = "", replace(row, step="permute", source_shape=reading.own[row.old].shape, axes=turn.axes)
    if row.step != "copy":
        why = _TWO_STEPS
    elif turn.axes == LINEAR:
        why, step = flattened.why(row.new), replace(step, step="transpose", axes="")
    elif reading.framework == "flax":
        why = _why_not(row.old, target)
    return Ambiguous(row.new, (row.old,), why) if why else step


class _Flattened:
    """The weights of a target in the order in which its module registers them; of a file, in the order that names say."""

    def __init__(self, target: Sequence[Param]) -> None:
        is_module = any(param.module is not None for param in target)
        self.rows = [param for param in (target if is_module else in_order_of_names(target, str)) if param.shape]
        self.at = {param.name: number for number, param in enumerate(self.rows)}
        self.convolutions = [number for number, param in enumerate(self.rows) if len(param.shape) > 2]

    def why(self, name: str) -> str:
        """Why the order of a dense layer's inputs or outputs cannot be known; else the empty text."""
        at = self.at[name]
        outputs, inputs = self.rows[at].shape
        before = [number for number in self.convolutions if number < at] or self.convolutions
        after = [number for number in self.convolutions if number > at]
        if before and inputs not in self._beside(at, -1)[:1] and _is_image(inputs, channels := self.rows[before[-1]].shape[0]):
            return _INPUTS.format(channels=channels)
        if after and outputs not in self._beside(at, 1)[:2]:
            return _OUTPUTS if any(_is_image(outputs, count) for count in self.rows[after[0]].shape[:2]) else ""
        return ""

    def _beside(self, at: int, step: int) -> Shape:
        own = self.rows[at].name.rpartition(".")[0]
        while 0 <= (at := at + step) < len(self.rows):
            if self.rows[at].name.rpartition(".")[0] != own:
                return self.rows[at].shape
        return ()


def _is_image(size: int, channels: int) -> bool:
    """Whether so many numbers may be an image of several places with so many channels."""
    return 1 < channels < size and size % channels == 0
