"""Keras's layers: `vars.0`, `vars.1` ... below the layer's class or its name in Keras 3, `kernel:0` in older files.

The group of a layer in a list is called by its class (`conv2d_1`), that of an attribute by the attribute; such a layer is told
by its shapes, where they leave one reading. Source: keras/src/saving/saving_lib.py, `build` of keras/src/layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpt_tools.matching.frameworks.turns import Turn, Turns, depthwise, kernel, same, vectors
from ckpt_tools.matching.lexicon import concepts, words
from ckpt_tools.matching.records import Shape

_NUMBERED = re.compile(r"_\d+$")
_KERNELS = re.compile(r"dense|conv[123]d|conv[123]d_transpose|depthwise_conv[12]d")
_NORMS = {
    ("batch_normalization", 4): ("weight", "bias", "running_mean", "running_var"),
    ("batch_normalization", 2): ("running_mean", "running_var"),
    ("layer_normalization", 2): ("weight", "bias"),
    ("group_normalization", 2): ("weight", "bias"),
    ("rms_normalization", 1): ("weight",),
}
_OTHERS = re.compile(r".*(normalization|embedding|dense|conv[123]d.*|lstm|gru|rnn|attention)")
_NAMED = {
    "gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var",
}  # fmt: skip


def read_layer(path: tuple[str, ...], shapes: Mapping[str, Shape]) -> Turns | None:
    """A Dense, a convolution, an Embedding or a norm, where the file says which it is."""
    if not all(leaf.startswith("vars.") for leaf in shapes):
        return _named(path, shapes)
    rows = [shapes.get(f"vars.{number}") for number in range(len(shapes))]
    given = [shape for shape in rows if shape is not None]
    if len(given) < len(rows):
        return None
    found = _by_class(_NUMBERED.sub("", path[-1]) if path else "", given, path)
    return None if found is None else {f"vars.{number}": turn for number, turn in enumerate(found)}


def _named(path: tuple[str, ...], shapes: Mapping[str, Shape]) -> Turns | None:
    plain = {leaf.partition(":")[0]: leaf for leaf in shapes}
    own = {word: shapes[leaf] for word, leaf in plain.items()}
    if set(own) == {"embeddings"}:
        return {plain["embeddings"]: same("weight", own["embeddings"])}
    found = vectors(_NAMED, own)
    if found is not None:
        return {plain[word]: turn for word, turn in found.items()}
    word = next((name for name in ("kernel", "depthwise_kernel") if name in own), None)
    if word is None or set(own) - {word, "bias"}:
        return None
    kind = "depthwise_conv2d" if word == "depthwise_kernel" else _NUMBERED.sub("", path[-1]) if path else ""
    pair = _layer(kind, [own[word], *([own["bias"]] if "bias" in own else [])])
    return None if pair is None else dict(zip((plain[name] for name in (word, "bias") if name in plain), pair, strict=True))


def _by_class(kind: str, shapes: Sequence[Shape], path: tuple[str, ...]) -> list[Turn] | None:
    if kind == "embedding" and len(shapes) == 1 and len(shapes[0]) == 2:
        return [same("weight", shapes[0])]
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
        return [same("weight", shapes[0])] if is_table else None
    return _layer("", shapes)


def _norm(roles: Sequence[str], shapes: Sequence[Shape]) -> list[Turn] | None:
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        return None
    return [same(role, shape) for role, shape in zip(roles, shapes, strict=True)]


def _layer(kind: str, shapes: Sequence[Shape]) -> list[Turn] | None:
    """A kernel, and the bias whose length is the outputs'. Of an unknown class the bias tells which of two readings it is."""
    first, *rest = shapes
    if len(first) < 2 or len(rest) > 1 or (kind == "dense" and len(first) != 2):
        return None
    readings = [(kernel(first), first[-1:])]
    if kind.endswith("_transpose"):
        readings = [(kernel(first), first[-2:-1])]
    elif kind.startswith("depthwise"):
        readings = [(depthwise(first), (first[-2] * first[-1],))]
    elif not kind and len(first) > 2 and first[-2:] != (1, 1):
        readings += [(kernel(first), first[-2:-1]), (depthwise(first), (first[-2] * first[-1],))]
    fitting = {turn for turn, outputs in readings if turn is not None and rest in ([], [outputs])}
    if len(fitting) != 1:
        return None
    return [fitting.pop(), *(same("bias", shape) for shape in rest)]
