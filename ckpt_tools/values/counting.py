"""Counts over the values of a tensor as its bytes pass: NaN, infinities, zeros. torch is imported inside the functions."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ckpt_tools.tree.dtypes import DType
from ckpt_tools.values.numeric import torch_dtype

if TYPE_CHECKING:
    import torch


class ValueCount:
    """Counts over the elements of a tensor, taken in pieces that may end anywhere: a piece may cut an element in two."""

    HUGE = 1e18

    def __init__(self, dtype: DType, *, moments: bool = False) -> None:
        self.dtype, self.moments = dtype, moments
        self.floating = dtype.family in ("float", "complex")
        self.nan = self.inf = self.huge = 0
        self.nonzero = False
        self.largest = self.total = self.squares = 0.0
        self._rest = b""

    def take(self, data: bytes | memoryview) -> None:
        if self.nonzero and not self.floating:
            return
        size = self.dtype.itemsize
        if self._rest or len(data) % size:
            joined = self._rest + bytes(data)
            cut = len(joined) - len(joined) % size
            data, self._rest = joined[:cut], joined[cut:]
        if len(data):
            self._count(data)

    def _count(self, data: bytes | memoryview) -> None:
        import torch

        writable = bytearray(data) if isinstance(data, bytes) or data.readonly else data
        if self.floating and self.dtype.itemsize > 1:
            values = torch.frombuffer(writable, dtype=torch_dtype(self.dtype))
            self._count_floats(torch.view_as_real(values) if self.dtype.family == "complex" else values)
            return
        self.nonzero = self.nonzero or bool(torch.frombuffer(writable, dtype=torch.uint8).any())
        for byte, kind in _special_bytes(self.dtype).items() if self.floating else ():
            found = bytes(data).count(byte)
            self.nan, self.inf = self.nan + found * (kind == "nan"), self.inf + found * (kind == "inf")

    def _count_floats(self, values: torch.Tensor) -> None:
        if values.itemsize == 2:  # their own reductions are not vectorised: 0.1 GB/s, and 1 GB/s by way of float32
            values = values.float()
        largest = float(values.abs().max())
        self.nonzero = self.nonzero or largest != 0
        if not largest < self.HUGE:  # NaN compares false: one test for all that is rare
            values = self._count_rare(values)
        if self.moments and values.numel():
            wide = values.double()
            self.largest = max(self.largest, float(wide.abs().max()))
            self.total, self.squares = self.total + float(wide.sum()), self.squares + float(wide.square().sum())

    def _count_rare(self, values: torch.Tensor) -> torch.Tensor:
        """Count what is not finite, or huge; returns the finite values."""
        nan, inf = values.isnan(), values.isinf()
        self.nan, self.inf = self.nan + int(nan.sum()), self.inf + int(inf.sum())
        finite = values[~(nan | inf)]
        self.huge += int((finite.abs().double() > self.HUGE).sum())
        return finite


@cache
def _special_bytes(dtype: DType) -> dict[bytes, str]:
    """The bytes that stand for NaN or an infinity in a float of 8 bits; two floats of 4 bits have none."""
    import torch

    if dtype.packed > 1:
        return {}
    values = torch.frombuffer(bytearray(range(256)), dtype=torch_dtype(dtype)).float()
    special = {bytes([byte]): "nan" for byte in values.isnan().nonzero().flatten().tolist()}
    return special | {bytes([byte]): "inf" for byte in values.isinf().nonzero().flatten().tolist()}


def cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
