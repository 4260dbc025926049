"""Rows of the matrices that a quantised tensor is made of, a few at a time: codes, scales, zero points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckpt_tools.io.content import Content
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.values.numeric import torch_dtype
from ckpt_tools.values.quantised import Numbers, Reader, Slab

if TYPE_CHECKING:
    import torch


_TOGETHER = 32  # numbers of any size that begin and end with words
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a word of so many bits to a number, each of which is 1


class Rows(Protocol):
    """A matrix that is read by its rows."""

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows, as float32 of two dimensions."""
        ...


class Matrix:
    """Numbers row by row."""

    def __init__(self, numbers: Numbers, columns: int) -> None:
        self.numbers, self.columns = numbers, columns

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        return self.numbers.floats(first * self.columns, count * self.columns).view(count, self.columns)


class Repeated:
    """A matrix whose rows each stand for a box of rows of a larger tensor."""

    def __init__(self, inner: Rows, shape: tuple[int, ...], grid: tuple[int, ...], boxes: tuple[int, ...]) -> None:
        self.inner, self.shape, self.grid, self.boxes = inner, shape, grid, boxes

    def rows(self, first: int, count: int) -> torch.Tensor:
        """For so many rows of the larger tensor the row of `inner` that each is in."""
        import torch

        left, index, step = torch.arange(first, first + count), torch.zeros(count, dtype=torch.int64), 1
        for size, cells, box in zip(reversed(self.shape), reversed(self.grid), reversed(self.boxes), strict=True):
            index += left % size // box * step
            left, step = left // size, step * cells
        low, high = int(index[0]), int(index[-1])
        return self.inner.rows(low, high - low + 1)[index - low]


class Packed:
    """Whole numbers of `bits` bits, packed along the rows into 32-bit words as one run of bits, the lowest first."""

    def __init__(self, content: Content, bits: int, columns: int, words: int, offset: int, *, loose: bool = False) -> None:
        self.reader, self.bits, self.columns, self.words, self.offset = Reader(content), bits, columns, words, offset
        self.loose = loose

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        import torch

        data = self.reader.bytes(first * self.words * 4, count * self.words * 4)
        words = torch.frombuffer(data, dtype=torch.int32).view(count, self.words)
        return unpacked(words, self.bits, loose=self.loose)[:, : self.columns].to(torch.float32) - self.offset


