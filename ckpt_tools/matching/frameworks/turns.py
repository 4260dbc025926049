"""What becomes of one tensor of a Flax or Keras layer: its name in torch, and the order of its dimensions there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckpt_tools.matching.records import Shape

_SPACE = {1: "width", 2: "height width", 3: "depth height width"}
LINEAR = "inputs outputs -> outputs inputs"


@dataclass(frozen=True, slots=True)
class Turn:
    """A tensor as torch has it.

    Attributes:
        role: its last name in torch. shape: its shape there.
        axes: how its dimensions are exchanged, as in a plan's `permute`; empty where they stay.
    """

    role: str
    shape: Shape
    axes: str = ""


Turns: TypeAlias = dict[str, Turn]
# The tensors of one layer, by their own last names -> what they are in torch; None where the layer is not known.
ReadLayer: TypeAlias = Callable[[tuple[str, ...], Mapping[str, Shape]], Turns | None]


def kernel(shape: Shape) -> Turn | None:
    """The kernel of a dense layer or of a convolution: inputs and outputs come last, and first in torch.

    Keras's transposed convolution is [height, width, outputs, inputs], torch's [inputs, outputs, height, width]: the same.
    """
    turned = (*shape[:-3:-1], *shape[:-2])
    if len(shape) == 2:
        return Turn("weight", turned, LINEAR)
    space = _SPACE.get(len(shape) - 2)
    return Turn("weight", turned, f"{space} inputs outputs -> outputs inputs {space}") if space else None


def depthwise(shape: Shape) -> Turn | None:
    """Keras's depthwise kernel [height, width, inputs, multiplier]: torch has one group for each input."""
    space = _SPACE.get(len(shape) - 2) if len(shape) < 5 else None
    if space is None:
        return None
    axes = f"(1 {space.split()[0]}){space.removeprefix(space.split()[0])} inputs multiplier -> (inputs multiplier) 1 {space}"
    return Turn("weight", (shape[-2] * shape[-1], 1, *shape[:-2]), axes)


def same(role: str, shape: Shape) -> Turn:
    """A tensor that torch keeps as it is, under its own name."""
    return Turn(role, shape)


def vectors(names: Mapping[str, str], shapes: Mapping[str, Shape]) -> Turns | None:
    """The vectors of a norm, all of one length; None where something else is beside them."""
    if set(shapes) - set(names) or len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        return None
    return {leaf: same(names[leaf], shape) for leaf, shape in shapes.items()}
