"""The one door to torch for work on values: casts and gathers. torch is imported inside the functions."""

from __future__ import annotations

import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.dtypes import DType
from ckpt_tools.plan import CHUNK, Computed, Content, Literal, Range, chunks, read
from ckpt_tools.tree import Entry

if TYPE_CHECKING:
    import torch

_ARRAY_TYPES = {2: "H", 4: "I", 8: "Q"}


@dataclass(slots=True)
class CastCount:
    """Counted while a cast is written: finite values that became infinite, and others than zero that became zero."""

    overflowed: int = 0
    underflowed: int = 0


def cast(content: Content, source: DType, target: DType, count: CastCount) -> Computed:
    """The content cast from one float dtype to another, a chunk at a time.

    Args:
        content: elements of `source`, little-endian.
        count: where values that do not survive are counted while the bytes are worked out.
    """

    def work() -> Iterator[memoryview]:
        import torch

        before, after = torch_dtype(source), torch_dtype(target)
        may_overflow = torch.finfo(before).max > torch.finfo(after).max  # bf16 -> fp16 too, of the same size
        may_underflow = torch.finfo(before).smallest_normal < torch.finfo(after).smallest_normal
        room = min(CHUNK, content.length)
        if not room:  # frombuffer takes no empty buffer
            return
        buffer, out = bytearray(room), bytearray(room // source.itemsize * target.itemsize)
        values, result = torch.frombuffer(buffer, dtype=before), torch.frombuffer(out, dtype=after)
        for size in _filled(content, source.itemsize, memoryview(buffer)):
            old, new = values[: size // source.itemsize], result[: size // source.itemsize]
            new.copy_(old)
            wide, narrow = (part if part.itemsize > 1 else part.float() for part in (old, new))  # fp8 has no isfinite
            if may_overflow:
                count.overflowed += int((wide.isfinite() & ~narrow.isfinite()).sum())
            if may_underflow:
                count.underflowed += int(torch.count_nonzero(wide)) - int(torch.count_nonzero(narrow))
            yield memoryview(out)[: size // source.itemsize * target.itemsize]

    return Computed(content.length // source.itemsize * target.itemsize, work, content)


def _filled(content: Content, itemsize: int, buffer: memoryview) -> Iterator[int]:
    """Fill the buffer with one piece of the content after the other; yields how many bytes of it are filled."""
    if isinstance(content, Range):
        for start in range(0, content.length, len(buffer)):
            size = min(len(buffer), content.length - start)
            content.source.read_into(content.offset + start, buffer[:size])
            yield size
        return
    for chunk in whole_elements(content, itemsize):
        for start in range(0, len(chunk), len(buffer)):
            piece = chunk[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            yield len(piece)


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's own object for a dtype."""
    import torch

    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def whole_elements(content: Content, itemsize: int) -> Iterator[bytes | bytearray]:
    """The content in chunks that end on whole elements."""
    rest = b""
    for chunk in chunks(content):
        data = rest + bytes(chunk) if rest else bytes(chunk)
        cut = len(data) - len(data) % itemsize
        rest = data[cut:]
        if cut:
            yield data[:cut]


def swapped(content: Content, width: int) -> Content:
    """The content with the bytes of every `width`-byte number reversed."""
    if width == 1:
        return content

    def work() -> Iterator[bytes]:
        for chunk in whole_elements(content, width):
            numbers = array.array(_ARRAY_TYPES[width], chunk)
            numbers.byteswap()
            yield numbers.tobytes()

    return Computed(content.length, work, content)


def part(content: Content, start: int, length: int) -> Content:
    """A range of a content."""
    if start == 0 and length == content.length:
        return content
    if isinstance(content, Range):
        return Range(content.source, content.offset + start, length)
    if isinstance(content, Literal):
        return Literal(content.data[start : start + length])

    def work() -> Iterator[memoryview]:
        at = 0
        for chunk in chunks(content):
            view = memoryview(chunk)[max(0, start - at) : max(0, start + length - at)]
            at += len(chunk)
            if len(view):
                yield view
            if at >= start + length:
                return

    return Computed(length, work)


def row_major(entry: Entry) -> Content:
    """The bytes of an entry, row-major: a range of its storage where it is contiguous, else gathered.

    A gather holds the part of the storage that the entry spans in memory.
    """
    item = entry.dtype.itemsize
    if entry.is_contiguous and not lazy_bits(entry):
        return part(entry.storage.content, entry.offset * item if entry.nbytes else 0, entry.nbytes)
    span = 1 + sum((size - 1) * step for size, step in zip(entry.shape, entry.stride, strict=True))

    def work() -> Iterator[memoryview]:
        import torch

        data = bytearray(read(part(entry.storage.content, entry.offset * item, span * item)))
        values = torch.frombuffer(data, dtype=torch_dtype(entry.dtype)).as_strided(entry.shape, entry.stride)
        if "conj" in lazy_bits(entry):
            values = values.conj()
        if "neg" in lazy_bits(entry):
            values = -values
        for block in blocks(values):
            out = bytearray(block.numel() * item)
            torch.frombuffer(out, dtype=values.dtype).copy_(block.resolve_conj().reshape(-1))
            yield memoryview(out)

    return Computed(entry.nbytes, work)


def blocks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in row-major blocks of a few megabytes. An expanded one can be far larger than its storage and the memory."""
    values = values.squeeze()
    if values.nbytes <= CHUNK:
        yield values
    elif rows := CHUNK // (values.nbytes // len(values)):
        for start in range(0, len(values), rows):
            yield values[start : start + rows]
    else:
        for row in range(len(values)):
            yield from blocks(values[row])


def lazy_bits(entry: Entry) -> set[str]:
    """The math bits that torch applies on reading: "conj", "neg"."""
    metadata = entry.extras.metadata if entry.extras is not None else None
    return {key for key, value in metadata.items if value is True and type(key) is str} if metadata is not None else set()