class PackedDown:
    """The same, packed along the columns: 32 rows of numbers in `bits` rows of words; of one matrix or several."""

    def __init__(self, content: Content, bits: int, height: int, columns: int, offset: int, *, loose: bool = False) -> None:
        self.reader, self.bits, self.height, self.columns, self.offset = Reader(content), bits, height, columns, offset
        self.loose = loose
        self.numbers, self.rows_of = (32 // bits, 1) if loose else (32, bits)  # so many numbers in so many rows of words
        self.words = -(-height // (32 // bits)) if loose else -(-height * bits // 32)  # rows of words in one matrix

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        import torch

        found = []
        while count:
            matrix, row = divmod(first, self.height)
            taken = min(count, self.height - row)
            start, end = row // self.numbers * self.rows_of, -(-(row + taken) // self.numbers) * self.rows_of
            end = min(self.words, end)
            step = self.columns * 4
            data = self.reader.bytes((matrix * self.words + start) * step, (end - start) * step)
            words = torch.frombuffer(data, dtype=torch.int32).view(end - start, self.columns)
            inside = row % self.numbers
            numbers = unpacked(words.t().contiguous(), self.bits, loose=self.loose)[:, inside : inside + taken]
            found.append(numbers.t().to(torch.float32) - self.offset)
            first, count = first + taken, count - taken
        return torch.cat(found)


class Columns:
    """The columns of a matrix of numbers, as rows."""

    def __init__(self, content: Content, dtype: DType, rows: int, columns: int) -> None:
        self.slab, self.dtype = Slab(content, rows, columns * dtype.itemsize), dtype

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many columns."""
        import torch

        item = self.dtype.itemsize
        found = self.slab.columns(first * item, count * item).contiguous().view(torch_dtype(self.dtype))
        return found.t().to(torch.float32)


class PackedApart:
    """Codes of 2 or 4 bits: row i of the bytes has row i of each part of the matrix, the first part in the lowest bits."""

    def __init__(self, content: Content, bits: int, height: int, columns: int) -> None:
        self.reader, self.bits, self.height, self.columns = Reader(content), bits, height, columns

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        import torch

        found = []
        while count:
            part, row = divmod(first, self.height)
            taken = min(count, self.height - row)
            data = self.reader.bytes(row * self.columns, taken * self.columns)
            codes = torch.frombuffer(data, dtype=torch.uint8).view(taken, self.columns)
            found.append((codes >> part * self.bits & (1 << self.bits) - 1).to(torch.float32))
            first, count = first + taken, count - taken
        return torch.cat(found)


class PackedColumns:
    """The columns of a matrix that is packed along them, as rows: GPTQ's weights."""

    def __init__(self, content: Content, bits: int, words: int, columns: int) -> None:
        self.slab, self.bits = Slab(content, words, columns * 4), bits

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many columns."""
        import torch

        words = self.slab.columns(first * 4, count * 4).contiguous().view(torch.int32)
        return unpacked(words.t().contiguous(), self.bits).to(torch.float32)


class ColumnsOfPacked:
    """The columns of a matrix that is packed along its rows, as rows: the zero points of GPTQ, and all of AWQ."""

    def __init__(
        self, content: Content, bits: int, rows: int, words: int, columns: int, order: tuple[int, ...] = (),
        *, less_one: bool = False,
    ) -> None:  # fmt: skip
        self.slab, self.bits, self.words, self.columns = Slab(content, rows, words * 4), bits, words, columns
        self.order, self.less_one = order, less_one
        self._first = -1
        self._held: torch.Tensor | None = None  # the columns that were unpacked last: words hold those of several

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many columns."""
        import torch

        found = []
        while count:
            inside = first % _TOGETHER
            taken = min(count, _TOGETHER - inside)
            found.append(self._together(first - inside)[inside : inside + taken])
            first, count = first + taken, count - taken
        return torch.cat(found).to(torch.float32)

    def _together(self, first: int) -> torch.Tensor:
        """32 columns, or what is left, as rows of bytes."""
        import torch

        if self._held is None or first != self._first:
            start, end = first // 32 * self.bits, min(self.words, (first // 32 + 1) * self.bits)
            words = self.slab.columns(start * 4, (end - start) * 4).contiguous().view(torch.int32)
            numbers = self._numbers(words)
            if self.order:
                numbers = numbers.view(len(numbers), -1, len(self.order))[:, :, list(self.order)].flatten(1)
            self._first, self._held = first, numbers.t().contiguous().to(torch.uint8)
        return self._held

    def _numbers(self, words: torch.Tensor) -> torch.Tensor:
        if not self.less_one:
            return unpacked(words, self.bits)
        if self.bits in _ONES:
            return unpacked(words + _ONES[self.bits], self.bits)
        return unpacked(words, self.bits) + 1 & (1 << self.bits) - 1


def unpacked(words: torch.Tensor, bits: int, *, loose: bool = False) -> torch.Tensor:
    """The numbers in rows of 32-bit words; those behind the last whole one are left out."""
    import torch

    if bits in (4, 8):  # no number is in two bytes
        data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # of one word a row, the strides may be odd
        return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    if loose:
        shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
        return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
    count = words.shape[-1] * 32 // bits
    at = torch.arange(count) * bits
    wide = words.to(torch.int64) & 0xFFFFFFFF
    wide = torch.nn.functional.pad(wide, (0, 1))
    both = wide[..., at // 32] | wide[..., at // 32 + 1] << 32
    return both >> at % 32 & (1 << bits) - 1
