"""What works the numbers of a quantised tensor out, as float32: a matrix, whose columns are the last dimension, by its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ckpt_tools.errors import TensorError
from ckpt_tools.io.content import Content
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.values.numeric import torch_dtype
from ckpt_tools.values.quantised import Numbers, Reader, Slab, powers
from ckpt_tools.values.quantised_rows import Rows

if TYPE_CHECKING:
    import torch

# The values of float4_e2m1: 1 bit of sign, 2 of exponent, 1 of mantissa (OCP Microscaling Formats, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Kernel(Protocol):
    """A tensor whose numbers are worked out by rows."""

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows, as float32 of two dimensions."""
        ...


class Scaled:
    """(code - zero) * scale + bias, one of each for each run of `run` columns, or for the columns that `groups` gives it."""

    def __init__(
        self, codes: Rows, scales: Rows, columns: int, run: int, zeros: Rows | None = None, groups: Numbers | None = None,
        cells: int = 0, factor: float = 1.0, biases: Rows | None = None,
    ) -> None:  # fmt: skip
        self.codes, self.scales, self.zeros, self.columns, self.run = codes, scales, zeros, columns, run
        self.factor, self.biases = factor, biases
        self.groups = None if groups is None else _checked(groups.raw(0, columns).long(), cells, run)

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        values = self.codes.rows(first, count)
        if self.zeros is not None:
            values = values - self._spread(self.zeros.rows(first, count))
        values = values * self._spread(self.scales.rows(first, count))
        if self.biases is not None:
            values = values + self._spread(self.biases.rows(first, count))
        return values if self.factor == 1.0 else values * self.factor

    def _spread(self, found: torch.Tensor) -> torch.Tensor:
        """What is there for each run, for each of its columns."""
        if self.groups is not None:
            return found[:, self.groups]
        if found.shape[1] == 1 or self.run == 1:
            return found
        return found.repeat_interleave(self.run, 1)[:, : self.columns]


class Rounded:
    """What another kernel gives, rounded to the dtype that its authors work in."""

    def __init__(self, kernel: Kernel, dtype: DType) -> None:
        self.kernel, self.dtype = kernel, torch_dtype(dtype)

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        return self.kernel.rows(first, count).to(self.dtype).float()


class Grouped:
    """scale * code - shift, one of each for each row of codes; several rows of codes are a row."""

    def __init__(self, codes: Rows, scales: Rows, shifts: Rows, groups: int) -> None:
        self.codes, self.scales, self.shifts, self.groups = codes, scales, shifts, groups

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        span = first * self.groups, count * self.groups
        return (self.scales.rows(*span) * self.codes.rows(*span) - self.shifts.rows(*span)).view(count, -1)


def _checked(groups: torch.Tensor, cells: int, run: int) -> torch.Tensor | None:
    """The groups of columns, each of which is there; None where all are -1, and the columns are in order."""
    if run and bool((groups == -1).all()):
        return None
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < cells:
        raise TensorError(f"The groups of the columns of a quantised weight go from {groups.min()} to {groups.max()}.",
                          why=f"There are scales for {cells} groups.")  # fmt: skip
    return groups


