"""Layers that keep their matrix as [in, out] (GPT-2's `Conv1D`) against those that keep it as [out, in] (`nn.Linear`).

The bias shows it: it is as long as the outputs. A square matrix shows nothing, so it goes with the others of its model; where
those are of both kinds, nothing is certain about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_tools.matching.params import Param


@dataclass(frozen=True, slots=True)
class Orientation:
    """The names of the weights of one side that are kept as [in, out], and of those for which that cannot be told."""

    transposed: frozenset[str]
    unknown: frozenset[str]


NOT_TRANSPOSED = Orientation(frozenset(), frozenset())


def orientation(params: Iterable[Param]) -> Orientation:
    """Look at every matrix that has a bias beside it."""
    shapes = {param.name: param.shape for param in params}
    linear, transposed, square = set(), set(), set()
    for name, shape in shapes.items():
        bias = shapes.get(f"{name[: -len('weight')]}bias") if name.endswith(".weight") else None
        if len(shape) != 2 or bias is None or len(bias) != 1:
            continue
        if shape == (bias[0], bias[0]):
            square.add(name)
        elif shape[1] == bias[0]:
            transposed.add(name)
        elif shape[0] == bias[0]:
            linear.add(name)
    if transposed and not linear:
        return Orientation(frozenset(transposed | square), frozenset())
    return Orientation(frozenset(transposed), frozenset(square if transposed else ()))
