"""What is worked out of the values of tensors, a block at a time: moments, a histogram, how far two are apart, counts, means.

For moments and gaps the values come from `numeric.numbers` as float64 (complex128).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from ckpt_tools.io.content import Computed, Content
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.values.numeric import CastCount, as_bytes, has_numbers, numbers, torch_dtype
from ckpt_tools.values.pytorch import torch

BINS = 16


@dataclass(slots=True)
class Moments:
    """Count, mean, spread and extremes of values that come in blocks."""

    elements: int = 0
    finite: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    zeros: int = 0
    nans: int = 0
    infs: int = 0

    def add(self, values: torch.Tensor) -> None:
        values = real(values)
        count = values.numel()
        finite = finite_part(values)
        nans = int(values.isnan().sum()) if finite.numel() < count else 0
        block = Moments(count, finite.numel(), nans=nans, infs=count - finite.numel() - nans)
        if block.finite:
            mean = finite.mean()
            low, high = finite.aminmax()
            block.mean, block.low, block.high = float(mean), float(low), float(high)
            block.squares = float((finite - mean).square_().sum())
            block.zeros = block.finite - int(finite.count_nonzero())
        self.merge(block)

    def merge(self, other: Moments) -> None:
        together = self.finite + other.finite
        if other.finite:
            step = other.mean - self.mean
            self.mean += step * (other.finite / together)
            self.squares += other.squares + step * step * (self.finite * other.finite / together)
        self.finite = together
        self.elements += other.elements
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.zeros, self.nans, self.infs = self.zeros + other.zeros, self.nans + other.nans, self.infs + other.infs

    @property
    def std(self) -> float | None:
        """The standard deviation as `torch.std` gives it (divided by n - 1); None below two finite values."""
        return math.sqrt(self.squares / (self.finite - 1)) if self.finite > 1 and math.isfinite(self.squares) else None

    def to_json(self) -> dict[str, Any]:
        some = self.finite > 0
        return {
            "elements": self.elements, "mean": _number(self.mean) if some else None, "std": self.std,
            "min": self.low if some else None, "max": self.high if some else None, "zeros": self.zeros, "nan": self.nans,
            "inf": self.infs,
        }  # fmt: skip


def real(values: torch.Tensor) -> torch.Tensor:
    return values.abs() if values.is_complex() else values


def finite_part(values: torch.Tensor) -> torch.Tensor:
    """The values that are neither NaN nor infinite; all of them, uncopied, in the usual case."""
    mask = values.isfinite()
    return values if bool(mask.all()) else values[mask]


def histogram(blocks: Iterable[torch.Tensor], moments: Moments) -> list[int]:
    """How many finite values lie in each of `BINS` equal parts from the lowest to the highest; empty without any."""
    if not moments.finite or not math.isfinite(moments.high - moments.low):
        return []
    if moments.low == moments.high:  # one value: histc would widen the range by itself
        return [moments.finite]
    counts = None
    for block in blocks:
        found = finite_part(real(block)).histc(BINS, moments.low, moments.high)
        counts = found if counts is None else counts + found
    return [] if counts is None else [int(count) for count in counts.tolist()]


@dataclass(slots=True)
class Gap:
    """How far two tensors of one shape are apart, from values that come in pairs of blocks."""

    elements: int = 0
    changed: int = 0
    nonfinite: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    dot: float = field(default=0.0, repr=False)
    apart_squares: float = field(default=0.0, repr=False)
    left_squares: float = field(default=0.0, repr=False)
    right_squares: float = field(default=0.0, repr=False)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.elements += left.numel()
        both = left.isfinite() & right.isfinite()
        if not bool(both.all()):
            odd_left, odd_right = left[~both], right[~both]
            differ = (odd_left != odd_right) & ~(odd_left.isnan() & odd_right.isnan())
            self.nonfinite += int(differ.sum())
            self.changed += int(differ.sum())
            left, right = left[both], right[both]
        if left.numel() and (left.is_floating_point() or left.is_complex()):
            self._add_finite(left, right, (left - right).abs())
        elif left.numel():
            # Of integers the difference is exact where it is small, and never 0 where they differ.
            far = (left.double() - right.double()).abs()
            near = (left.long() - right.long()).abs().double()  # wraps around, but not where they are near each other
            self._add_finite(left.double(), right.double(), far.where(far > 2.0**62, near))

    def _add_finite(self, left: torch.Tensor, right: torch.Tensor, apart: torch.Tensor) -> None:
        self.changed += int(apart.count_nonzero())
        self.max_abs = max(self.max_abs, float(apart.max()))
        larger = left.abs().maximum(right.abs())
        self.max_rel = max(self.max_rel, float((apart / larger.where(larger > 0, 1.0)).max()))
        self.dot += float((left * right.conj()).real.sum()) if left.is_complex() else float(left.dot(right))
        self.apart_squares += float(apart.square_().sum())
        self.left_squares += float(left.abs().square().sum())
        self.right_squares += float(right.abs().square().sum())

    def add_equal(self, values: torch.Tensor) -> None:
        self.elements += values.numel()
        squares = float(real(finite_part(values)).square().sum())
        self.dot, self.left_squares = self.dot + squares, self.left_squares + squares
        self.right_squares += squares

    def merge(self, other: Gap) -> None:
        self.max_abs, self.max_rel = max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel)
        for name in ("elements", "changed", "nonfinite", "dot", "apart_squares", "left_squares", "right_squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def relative_l2(self) -> float | None:
        """The length of the difference by the length of the left one; None where that is all zeros."""
        if not self.left_squares or not math.isfinite(self.left_squares) or not math.isfinite(self.apart_squares):
            return None
        return math.sqrt(self.apart_squares) / math.sqrt(self.left_squares)

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between the two as vectors; None where one is all zeros."""
        lengths = math.sqrt(self.left_squares) * math.sqrt(self.right_squares)
        if not lengths or not math.isfinite(lengths) or not math.isfinite(self.dot):
            return None
        return max(-1.0, min(1.0, self.dot / lengths))

    def to_json(self) -> dict[str, Any]:
        return {
            "elements": self.elements, "changed": self.changed,
            "changed_fraction": self.changed / self.elements if self.elements else 0.0, "nonfinite": self.nonfinite,
            "max_abs": _number(self.max_abs), "max_rel": _number(self.max_rel), "relative_l2": self.relative_l2,
            "cosine": self.cosine,
        }  # fmt: skip


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- counts, as the bytes of a tensor pass


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
            nan, inf = values.isnan(), values.isinf()
            self.nan, self.inf = self.nan + int(nan.sum()), self.inf + int(inf.sum())
            values = values[~(nan | inf)]
            self.huge += int((values.abs().double() > self.HUGE).sum())
        if self.moments and values.numel():
            wide = values.double()
            self.largest = max(self.largest, float(wide.abs().max()))
            self.total, self.squares = self.total + float(wide.sum()), self.squares + float(wide.square().sum())


