"""The one loop that moves bytes: every container's output, every progress bar and every checksum goes through here."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from ckpt_tools.io.cloning import Clone
from ckpt_tools.io.content import CHUNK, Checksum, Computed, Content, Joined, Late, Piece, Range, chunks, total
from ckpt_tools.io.output import Output, Source, no_space, output_error, reserve

Progress: TypeAlias = Callable[[int, int], None]

# From this size on the kernel copies a range by itself (and shares the blocks where the file system can); below it, a
# trip through the buffer costs fewer system calls.
KERNEL_COPY = 1 << 20
CONGRUENT = 65536
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY}


def write(pieces: Sequence[Piece], output: Output, progress: Progress | None = None, clone: Clone | None = None) -> int:
    """Write the pieces in order and return the number of bytes. Memory stays at a few buffers of 4 MiB."""
    works = any(piece.checksum is not None or _works(piece.content) for piece in pieces)
    loop = _Loop(output, total(pieces), progress, clone, works=works)
    try:
        if clone is None or not clone.done:
            reserve(output.fd, loop.size)
        _wait_for(clone, progress, loop.size)
        for piece in pieces:
            loop.add(piece)
        loop.pipeline.drain()
    except BaseException as error:
        loop.pipeline.abandon(error)
        raise
    finally:
        loop.pipeline.close()
    if clone is not None:
        try:
            os.ftruncate(output.fd, loop.position)
        except OSError as error:
            raise output_error(output.target, error, loop.size) from None
    return loop.position


def _wait_for(clone: Clone | None, progress: Progress | None, size: int) -> None:
    running = clone is not None
    while clone is not None and running:
        if progress is not None:
            progress(min(clone.done, size), size)
        running = clone.is_running(0.1)


class _Loop:
    """The pieces one after another; `position` is where the next byte goes."""

    def __init__(self, output: Output, size: int, progress: Progress | None, clone: Clone | None, *, works: bool) -> None:
        self.output, self.size, self.progress, self.clone = output, size, progress, clone
        self.pipeline = Pipeline(self.write, size, works=works)
        self.position = 0
        self.kernel_copy = hasattr(os, "copy_file_range")

    def add(self, piece: Piece) -> None:
        content = piece.content
        if isinstance(content, Range):
            if piece.checksum is None and self.pass_over(content):
                return
            free = piece.checksum is None and not _works(content)
            if free and content.length >= KERNEL_COPY and self.kernel_copies(content):
                content = self.copy_in_kernel(content)
            self.copy(content, piece.checksum)
        elif isinstance(content, Late):
            self.late(content, piece.checksum)
        elif isinstance(content, Joined):
            for part in content.parts:
                self.add(Piece(part, piece.checksum))
        else:
            for chunk in chunks(content):
                self.append(chunk, piece.checksum)

    def kernel_copies(self, content: Range) -> bool:
        """Whether the kernel can copy a range, and it keeps its offset modulo 64 KiB; else the buffer is faster."""
        congruent = (content.offset - self.position) % CONGRUENT == 0
        return self.kernel_copy and congruent and content.source.fd >= 0

    def pass_over(self, content: Range) -> bool:
        """Leave a range where the clone has put it, if it is to stand at its own offset."""
        there = self.clone is not None and content.offset == self.position
        if not there or not self.clone or not self.clone.holds(content.source, content.offset, content.length):
            return False
        self.pipeline.drain()
        try:
            os.lseek(self.output.fd, content.length, os.SEEK_CUR)
        except OSError as error:
            raise output_error(self.output.target, error, self.size) from None
        self.advance(content.length)
        return True

    def part(self, length: int, *checksums: Checksum | None) -> memoryview:
        """Room in a buffer for up to `length` bytes, which count into the checksums."""
        if not self.pipeline.room:
            self.pipeline.flush()
        part = self.pipeline.buffer.take(length)
        for checksum in checksums:
            if checksum is not None:
                self.pipeline.buffer.steps.append(partial(checksum.update, part))
        self.advance(len(part))
        return part

    def append(self, data: bytes | memoryview, checksum: Checksum | None) -> None:
        left = memoryview(data)
        while len(left):
            part = self.part(len(left), checksum)
            part[:] = left[: len(part)]
            left = left[len(part) :]

    def copy(self, content: Range, checksum: Checksum | None) -> None:
        """A range through the buffers: many small ones share a write."""
        offset, left = content.offset, content.length
        expected = content.source.expected.pop((offset, left), None)
        own = None if expected is None else Checksum(left, *expected)
        while left:
            part = self.part(left, checksum, own)
            content.source.read_into(offset, part)
            offset, left = offset + len(part), left - len(part)

    def late(self, content: Late, checksum: Checksum | None) -> None:
        """Bytes that are known once all before them have been summed up."""
        if content.length > self.pipeline.room:
            self.pipeline.flush()
        if content.length > self.pipeline.room:
            self.pipeline.drain()
            self.append(content.make(), checksum)
            return
        part = self.pipeline.buffer.take(content.length)
        self.pipeline.buffer.steps.append(partial(_fill, part, content.make))
        if checksum is not None:
            self.pipeline.buffer.steps.append(partial(checksum.update, part))
        self.advance(content.length)

    def copy_in_kernel(self, content: Range) -> Range:
        """Copy without the bytes passing through this process; returns what is left when the kernel cannot (go on)."""
        self.pipeline.drain()
        offset, left = content.offset, content.length
        while left:
            count = self.copy_some(content.source, offset, min(left, 16 * CHUNK))
            if not count:  # the source has shrunk, which the buffer loop says, or a file system that copies nothing
                break
            offset, left = offset + count, left - count
            self.advance(count)
        return Range(content.source, offset, left)

    def copy_some(self, source: Source, offset: int, length: int) -> int:
        """How many bytes the kernel copied in one call; 0 where it copies none."""
        fd = source.fd  # that the source is gone is no error of the output
        try:
            return os.copy_file_range(fd, self.output.fd, length, offset)
        except OSError as error:
            if error.errno == errno.EIO:  # of which file? Reading tells, by an error of its own
                for _ in chunks(Range(source, offset, length)):
                    pass
            if error.errno not in _NO_KERNEL_COPY:
                raise output_error(self.output.target, error, self.size) from None
            self.kernel_copy = False
            return 0

    def write(self, data: memoryview) -> None:
        """All of a buffer's bytes to the output; called in a thread of the pipeline."""
        while len(data):
            try:
                count = os.write(self.output.fd, data)
            except OSError as error:
                raise output_error(self.output.target, error, self.size) from None
            if not count:
                raise no_space(self.output.target, self.size)
            data = data[count:]

    def advance(self, count: int) -> None:
        """Count bytes that have found their place; the progress is told every few megabytes."""
        before, self.position = self.position, self.position + count
        if self.progress is not None and (before // CHUNK != self.position // CHUNK or self.position == self.size):
            self.progress(self.position, self.size)


def _works(content: Content | Late) -> bool:
    """Whether there is work on the bytes of a content: to make them, or to compare them with a CRC-32."""
    if isinstance(content, Joined):
        return any(map(_works, content.parts))
    return isinstance(content, Computed) or (
        isinstance(content, Range) and (content.offset, content.length) in content.source.expected
    )


def _fill(part: memoryview, make: Callable[[], bytes]) -> None:
    part[:] = make()


_BUFFERS = 4
_SIZE = 1 << 20  # bytes: a buffer that three cores hand on should stay in their cache
Step: TypeAlias = Callable[[], None]


class Buffer:
    """Room for bytes, `fill` of which are taken, and the steps to do once they are all there."""

    __slots__ = ("data", "fill", "steps")

    def __init__(self, size: int) -> None:
        self.data = memoryview(bytearray(size))
        self.fill = 0
        self.steps: list[Step] = []

    def take(self, length: int) -> memoryview:
        """The next bytes, up to `length` of them, for the caller to fill."""
        part = self.data[self.fill : self.fill + length]
        self.fill += len(part)
        return part


class Pipeline:
    """Buffers on their way to an output."""

    def __init__(self, write: Callable[[memoryview], None], size: int, *, works: bool = True) -> None:
        self._write = write
        self._room = min(_SIZE, max(size, 1))
        self.buffer = Buffer(self._room)
        self._works, self._threaded = works, size > _SIZE
        self._threads: list[threading.Thread] = []
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        self._filled: SimpleQueue[Buffer | None] = SimpleQueue()
        self._summed: SimpleQueue[Buffer | None] = SimpleQueue()
        self._first = self._filled if works else self._summed
        self._failure: BaseException | None = None

    @property
    def room(self) -> int:
        """Bytes that the buffer at hand still takes."""
        return self._room - self.buffer.fill

    def flush(self) -> None:
        """Send the buffer at hand on its way, and take a free one."""
        if not self.buffer.fill:
            return
        if not self._threaded:
            self._sum_up(self.buffer)
            self._write_out(self.buffer)
        else:
            if not self._threads:
                self._start()
            self._first.put(self.buffer)
            self.buffer = self._free.get()
        self._raise()

    def drain(self) -> None:
        """Flush, and wait until everything is written."""
        self.flush()
        if self._threads:
            back = [self._free.get() for _ in range(_BUFFERS - 1)]
            for buffer in back:
                self._free.put(buffer)
        self._raise()

    def close(self) -> None:
        """Let the threads end; what is still on its way is not written when something has failed."""
        if self._threads:
            self._first.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def abandon(self, error: BaseException) -> None:
        """Write nothing more."""
        self._failure = self._failure or error

    def _start(self) -> None:
        for _ in range(_BUFFERS - 1):
            self._free.put(Buffer(self._room))
        for stage in (self._sums, self._writes) if self._works else (self._writes,):
            thread = threading.Thread(target=stage, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _sums(self) -> None:
        while (buffer := self._filled.get()) is not None:
            self._sum_up(buffer)
            self._summed.put(buffer)
        self._summed.put(None)

    def _writes(self) -> None:
        while (buffer := self._summed.get()) is not None:
            self._write_out(buffer)
            self._free.put(buffer)

    def _sum_up(self, buffer: Buffer) -> None:
        try:
            for step in buffer.steps:
                if self._failure is None:
                    step()
        except BaseException as error:  # handed to the caller's thread
            self.abandon(error)

    def _write_out(self, buffer: Buffer) -> None:
        try:
            if self._failure is None:
                self._write(buffer.data[: buffer.fill])
        except BaseException as error:  # handed to the caller's thread
            self.abandon(error)
        buffer.fill = 0
        buffer.steps = []