class Nibbles:
    """A table's value for every 4 bits, times the scale of its block; blocks go on over the ends of rows."""

    def __init__(
        self, codes: Content, table: Sequence[float], scales: Scales, block: int, columns: int, *, low_first: bool
    ) -> None:
        self.reader, self.table, self.scales = Reader(codes), table, scales
        self.block, self.columns, self.low_first = block, columns, low_first

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows."""
        import torch

        start, end = first * self.columns, (first + count) * self.columns
        if start == end:
            return torch.empty(count, self.columns)
        data = self.reader.bytes(start // 2, -(-end // 2) - start // 2)
        values = looked_up(torch.frombuffer(data, dtype=torch.uint8), self.table, low_first=self.low_first)
        block = start // self.block
        scales = self.scales.floats(block, -(-end // self.block) - block).repeat_interleave(self.block)
        return (values[start % 2 :][: end - start] * scales[start - block * self.block :][: end - start]).view(count, -1)


class TurnedNibbles:
    """Matrices of 4-bit codes as in `Nibbles`, each with rows and columns exchanged; the low half of a byte comes first."""

    def __init__(self, codes: Content, table: Sequence[float], scales: Content, block: int, height: int, width: int) -> None:
        self.codes, self.table, self.scales, self.block = codes, table, scales, block
        self.height, self.width = height, width
        self._matrix = self._first = -1
        self._held: torch.Tensor | None = None

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows, which are columns of the matrices as they lie."""
        import torch

        found = []
        while count:
            inside = first % self.block
            taken = min(count, self.block - inside)
            found.append(self._columns(first - inside)[inside : inside + taken])
            first, count = first + taken, count - taken
        return torch.cat(found)

    def _columns(self, first: int) -> torch.Tensor:
        """The columns of one block; those that were worked out last are held, since several calls ask for them."""
        if self._held is not None and first == self._first:
            return self._held
        matrix, column = divmod(first, self.width)
        if matrix != self._matrix:
            row, groups, self._matrix = self.width // 2, self.width // self.block, matrix
            self._codes = Slab(self.codes, self.height, row, matrix * self.height * row)
            self._scales = Slab(self.scales, self.height, groups, matrix * self.height * groups)
        codes = self._codes.columns(column // 2, self.block // 2).contiguous()
        scales = powers(self._scales.columns(column // self.block, 1))
        values = looked_up(codes, self.table, low_first=True).view(self.height, self.block) * scales
        self._first, self._held = first, values.t().contiguous()
        return self._held


class Scales(Protocol):
    """Numbers, one a block."""

    def floats(self, first: int, count: int) -> torch.Tensor:
        """So many of them as float32."""
        ...


class Nested:
    """Scales that are codes of 8 bits themselves: a table's value, times the scale of a block of scales, and an offset."""

    def __init__(self, codes: Numbers, table: Numbers, scales: Numbers, block: int, offset: float) -> None:
        self.codes, self.table, self.scales, self.block, self.offset = codes, table.floats(0, 256), scales, block, offset

    def floats(self, first: int, count: int) -> torch.Tensor:
        """So many of them."""
        block = first // self.block
        scales = self.scales.floats(block, -(-(first + count) // self.block) - block).repeat_interleave(self.block)
        codes = self.codes.raw(first, count).long()
        return self.table[codes] * scales[first - block * self.block :][:count] + self.offset


class Tiled:
    """Scales of a matrix that lie in tiles of 128 x 4, rows 32 apart together (cuBLAS, "1D Block Scaling Factors Layout")."""

    def __init__(self, scales: Numbers, columns: int) -> None:
        self.scales, self.columns, self.tiles = scales, columns, -(-columns // 4)
        self._at = -1
        self._held: torch.Tensor | None = None

    def floats(self, first: int, count: int) -> torch.Tensor:
        """So many of them, row by row."""
        import torch

        found, size = [torch.empty(0)], 128 * self.columns
        while count:
            band, inside = divmod(first, size)
            taken = min(count, size - inside)
            found.append(self._band(band)[inside : inside + taken])
            first, count = first + taken, count - taken
        return torch.cat(found)

    def _band(self, number: int) -> torch.Tensor:
        """128 rows; those that were put in order last are held."""
        if self._held is None or number != self._at:
            tiles = self.scales.floats(number * self.tiles * 512, self.tiles * 512).view(self.tiles, 32, 4, 4)
            rows = tiles.transpose(1, 2).reshape(self.tiles, 128, 4).transpose(0, 1).reshape(128, -1)
            self._at, self._held = number, rows[:, : self.columns].reshape(-1)
        return self._held


class Multiplied:
    """Scales times one number of the whole tensor, or through it."""

    def __init__(self, scales: Scales, whole: Numbers, *, divided: bool) -> None:
        self.scales, self.whole, self.divided = scales, whole.floats(0, 1), divided

    def floats(self, first: int, count: int) -> torch.Tensor:
        """So many of them."""
        found = self.scales.floats(first, count)
        return found / self.whole if self.divided else found * self.whole


def looked_up(codes: torch.Tensor, table: Sequence[float], *, low_first: bool) -> torch.Tensor:
    """The table's values of the two halves of each byte, in one row."""
    import torch

    halves = (codes & 15, codes >> 4) if low_first else (codes >> 4, codes & 15)
    return torch.tensor(table)[torch.stack(halves, dim=-1).reshape(-1).int()]
