"""Flax's layers: `kernel` and `bias`, `scale` and `bias` with `mean` and `var`, `embedding`. Source: flax/linen."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.matching.frameworks.turns import Turns, kernel, same, vectors
from ckpt_tools.matching.records import Shape

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
