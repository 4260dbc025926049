"""Numbers as blocks of Q8_0: 32 of them, each a byte, and one scale. As gguf-py and ggml do it, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import Computed, Content
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.values.ggml.types import BY_NAME
from ckpt_tools.values.numeric import numbers

if TYPE_CHECKING:
    import torch

Q8_0 = BY_NAME["Q8_0"]


def quantised(content: Content, dtype: DType, name: str) -> Computed:
    """The blocks of a tensor whose rows are whole blocks.

    Raises, while the bytes are worked out:
        ConvertError: a value that is not finite, or so large that its scale would not be.
    """

    def work() -> Iterator[bytes]:
        for block in numbers(content, dtype):
            yield _blocks(block, name)

    return Computed(content.length // dtype.itemsize // Q8_0.elements * Q8_0.nbytes, work, content)


def _blocks(values: torch.Tensor, name: str) -> bytes:
    import torch

    rows = values.float().reshape(-1, Q8_0.elements)
    scale = rows.abs().amax(dim=1, keepdim=True) / 127
    half = scale.half()
    if not bool(half.isfinite().all()):
        raise ConvertError(
            f"{name!r} has values that Q8_0 cannot hold: not finite, or beyond 8 million.",
            fix="Leave it out of `quantize`: write float32.",
        )
    scaled = rows * torch.where(scale == 0, 0.0, 1 / scale)
    size = scaled.abs()
    whole = size.floor()
    rounded = (whole + (2 * (size - whole)).floor()) * scaled.sign()  # halves away from zero, as C's roundf
    made = torch.cat([half.view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)], dim=1)
    out = bytearray(made.numel())
    torch.frombuffer(out, dtype=torch.uint8).copy_(made.flatten())
    return bytes(out)
