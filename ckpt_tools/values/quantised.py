"""What works the numbers of a quantised tensor out, as float32: a matrix, whose columns are the last dimension, by its rows.

A matrix is a function of a first row and a count, which gives so many rows. What lies row by row is read as it is asked for; of
what lies column by column a whole matrix is held. These functions are called where numbers are wanted: they may read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

from ckpt_tools.errors import TensorError
from ckpt_tools.io.content import Computed, Content, read_into
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.values.numeric import E2M1, ELEMENTS, CastCount, as_bytes, by_position, is_finite, one_thread, part, torch_dtype
from ckpt_tools.values.pytorch import torch

Rows: TypeAlias = "Callable[[int, int], torch.Tensor]"  # of a matrix: two dimensions
Scales: TypeAlias = "Callable[[int, int], torch.Tensor]"  # numbers in a row, one a block: one dimension
MakeRows: TypeAlias = "Callable[[], Rows]"


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the power of each byte less 127, as E8M0 has it (OCP Microscaling Formats, section 5.4.1): 255 is NaN."""
    return torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), torch.nan])[exponents.int()]


class Numbers:
    def __init__(self, content: Content, dtype: DType, *, exponents: bool = False) -> None:
        self.content, self.exponents = by_position(content), exponents or dtype.name == "float8_e8m0fnu"
        self.dtype = DTYPES["uint8"] if self.exponents else dtype

    def raw(self, first: int, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=torch_dtype(self.dtype))
        data = bytearray(count * self.dtype.itemsize)
        read_into(part(self.content, first * self.dtype.itemsize, len(data)), memoryview(data))
        return torch.frombuffer(data, dtype=torch_dtype(self.dtype))

    def floats(self, first: int, count: int) -> torch.Tensor:
        found = self.raw(first, count)
        return powers(found) if self.exponents else found.to(torch.float32)

    def whole(self, columns: int) -> torch.Tensor:
        return self.raw(0, self.content.length // self.dtype.itemsize).view(-1, columns)

    def rows(self, columns: int) -> Rows:
        return lambda first, count: self.floats(first * columns, count * columns).view(count, columns)


def held(matrix: torch.Tensor) -> Rows:
    return lambda first, count: matrix[first : first + count].float()


def repeated(inner: Rows, shape: Sequence[int], boxes: Sequence[int]) -> Rows:
    """A matrix whose rows each stand for a box of rows of a larger tensor."""

    def rows(first: int, count: int) -> torch.Tensor:
        left, index, step = torch.arange(first, first + count), torch.zeros(count, dtype=torch.int64), 1
        for size, box in zip(reversed(shape), reversed(boxes), strict=True):
            index += left % size // box * step
            left, step = left // size, step * -(-size // box)
        low, high = int(index[0]), int(index[-1])
        return inner(low, high - low + 1)[index - low]

    return rows


# --- whole numbers in 32-bit words


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of `bits` bits in rows of words, the lowest first; those behind the last whole one are left out."""
    if bits in (4, 8):  # no number is in two bytes
        data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # of one word a row, the strides may be odd
        return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    count = words.shape[-1] * 32 // bits
    at = torch.arange(count) * bits
    wide = words.to(torch.int64) & 0xFFFFFFFF
    wide = torch.nn.functional.pad(wide, (0, 1))
    both = wide[..., at // 32] | wide[..., at // 32 + 1] << 32
    return both >> at % 32 & (1 << bits) - 1


def packed_along(words: Numbers, bits: int, columns: int, width: int, offset: int = 0) -> Rows:
    """A matrix packed along its rows into `width` words each."""

    def rows(first: int, count: int) -> torch.Tensor:
        found = words.raw(first * width, count * width).view(count, width)
        return unpacked(found, bits)[:, :columns].float() - offset

    return rows


def packed_down(words: Numbers, bits: int, height: int, columns: int, offset: int) -> Rows:
    """Matrices packed along their columns, one below the other."""
    size = -(-height * bits // 32)
    found = unpacked(words.whole(columns).view(-1, size, columns).transpose(1, 2), bits)
    return held(found[..., :height].transpose(1, 2).reshape(-1, columns).float() - offset)


def packed_apart(codes: Numbers, bits: int, height: int, columns: int) -> Rows:
    """Codes of 2 or 4 bits: row i of the bytes has row i of each part of the matrix, the first part in the lowest bits."""

    def rows(first: int, count: int) -> torch.Tensor:
        found = []
        for number, row, taken in runs(first, count, height):
            data = codes.raw(row * columns, taken * columns).view(taken, columns)
            found.append((data >> number * bits & (1 << bits) - 1).float())
        return torch.cat(found)

    return rows


def runs(first: int, count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The runs of `size` rows that some rows lie in: the number of each, the first row inside, and how many."""
    while count:
        number, row = divmod(first, size)
        taken = min(count, size - row)
        yield number, row, taken
        first, count = first + taken, count - taken


# --- codes with scales


def scaled(
    codes: Rows, scales: Rows, columns: int, run: int, zeros: Rows | None = None, groups: Numbers | None = None, cells: int = 0,
    factor: float = 1.0, biases: Rows | None = None,
) -> Rows:  # fmt: skip
    """(code - zero) * scale + bias, one of each for each run of `run` columns, or for the columns that `groups` gives it."""
    order = None if groups is None else _checked(groups.raw(0, columns).long(), cells, run)

    def spread(found: torch.Tensor) -> torch.Tensor:
        if order is not None:
            return found[:, order]
        if found.shape[1] == 1 or run == 1:
            return found
        return found.repeat_interleave(run, 1)[:, :columns]

    def rows(first: int, count: int) -> torch.Tensor:
        values = codes(first, count)
        if zeros is not None:
            values = values - spread(zeros(first, count))
        values = values * spread(scales(first, count))
        if biases is not None:
            values = values + spread(biases(first, count))
        return values if factor == 1.0 else values * factor

    return rows


def _checked(groups: torch.Tensor, cells: int, run: int) -> torch.Tensor | None:
    """The groups of columns, each of which is there; None where all are -1, and the columns are in order."""
    if run and bool((groups == -1).all()):
        return None
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < cells:
        raise TensorError(f"The groups of the columns of a quantised weight go from {groups.min()} to {groups.max()}.",
                          why=f"There are scales for {cells} groups.")  # fmt: skip
    return groups


def rounded(rows: Rows, dtype: DType) -> Rows:
    """A matrix, rounded to the dtype that its authors work in."""
    return lambda first, count: rows(first, count).to(torch_dtype(dtype)).float()


# --- codes of 4 bits that stand for a table's values


def _looked_up(codes: torch.Tensor, table: Sequence[float], *, low_first: bool) -> torch.Tensor:
    """The table's values of the two halves of each byte, in one row."""
    low, high = codes & 15, codes >> 4
    return torch.tensor(table)[torch.stack((low, high) if low_first else (high, low), dim=-1).reshape(-1).int()]


def nibbles(
    codes: Numbers, scales: Scales, block: int, columns: int, *, low_first: bool, table: Sequence[float] = E2M1
) -> Rows:
    """A table's value for every 4 bits, times the scale of its block; blocks go on over the ends of rows."""
    in_blocks = _repeated(scales, block)

    def rows(first: int, count: int) -> torch.Tensor:
        start, end = first * columns, (first + count) * columns
        if start == end:
            return torch.empty(count, columns)
        values = _looked_up(codes.raw(start // 2, -(-end // 2) - start // 2), table, low_first=low_first)
        return (values[start % 2 :][: end - start] * in_blocks(start, end - start)).view(count, -1)

    return rows


def nibbles_turned(codes: Numbers, exponents: Numbers, block: int, height: int, width: int) -> Rows:
    """Matrices of E2M1 with exponents, each with rows and columns exchanged; the low half of a byte comes first."""

    @lru_cache(maxsize=1)
    def matrix(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = height * width // 2, height * width // block
        found, scales = (one.raw(number * size, size) for one, size in zip((codes, exponents), sizes, strict=True))
        return found.view(height, -1), scales.view(height, -1)

    @lru_cache(maxsize=1)  # several calls ask for the columns of one block
    def columns(run: int) -> torch.Tensor:
        number, column = divmod(run * block, width)
        found, scales = matrix(number)
        values = _looked_up(found[:, column // 2 : (column + block) // 2], E2M1, low_first=True).view(height, block)
        return (values * powers(scales[:, column // block, None])).t().contiguous()

    def rows(first: int, count: int) -> torch.Tensor:
        return torch.cat([columns(run)[row : row + taken] for run, row, taken in runs(first, count, block)])

    return rows


def nested(codes: Numbers, table: Numbers, scales: Numbers, block: int, offset: float) -> Scales:
    """Scales that are codes of 8 bits themselves: a table's value, times the scale of a block of scales, and an offset."""
    known, in_blocks = table.floats(0, 256), _repeated(scales.floats, block)
    return lambda first, count: known[codes.raw(first, count).long()] * in_blocks(first, count) + offset


def _repeated(scales: Scales, block: int) -> Scales:
    def found(first: int, count: int) -> torch.Tensor:
        number = first // block
        return scales(number, -(-(first + count) // block) - number).repeat_interleave(block)[first - number * block :][:count]

    return found


def tiled(scales: Numbers, columns: int) -> Scales:
    """Scales of a matrix that lie in tiles of 128 x 4, rows 32 apart together (cuBLAS, "1D Block Scaling Factors Layout")."""
    tiles = -(-columns // 4)
    found = scales.whole(1).float().view(-1, tiles, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, tiles * 4)
    flat = found[:, :columns].reshape(-1)
    return lambda first, count: flat[first : first + count]


def multiplied(scales: Scales, whole: Numbers, *, divided: bool) -> Scales:
    """Scales times one number of the whole tensor, or through it."""
    one = whole.floats(0, 1)
    return lambda first, count: scales(first, count) / one if divided else scales(first, count) * one


# --- the plain tensor


def plain_content(make: MakeRows, shape: tuple[int, ...], target: DType, count: CastCount, of: tuple[Content, ...]) -> Computed:
    """The tensor's bytes, row-major, rounded once from float32."""
    length, columns = prod(shape) * target.itemsize, shape[-1] if shape else 1
    row, step = columns * target.itemsize, max(1, ELEMENTS // max(1, columns))

    def work(start: int, size: int) -> Iterator[memoryview]:
        rows, end = make(), start + size
        last = -(-end // row) if size else 0
        for first in range(start // row if size else 0, last, step):
            with one_thread():  # packed columns are worked out many at a time
                values = rows(first, min(step, last - first)).reshape(-1)
                if values.numel() and not is_finite(values):  # the product or a scale makes those
                    count.overflowed += int(values.isinf().sum())
                    count.nan += int(values.isnan().sum())
                data = as_bytes(values, target, count)
            yield data[max(0, start - first * row) : max(0, end - first * row)]

    def cut(start: int, size: int) -> Computed:
        return Computed(size, lambda: work(start, size), of, lambda at, part: cut(start + at, part))

    return cut(0, length)
