"""Flax's layers: `kernel` and `bias`, `scale` and `bias` with `mean` and `var`, `embedding`. Source: flax/linen."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpt_tools.matching.frameworks.turns import Turns, kernel, same, vectors
from ckpt_tools.matching.params import Param
from ckpt_tools.matching.records import Shape

_TRANSPOSED = re.compile(r"transpose|deconv|up_?conv|conv_?up", re.IGNORECASE)
_IS_TURNED = "a transposed convolution of Flax has its kernel turned around"
_MAY_BE = "it may be a transposed convolution, whose kernel Flax has turned around: nothing says which of the two it is"

_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def read_layer(path: tuple[str, ...], shapes: Mapping[str, Shape]) -> Turns | None:
    """A Dense, a Conv (with groups, too), an Embed or a norm.

    A ConvTranspose is another: Flax's is torch's with the kernel turned around, which no exchange of dimensions does.
    """
    if set(shapes) == {"embedding"}:
        return {"embedding": same("weight", shapes["embedding"])}
    if "kernel" not in shapes:
        return vectors(_NORM, shapes)
    weight = kernel(shapes["kernel"])
    bias = shapes.get("bias", shapes["kernel"][-1:])
    if path[-1:] and path[-1].startswith("ConvTranspose"):
        return None
    if weight is None or set(shapes) - {"kernel", "bias"} or bias != shapes["kernel"][-1:]:
        return None
    return {"kernel": weight, **({"bias": same("bias", bias)} if "bias" in shapes else {})}


def why_not(name: str, target: Param) -> str:
    """Why the kernel of a convolution is not the target's; "" where it is.

    A transposed one with as many inputs as outputs has the shape of any other: the target's module tells, or the names do.
    """
    if target.module is not None:
        return _IS_TURNED if _TRANSPOSED.search(target.module) else ""
    if _TRANSPOSED.search(f"{name} {target.name}"):
        return _IS_TURNED
    square = target.shape[:1] == target.shape[1:2]
    return _MAY_BE if square and "conv" not in f"{name} {target.name}".lower() else ""
