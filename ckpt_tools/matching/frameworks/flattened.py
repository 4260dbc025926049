"""Dense layers beside a flattened image: Flax and Keras flatten [height, width, channels], torch [channels, height, width].

Equal sizes hide that such a layer has its inputs in another order. No file says that there was a flatten; but then the layer
has several times as many inputs as the convolution before it has channels, and no layer right before it gives so many.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.matching.params import Param
from ckpt_tools.matching.records import Shape
from ckpt_tools.matching.sides.order import in_order_of_names


class Flattened:
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
        """The shape of the next tensor of another layer."""
        own = self.rows[at].name.rpartition(".")[0]
        while 0 <= (at := at + step) < len(self.rows):
            if self.rows[at].name.rpartition(".")[0] != own:
                return self.rows[at].shape
        return ()


_INPUTS = (
    "its inputs may be a flattened image, whose channels come last there and first here: a plan says which: "
    'a transpose, or a permute with axes = "(height width {channels}) out -> out ({channels} height width)", height as a number'
)
_OUTPUTS = "its outputs may be an image, whose channels come last there and first here: a plan says which"


def _is_image(size: int, channels: int) -> bool:
    """Whether so many numbers may be an image of several places with so many channels."""
    return 1 < channels < size and size % channels == 0
