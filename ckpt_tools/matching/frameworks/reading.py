"""A checkpoint of Flax or Keras as torch would have it: names, shapes, and for every tensor the way back to the file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ckpt_tools.matching.frameworks import flax, keras
from ckpt_tools.matching.frameworks.turns import LINEAR, ReadLayer, Turn
from ckpt_tools.matching.params import Framework, Param
from ckpt_tools.matching.sides.places import turned

Path: TypeAlias = tuple[str, ...]
_READ: dict[Framework, ReadLayer] = {"flax": flax.read_layer, "keras": keras.read_layer}
_COLLECTIONS = ("params", "batch_stats")
_STATE = ("opt_state", "optimizer", "optimizer_weights")
_VARS = "vars"
_NUMBERS = re.compile(r"(\d+)")
_COUNTED = re.compile(r"(.+)_\d+")


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint as torch would have it.

    Attributes:
        params: the tensors in order, under their own names, in torch's shapes. known: own name -> the name in torch.
        turns: own name -> what was done, for the tensors of layers that are known. own: own name -> as the file has it.
        framework: whose layers they are.
    """

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
    """Read every layer. What is in none that is known keeps its shape; a kernel there takes no part in the structure.

    Args:
        known: own name -> the name that the user's rules gave.
    """
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
    ordered = [*(name for layer in layers for name in layer.leaves.values() if name in names)]
    ordered += [name for name in own if name not in set(ordered)]
    return Reading(tuple(_param(own[name], turns.get(name), known[name]) for name in ordered), names, turns, own, framework)


def _layers(own: Mapping[str, Param], known: Mapping[str, str]) -> list[_Layer]:
    """The layers in order. Files that sort their names have conv_10 before conv_2: those are put in counting order."""
    found: dict[Path, _Layer] = {}
    for number, name in enumerate(own):
        path, leaf, later = _place(known[name])
        layer = found.setdefault(path, _Layer(path))
        layer.leaves.setdefault(leaf, name)
        layer.place = min(layer.place, (later, number))
    layers = sorted(found.values(), key=_by_place)
    if [layer.path for layer in layers] == sorted(layer.path for layer in layers):
        layers.sort(key=_by_number)
    return layers


def _by_place(layer: _Layer) -> tuple[int, int]:
    return layer.place


def _by_number(layer: _Layer) -> list[list[tuple[int, str]]]:
    return [_natural(part) for part in layer.path]


def _natural(part: str) -> list[tuple[int, str]]:
    return [(int(text[:18]), "") if text.isdecimal() else (-1, text) for text in _NUMBERS.split(part)]


def _place(name: str) -> tuple[Path, str, bool]:
    """The path of a tensor's layer, its last name there, and whether it is a running statistic."""
    parts = name.split(".")
    later = parts[0] == "batch_stats"
    while len(parts) > 1 and parts[0] in _COLLECTIONS:
        del parts[0]
    if len(parts) > 1 and parts[-2] == _VARS and parts[-1].isdecimal():
        return tuple(parts[:-2]), ".".join(parts[-2:]), later
    return tuple(parts[:-1]), parts[-1], later


def _counted(layers: Sequence[_Layer]) -> dict[Path, Path]:
    """Paths in which what stands beside `conv2d_1` as `conv2d` is `conv2d_0`, so that they count."""
    below: dict[Path, set[str]] = defaultdict(set)
    for layer in layers:
        for length, part in enumerate(layer.path):
            below[layer.path[:length]].add(part)
    stems = {path: {match[1] for part in parts if (match := _COUNTED.fullmatch(part))} for path, parts in below.items()}

    def parts_of(path: Path) -> Iterator[str]:
        for length, part in enumerate(path):
            first = part in stems[path[:length]] and f"{part}_0" not in below[path[:length]]
            yield f"{part}_0" if first else part

    return {layer.path: tuple(parts_of(layer.path)) for layer in layers}


def _turned(param: Param, turn: Turn) -> tuple[float, ...] | None:
    """The sample as it is in torch; None for what is turned in another way than a matrix."""
    if param.sample is None or not turn.axes:
        return param.sample
    return turned(param.sample, param.shape) if turn.axes == LINEAR else None


def _param(param: Param, turn: Turn | None, known: str) -> Param:
    """The tensor as the stages compare it."""
    if known.partition(".")[0] in _STATE:
        return replace(param, kind="state of an optimizer")
    if turn is not None:
        return replace(param, shape=turn.shape, sample=_turned(param, turn), digest=None)
    leaf = known.rpartition(".")[2]
    of_layer = "kernel" in leaf or (leaf.isdecimal() and f".{_VARS}." in known)
    return replace(param, kind="of an unknown layer") if of_layer else param
