"""Several tensors made one, place by place: their mean, or the largest of integers; and the dtype that holds each of them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence

from ckpt_tools.io.content import Computed, Content
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.values.numeric import CastCount, as_bytes, has_numbers, numbers, torch_dtype
from ckpt_tools.values.pytorch import torch


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
            yield as_bytes(functools.reduce(torch.maximum, (block.to(torch.int64) for block in together)), target)

    content, dtype = parts[0]
    return Computed(content.length // dtype.itemsize * target.itemsize, work, tuple(part[0] for part in parts))
