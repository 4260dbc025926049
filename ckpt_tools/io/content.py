"""What will be written, as frozen data: pieces in order, each with its length known before a byte moves."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from ckpt_tools.errors import ChecksumError, DamagedFileError
from ckpt_tools.io.source import Source

CHUNK = 4 << 20


class Checksum:
    """A running CRC-32, from `value` on. With `expected`, a mismatch is a ChecksumError once `length` bytes have passed."""

    __slots__ = ("expected", "label", "left", "value")

    def __init__(self, length: int, expected: int | None = None, label: str = "", value: int = 0) -> None:
        self.value = value
        self.left, self.expected, self.label = length, expected, label

    def update(self, data: bytes | memoryview) -> None:
        self.value = crc32(data, self.value)
        self.left -= len(data)
        if self.left == 0 and self.expected not in (None, self.value):
            raise ChecksumError(
                f"The bytes of {self.label} do not match their CRC-32.",
                why=f"The file says {self.expected:08x}, the bytes give {self.value:08x}: they changed after they were saved.",
                fix="Get the file again; ckpt check names what is damaged, ckpt repair saves the rest. "
                "With `no_verify=True` the bytes are taken as they are.",
            )


@dataclass(slots=True, eq=False, repr=False)
class Literal:
    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


@dataclass(slots=True, eq=False, repr=False)
class Range:
    """A range of a source file, as it is."""

    source: Source
    offset: int
    length: int


@dataclass(slots=True, eq=False, repr=False)
class Part(Range):
    """A part of a range that a file says the checksum of."""

    of: Range


@dataclass(slots=True, eq=False, repr=False)
class Deflated:
    """A deflated range of a source file, to be inflated to exactly `length` bytes."""

    source: Source
    offset: int
    compressed: int
    length: int
    crc: int


@dataclass(slots=True, eq=False, repr=False)
class Computed:
    """Bytes that are worked out in chunks while writing: a cast, a gather, a byte swap; `of` is what they are made of."""

    length: int
    chunks: Callable[[], Iterator[bytes | memoryview]]
    of: Content | tuple[Content, ...] | None = None
    part: Callable[[int, int], Content] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Joined:
    """Contents one behind the other, each moved as it would be alone: a tensor whose rows lie in several files."""

    parts: tuple[Content, ...]

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)


@dataclass(slots=True, eq=False, repr=False)
class Late:
    """Bytes that are known only after the pieces before: a directory that holds their checksums."""

    length: int
    make: Callable[[], bytes]


Content: TypeAlias = Literal | Range | Deflated | Computed | Joined


@dataclass(slots=True, eq=False, repr=False)
class Piece:
    """A content, with the checksum that its bytes are counted into, if any."""

    content: Content | Late
    checksum: Checksum | None = None


def made_of(content: Content | Late) -> Iterator[Content | Late]:
    """A content, and all that it is worked out of."""
    pending: list[Content | Late] = [content]
    while pending:
        yield (one := pending.pop())
        if isinstance(one, Joined):
            pending += one.parts
        elif isinstance(one, Computed) and one.of is not None:
            pending += one.of if isinstance(one.of, tuple) else (one.of,)


def total(pieces: Iterable[Piece]) -> int:
    return sum(piece.content.length for piece in pieces)


def chunks(content: Content) -> Iterator[bytes | memoryview]:
    """The bytes of a content, a chunk at a time."""
    if isinstance(content, Literal):
        yield content.data
    elif isinstance(content, Range):
        yield from _blocks(content, CHUNK)
    elif isinstance(content, Deflated):
        yield from _inflate(content)
    elif isinstance(content, Joined):
        for part in content.parts:
            yield from chunks(part)
    else:
        yield from content.chunks()


def _blocks(content: Range, size: int) -> Iterator[bytes]:
    with passing(content) as checksum:
        for start in range(0, content.length, size):
            block = content.source.read(content.offset + start, min(size, content.length - start))
            checksum(block)
            yield block


@contextmanager
def passing(content: Range) -> Iterator[Callable[[bytes | memoryview], None]]:
    """What takes in the bytes of a range that is read from its start to its end, in order."""
    key = content.offset, content.length
    checksum = Checksum(content.length, *expected) if (expected := content.source.expected.get(key)) is not None else None
    yield (lambda _: None) if checksum is None else checksum.update
    if checksum is not None and not checksum.left:
        content.source.expected.pop(key, None)


def read(content: Content) -> bytes:
    return b"".join(chunks(content))


def read_into(content: Content, buffer: memoryview) -> None:
    at = 0
    if isinstance(content, Range):
        content.source.read_into(content.offset, buffer)
        with passing(content) as checksum:
            checksum(buffer)
    elif isinstance(content, Joined):
        for part in content.parts:
            read_into(part, buffer[at : at + part.length])
            at += part.length
    else:
        for chunk in chunks(content):
            buffer[at : at + len(chunk)] = chunk
            at += len(chunk)


def to_bytes(pieces: Iterable[Piece]) -> bytes:
    made = bytearray()
    for piece in pieces:
        content = piece.content
        for chunk in (content.make(),) if isinstance(content, Late) else chunks(content):
            made += chunk
            if piece.checksum is not None:
                piece.checksum.update(chunk)
    return bytes(made)


def _inflate(content: Deflated) -> Iterator[bytes]:
    """Inflate; the declared size is a hard stop, so that a bomb costs one chunk at most."""
    inflater, left = zlib.decompressobj(-15), content.length
    checksum = Checksum(content.length, content.crc or None, "a deflated record")
    packed, pending = chunks(Range(content.source, content.offset, content.compressed)), b""
    try:
        while not inflater.eof:
            # One byte more than declared may come out: that is how a size lie is seen.
            out = inflater.decompress(pending, min(CHUNK, left + 1))
            left -= len(out)
            if left < 0:
                raise DamagedFileError("A deflated record holds more bytes than the zip directory says.")
            pending = inflater.unconsumed_tail
            if out:
                checksum.update(out)
                yield out
            elif not pending and not (pending := bytes(next(packed, b""))):  # it may hold back bytes when its input is taken
                break
    except zlib.error as error:
        raise DamagedFileError("A deflated record cannot be inflated.", why=str(error)) from None
    if left or not inflater.eof:
        why = f"{left} bytes are missing." if left else "All of its bytes came out, and the end of the stream did not."
        raise DamagedFileError("A deflated record is cut off.", why=why)


def equal_chunks(content: Content, size: int = CHUNK) -> Iterator[bytes]:
    """The bytes of a content in blocks of exactly `size` bytes, the last one shorter: two contents side by side."""
    if isinstance(content, Range):
        yield from _blocks(content, size)
        return
    pending = bytearray()
    for chunk in chunks(content):
        pending += chunk
        whole = len(pending) - len(pending) % size
        for start in range(0, whole, size):
            yield bytes(pending[start : start + size])
        del pending[:whole]
    if pending:
        yield bytes(pending)


try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