@cache
def _special_bytes(dtype: DType) -> dict[bytes, str]:
    """The bytes that stand for NaN or an infinity in a float of 8 bits; two floats of 4 bits have none."""
    if dtype.packed > 1:
        return {}
    values = torch.frombuffer(bytearray(range(256)), dtype=torch_dtype(dtype)).float()
    special = {bytes([byte]): "nan" for byte in values.isnan().nonzero().flatten().tolist()}
    return special | {bytes([byte]): "inf" for byte in values.isinf().nonzero().flatten().tolist()}


# --- several tensors made one, place by place


def weighted_mean(parts: list[tuple[Content, DType, float]], target: DType, count: CastCount | None = None) -> Computed:
    """The mean of contents, worked out in float64 (complex128) and rounded once, to `target`; of equal values that value."""
    largest = math.fsum(abs(weight) for *_, weight in parts)
    weights = [math.ldexp(weight, -math.frexp(largest)[1]) for *_, weight in parts]  # their sum cannot overflow
    whole, exact = math.fsum(weights), target.name in ("float64", "complex128")  # what is rounded needs no last bit

    def work() -> Iterator[memoryview]:
        streams = [numbers(content, dtype) for content, dtype, _ in parts]
        for first, *others in zip(*streams, strict=True):
            mean, same = first * weights[0], None
            for value, weight in zip(others, weights[1:], strict=True):
                mean.add_(value, alpha=weight)
                if exact:
                    same = value == first if same is None else same.logical_and_(value == first)
            mean.div_(whole)
            if same is not None:
                mean = first.where(same, mean)
            yield as_bytes(mean, target, count)

    content, dtype, _ = parts[0]
    return Computed(content.length // dtype.itemsize * target.itemsize, work, tuple(part[0] for part in parts))


def widest(dtypes: Sequence[DType]) -> DType:
    """The smallest dtype of their family that has the range and the digits of each (as torch.promote_types where that can)."""
    if len(set(dtypes)) == 1:
        return dtypes[0]

    def range_of(dtype: DType) -> tuple[float, ...]:
        if dtype.family == "int":
            return torch.iinfo(torch_dtype(dtype)).max, -torch.iinfo(torch_dtype(dtype)).min
        info = torch.finfo(torch_dtype(dtype))
        return info.max, 1 / info.eps, 1 / info.smallest_normal

    least = [max(column) for column in zip(*map(range_of, dtypes), strict=True)]
    # of one byte only those that are there: torch says that float8_e5m2fnuz has more digits than it has
    rows = [row for row in DTYPES.values() if row in dtypes or (row.family == dtypes[0].family and row.bits > 8)]
    able = (row for row in rows if has_numbers(row) and row.packed == 1 and all(map(operator.ge, range_of(row), least)))
    return min(able, key=lambda row: row.bits)


def largest(parts: list[tuple[Content, DType]], target: DType) -> Computed:
    """The largest of several integers, place by place, exactly. Looked at as int64, so uint64 is not one of them."""

    def work() -> Iterator[memoryview]:
        streams = [numbers(content, dtype, as_floats=False) for content, dtype in parts]
        for together in zip(*streams, strict=True):
            yield as_bytes(reduce(torch.maximum, (block.to(torch.int64) for block in together)), target)

    content, dtype = parts[0]
    return Computed(content.length // dtype.itemsize * target.itemsize, work, tuple(part[0] for part in parts))
