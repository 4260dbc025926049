"""Parts of contents, and the numbers in them: of codes and scales a few rows are wanted at a time. torch is imported inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_tools.io.content import Content, Joined, Literal, Range, chunks, read_into
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.values.numeric import part, torch_dtype

if TYPE_CHECKING:
    import torch

_SLAB = 32 << 20  # bytes of a matrix that is read by its columns and held at a time


class Reader:
    """Ranges of a content, asked for in ascending order: what is inflated or computed is then made once."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self._rest: Iterator[bytes | memoryview] | None = None
        self._at, self._held = 0, bytearray()  # where in the content the bytes lie that were made last

    def bytes(self, start: int, length: int) -> bytearray:
        """The bytes from `start` on."""
        content = self.content
        if isinstance(content, Range | Literal | Joined):
            out = bytearray(length)
            if length:
                read_into(part(content, start, length), memoryview(out))
            return out
        if self._rest is None or start < self._at:
            self._rest, self._at, self._held = chunks(content), 0, bytearray()
        while self._at + len(self._held) < start + length and (chunk := next(self._rest, None)) is not None:
            if self._at + len(self._held) <= start:
                self._at, self._held = self._at + len(self._held), bytearray()
            self._held += chunk
        del self._held[: start - self._at]
        self._at = start
        return self._held[:length]


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the power of each byte less 127, as E8M0 has it (OCP Microscaling Formats, section 5.4.1): 255 is NaN."""
    import torch

    return torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), torch.nan])[exponents.int()]


class Numbers:
    """The numbers of a content: little-endian elements of one dtype."""

    def __init__(self, content: Content, dtype: DType, *, exponents: bool = False) -> None:
        self.reader, self.exponents = Reader(content), exponents or dtype.name == "float8_e8m0fnu"
        self.dtype = DTYPES["uint8"] if self.exponents else dtype

    def floats(self, first: int, count: int) -> torch.Tensor:
        """So many of them as float32."""
        import torch

        found = self.raw(first, count)
        return powers(found) if self.exponents else found.to(torch.float32)

    def raw(self, first: int, count: int) -> torch.Tensor:
        """So many of them as they are."""
        import torch

        if not count:
            return torch.empty(0, dtype=torch_dtype(self.dtype))
        data = self.reader.bytes(first * self.dtype.itemsize, count * self.dtype.itemsize)
        return torch.frombuffer(data, dtype=torch_dtype(self.dtype))


class Slab:
    """A row-major matrix that is read by its columns: as many of them as take 32 MB are held."""

    def __init__(self, content: Content, rows: int, row_bytes: int, base: int = 0) -> None:
        self.content, self.rows, self.row_bytes, self.base = content, rows, row_bytes, base
        self._first, self._width = 0, 0
        self._held: torch.Tensor | None = None

    def columns(self, first: int, count: int) -> torch.Tensor:
        """Bytes `first` to `first + count` of every row, as uint8."""
        if self._held is None or first < self._first or first + count > self._first + self._width:
            self._load(first, count)
        assert self._held is not None
        return self._held[:, first - self._first : first - self._first + count]

    def _load(self, first: int, count: int) -> None:
        import torch

        width = min(self.row_bytes - first, max(count, _SLAB // max(1, self.rows)))
        if self.rows * self.row_bytes <= _SLAB or not isinstance(self.content, Range):
            first, width = 0, self.row_bytes
        data = bytearray(self.rows * width)
        view = memoryview(data)
        if width == self.row_bytes:
            read_into(part(self.content, self.base, len(data)), view)
        else:
            for row in range(self.rows):
                start = self.base + row * self.row_bytes + first
                read_into(part(self.content, start, width), view[row * width : (row + 1) * width])
        held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        self._held = held.view(self.rows, width)
        self._first, self._width = first, width
