"""The plain tensor of a quantised one: its bytes in another dtype, a few rows at a time, or a box of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.io.content import Computed, Content
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.values.numeric import ELEMENTS, CastCount, narrow, one_thread, torch_dtype
from ckpt_tools.values.quantised_kernels import Kernel

if TYPE_CHECKING:
    import torch

MakeKernel = Callable[[], Kernel]


def plain_content(
    make: MakeKernel, shape: tuple[int, ...], target: DType, count: CastCount, of: tuple[Content, ...]
) -> Computed:
    """The tensor's bytes, row-major, rounded once from float32."""
    length, columns = prod(shape) * target.itemsize, as_matrix(shape)[1]
    row, step = columns * target.itemsize, max(1, ELEMENTS // max(1, columns))

    def work(start: int, size: int) -> Iterator[memoryview]:
        import torch

        kernel, dtype = make(), torch_dtype(target)
        end = start + size
        last = -(-end // row) if size else 0
        for first in range(start // row if size else 0, last, step):
            with one_thread():  # packed columns are worked out many at a time
                values = kernel.rows(first, min(step, last - first)).reshape(-1)
                _count(values, count)
                out = bytearray(values.numel() * target.itemsize)
                narrow(values, torch.frombuffer(out, dtype=dtype), count)
            yield memoryview(out)[max(0, start - first * row) : max(0, end - first * row)]

    def cut(start: int, size: int) -> Computed:
        return Computed(size, lambda: work(start, size), of, lambda at, part: cut(start + at, part))

    return cut(0, length)


def _count(values: torch.Tensor, count: CastCount) -> None:
    """Count what the product or a scale makes infinite or NaN. The extremes are looked at first: masks take longer."""
    import torch

    if values.numel() and not all(extreme.isfinite() for extreme in torch.aminmax(values)):
        count.overflowed += int(values.isinf().sum())
        count.nan += int(values.isnan().sum())


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of a tensor that is seen as a matrix."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def box(make: MakeKernel, shape: tuple[int, ...], window: Sequence[slice]) -> torch.Tensor:
    """A box of the tensor's numbers as float32: a slice with a step of 1 for each dimension. Only its rows are worked out."""
    import torch

    kernel = make()
    spans = [range(size)[cut] for size, cut in zip(shape, window, strict=True)]
    *outer, last = spans or [range(1)]
    sizes = tuple(map(len, spans))
    if 0 in sizes:
        return torch.empty(sizes)
    starts = torch.zeros(1, dtype=torch.int64)
    for size, span in zip(shape, outer, strict=False):
        starts = (starts[:, None] * size + torch.arange(span.start, span.stop)).flatten()
    out = torch.empty(len(starts), len(last))
    at = 0
    for first, count in _runs(starts.tolist()):
        for row in range(0, count, step := max(1, ELEMENTS // max(1, as_matrix(shape)[1]))):
            taken = min(step, count - row)
            out[at : at + taken] = kernel.rows(first + row, taken)[:, last.start : last.stop]
            at += taken
    return out.view(sizes)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs: first, count."""
    first, count = numbers[0], 0
    for number in numbers:
        if number != first + count:
            yield first, count
            first, count = number, 0
        count += 1
    yield first, count
