"""Weights that torch keeps in parts and computes when it runs: weight norm, spectral norm, pruning, orthogonal.

Up to torch 1.x a part lies beside the others (`weight_g`, `weight_orig`: torch/nn/utils), since then below `parametrizations`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

_BESIDE = r"(?s)((?:.*\.)?[^.]*(?:weight|bias)[^.]*)_(g|v|orig|mask|u)"
_BELOW = r"(?s)((?:.*\.)?)parametrizations\.([^.]+)\.(.+)"
_ROLES = {"original0": "g", "original1": "v", "original": "orig", "0._u": "u", "0._v": "v", "0.base": "base"}
_KINDS = {
    frozenset("gv"): "weight norm", frozenset(("orig", "mask")): "pruning", frozenset(("orig", "u", "v")): "spectral norm",
    frozenset(("orig", "base")): "orthogonal",
}  # fmt: skip
_QUANTISED = (
    "_scale", "_scale_inv", ".scale_weight", "SCB", ".absmax", ".quant_map", "qweight", "qzeros", "weight_packed", "_blocks",
    ".blocks", "_scales", "_zero_point", "g_idx", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
)  # fmt: skip


@dataclass(slots=True, eq=False, repr=False)
class Parametrized:
    """One weight in parts."""

    name: str
    kind: str
    parts: Mapping[str, str]


def part_of(name: str) -> tuple[str, str] | None:
    """The weight that a tensor is a part of, and which; by its name, so it may be the whole of something else."""
    if "parametrizations." in name and (found := re.fullmatch(_BELOW, name)):
        return found[1] + found[2], _ROLES.get(found[3], found[3])
    if name.endswith(("_g", "_v", "_orig", "_mask", "_u")) and (found := re.fullmatch(_BESIDE, name)):
        return found[1], found[2]
    return None


def is_part(name: str) -> bool:
    """Whether a tensor may be a part of a weight, of a quantised one too: without the others the weight is another."""
    return part_of(name) is not None or name.endswith(_QUANTISED)


def parametrized(shapes: Mapping[str, tuple[int, ...]]) -> list[Parametrized]:
    """The weights in parts of a state dict."""
    found: dict[str, dict[str, str]] = {}
    for name in shapes:
        if part := part_of(name):
            found.setdefault(part[0], {})[part[1]] = name
    rows = [Parametrized(weight, _kind(parts, shapes), parts) for weight, parts in found.items() if weight not in shapes]
    return [row for row in rows if row.kind or any("parametrizations." in name for name in row.parts.values())]


def _kind(parts: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    kind = _KINDS.get(frozenset(parts), "")
    size = {role: shapes[name] for role, name in parts.items()}
    if kind == "weight norm":
        fits = _is_norm(size["g"], size["v"])
    elif kind == "pruning":
        fits = size["mask"] == size["orig"]
    elif kind == "spectral norm":
        fits = bool(spectral_dims(size["orig"], size["u"], size["v"]))
    else:
        fits = len(size.get("orig", ())) == 2 and size.get("base") == (max(size["orig"]),) * 2
    return kind if fits else ""


def _is_norm(norm: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether norms are those of a weight, over all of its dimensions or all but one."""
    if not norm:
        return True
    pairs = list(zip(norm, weight, strict=False))
    return len(norm) == len(weight) and all(one in (1, size) for one, size in pairs) and sum(one > 1 for one in norm) <= 1


def spectral_dims(weight: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> list[int]:
    """The dimensions that the rows of the matrix may be, whose singular vectors these are."""
    return [dim for dim, size in enumerate(weight) if (size,) == left and (prod(weight) // max(size, 1),) == right]


def told(rows: list[Parametrized]) -> str:
    """`weight norm of 2 weights, pruning of 1`."""
    counts = Counter(row.kind or "an unknown parametrization" for row in rows)
    return ", ".join(f"{kind} of {count} weight{'s' * (count != 1)}" for kind, count in counts.items())
