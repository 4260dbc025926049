"""One pass over a file: every byte is read once, in order, and handed to whoever counts, sums or hashes it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from ckpt_tools.io.content import CHUNK, crc32
from ckpt_tools.io.output import Source

Sink: TypeAlias = Callable[[memoryview], object]
Advance: TypeAlias = Callable[[int], object]


class Crc:
    """A running CRC-32."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def take(self, data: memoryview) -> None:
        """Take in the next bytes."""
        self.value = crc32(data, self.value)


@dataclass(slots=True, unsafe_hash=True)
class Span:
    """A run of a file's bytes, and what takes them in as they are read, in pieces, in order."""

    offset: int
    length: int
    sinks: Sequence[Sink]

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.offset + self.length


def read_through(source: Source, spans: Iterable[Span], advance: Advance | None = None) -> None:
    """Read a whole file and hand each span its bytes; bytes of no span are read all the same: the disk may fail there."""
    waiting = sorted(spans, key=lambda span: span.offset)
    following, open_spans = 0, list[Span]()
    for start, block in _blocks(source):
        stop = start + len(block)
        while following < len(waiting) and waiting[following].offset < stop:
            open_spans.append(waiting[following])
            following += 1
        open_spans = _hand_out(open_spans, start, block)
        if advance is not None:
            advance(len(block))


def _hand_out(spans: list[Span], start: int, block: memoryview) -> list[Span]:
    """Give each span its part of a block; returns those that go on behind it."""
    stop, going_on = start + len(block), []
    for span in spans:
        end = span.offset + span.length
        part = block[max(span.offset - start, 0) : end - start]
        for take in span.sinks:
            take(part)
        if end > stop:
            going_on.append(span)
    return going_on


def _blocks(source: Source) -> Iterator[tuple[int, memoryview]]:
    """The file in blocks of 4 MiB with their offsets. A block is valid until the one after the next is asked for."""
    starts = range(0, source.size, CHUNK)
    buffers = [memoryview(bytearray(min(CHUNK, source.size))) for _ in starts[:2]]

    def fill(index: int) -> memoryview:
        part = buffers[index % 2][: min(CHUNK, source.size - starts[index])]
        source.read_into(starts[index], part)
        return part

    if len(starts) < 2 or sys.platform == "emscripten":  # a browser has no threads
        yield from ((start, fill(index)) for index, start in enumerate(starts))
        return
    with ThreadPoolExecutor(1, "ckpt-read") as reader:
        ahead = reader.submit(fill, 0)
        for index, start in enumerate(starts):
            block = ahead.result()
            if index + 1 < len(starts):
                ahead = reader.submit(fill, index + 1)
            yield start, block
