"""The one loop that moves bytes: every container's output, every progress bar and every checksum goes through here."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeAlias

from ckpt_tools.errors import CkptError
from ckpt_tools.io.content import CHUNK, Checksum, Content, Joined, Late, Literal, Piece, Range, chunks, total
from ckpt_tools.io.output import Output, free_bytes, no_space, output_error, output_errors, replacing, reserve
from ckpt_tools.io.source import Source

Progress: TypeAlias = Callable[[int, int], None]
Advance: TypeAlias = Callable[[int], None]
Step: TypeAlias = Callable[[], None]

# From this size on the kernel copies a range by itself (and shares the blocks where the file system can); below it, a
# trip through the buffer costs fewer system calls. Of a range that moves to another offset modulo 64 KiB, the buffer is faster.
_KERNEL_COPY = 1 << 20
_CONGRUENT = 65536
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY}
_CLONED_FROM = 32 << 20  # below this a copy takes less time than a thread is worth
_STEP, _STEP_SECONDS = 64 << 20, 0.1  # a step grows while it takes less: after each the thread waits for Python's lock
_ZIP = b"PK\x03\x04"
_BUFFER = 1 << 20  # bytes: what two cores hand on should stay in their cache
_BUFFERS = 4


class Clone:
    """A copy of `path` into `output` at the same offsets, under way in a thread while Python works out what to change in it.

    When a checkpoint is renamed, its tensors stay where they are in the file: the output is the input with another pickle and
    another directory, and the writer passes over what is there already. Whatever was not copied ahead, or is not wanted, is
    written as ever. (Without the copy ahead, renaming 300 MB takes 1.13 times as long.)
    """

    def __init__(self, path: str | os.PathLike[str], output: Output) -> None:
        self.path, self.output, self.done = path, output, 0
        self.source: Source | None = None
        self._stop, self._thread = threading.Event(), threading.Thread()

    def __enter__(self) -> Self:
        try:
            self.source = source = Source(self.path)
            known = source.fd >= 0 and source.size >= _CLONED_FROM
            if not known or source.read(0, 4) != _ZIP:  # no other container's storages can stay in place
                return self
        except CkptError:  # whoever reads the input says what is wrong with it
            return self
        free = free_bytes(self.output.target.parent)
        if hasattr(os, "copy_file_range") and (free is None or free > source.size):
            reserve(self.output.fd, source.size)
            self._thread = threading.Thread(target=self._copy, args=(source,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.source is not None:
            self.source.close()

    def _copy(self, source: Source) -> None:
        step = _STEP
        while self.done < source.size and not self._stop.is_set():
            started = time.monotonic()
            try:
                count = os.copy_file_range(source.fd, self.output.fd, min(step, source.size - self.done), self.done, self.done)
            except OSError:  # the kernel cannot, or the disk is full: the writer meets it again and says so
                return
            if not count:
                return
            self.done += count
            if time.monotonic() - started < _STEP_SECONDS:
                step *= 2

    def is_running(self) -> bool:
        """Whether the copy still runs, after waiting a little for its end."""
        if self._thread.ident is not None:
            self._thread.join(0.1)
        return self._thread.is_alive()

    def holds(self, source: Source, offset: int, length: int) -> bool:
        """Whether this range of the source is in the output already; to be asked when the copy no longer runs."""
        return self.source is not None and offset + length <= self.done and self.source.is_same(source)


def advancing(progress: Progress | None, size: int) -> Advance:
    """What is called with each further count of bytes, of so many in all, and calls `progress` with all that are done."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, max(size, done))

    return advance


def write_document(path: str | os.PathLike[str], text: str, *, overwrite: bool) -> None:
    """Write a text, whole or not at all."""
    with replacing(path, overwrite=overwrite) as output:
        write([Piece(Literal(text.encode()))], output)


def write(pieces: Sequence[Piece], output: Output, progress: Progress | None = None, clone: Clone | None = None) -> int:
    """Write the pieces in order and return the number of bytes. Memory stays at a few buffers of 1 MiB."""
    loop = _Loop(output, total(pieces), progress, clone)
    if clone is None or not clone.done:
        reserve(output.fd, loop.size)
    try:
        while clone is not None and clone.is_running():
            if progress is not None:
                progress(min(clone.done, loop.size), loop.size)
        for piece in pieces:
            loop.add(piece.content, piece.checksum)
        loop.drain()
    finally:
        loop.close()
    if clone is not None:
        with output_errors(output.target):
            os.ftruncate(output.fd, loop.position)
    return loop.position


class _Buffer:
    """Room for bytes, `fill` of which are taken, and the steps to do once they are all there."""

    __slots__ = ("data", "fill", "steps")

    def __init__(self, size: int) -> None:
        self.data, self.fill = memoryview(bytearray(size)), 0
        self.steps: list[Step] = []

    @property
    def room(self) -> int:
        return len(self.data) - self.fill


class _Loop:
    """The pieces one after another; `position` is where the next byte goes.

    The caller fills a buffer, while one thread sums up the ones before it, and another writes those that are summed up
    (one thread that writes, or executors of concurrent.futures, took 8 to 19 % longer for 300 MB).
    """

    def __init__(self, output: Output, size: int, progress: Progress | None, clone: Clone | None) -> None:
        self.output, self.size, self.progress, self.clone = output, size, progress, clone
        self.position = 0
        self.kernel_copy = hasattr(os, "copy_file_range")
        self.buffer = _Buffer(min(_BUFFER, max(size, 1)))
        self.threads: list[threading.Thread] = []
        self.free: SimpleQueue[_Buffer] = SimpleQueue()
        self.filled: SimpleQueue[_Buffer | None] = SimpleQueue()
        self.summed: SimpleQueue[_Buffer | None] = SimpleQueue()
        self.failure: BaseException | None = None

    def add(self, content: Content | Late, checksum: Checksum | None) -> None:
        if isinstance(content, Joined):
            for part in content.parts:
                self.add(part, checksum)
        elif isinstance(content, Late):
            self.late(content, checksum)
        elif isinstance(content, Range):
            self.range(content, checksum)
        else:
            for chunk in chunks(content):
                self.append(chunk, checksum)

    def range(self, content: Range, checksum: Checksum | None) -> None:
        source, offset, left = content.source, content.offset, content.length
        if checksum is None and offset == self.position and self.clone is not None and self.clone.holds(source, offset, left):
            self.drain()
            with output_errors(self.output.target):
                os.lseek(self.output.fd, left, os.SEEK_CUR)  # it is there already
            self.advance(left)
            return
        expected = source.expected.pop((offset, left), None)
        own = None if expected is None else Checksum(left, *expected)
        congruent = (offset - self.position) % _CONGRUENT == 0
        if checksum is None and own is None and congruent and left >= _KERNEL_COPY and self.kernel_copy and source.fd >= 0:
            copied = self.copy_in_kernel(source, offset, left)
            offset, left = offset + copied, left - copied
        while left:
            part = self.part(left, checksum, own)
            source.read_into(offset, part)
            offset, left = offset + len(part), left - len(part)

    def append(self, data: bytes | memoryview, checksum: Checksum | None) -> None:
        left = memoryview(data)
        while len(left):
            part = self.part(len(left), checksum)
            part[:] = left[: len(part)]
            left = left[len(part) :]

    def late(self, content: Late, checksum: Checksum | None) -> None:
        """Bytes that are known once all before them have been summed up."""
        if content.length > self.buffer.room:
            self.flush()
        if content.length > self.buffer.room:
            self.drain()
            self.append(content.make(), checksum)
            return
        part = self.part(content.length)
        self.buffer.steps.append(partial(_fill, part, content.make))
        if checksum is not None:
            self.buffer.steps.append(partial(checksum.update, part))

    def part(self, length: int, *checksums: Checksum | None) -> memoryview:
        """Room in the buffer for up to `length` bytes, which count into the checksums."""
        if not self.buffer.room:
            self.flush()
        buffer = self.buffer
        part = buffer.data[buffer.fill : buffer.fill + length]
        buffer.fill += len(part)
        buffer.steps += [partial(checksum.update, part) for checksum in checksums if checksum is not None]
        self.advance(len(part))
        return part

    def copy_in_kernel(self, source: Source, offset: int, length: int) -> int:
        """Copy without the bytes passing through this process; how many, where the kernel cannot (go on)."""
        self.drain()
        done = 0
        while done < length:
            fd = source.fd  # that the source is gone is no error of the output
            try:
                count = os.copy_file_range(fd, self.output.fd, min(length - done, 16 * CHUNK), offset + done)
            except OSError as error:
                if error.errno == errno.EIO:  # of which file? Reading tells, by an error of its own
                    for _ in chunks(Range(source, offset + done, min(length - done, 16 * CHUNK))):
                        pass
                if error.errno not in _NO_KERNEL_COPY:
                    raise output_error(self.output.target, error, self.size) from None
                self.kernel_copy, count = False, 0
            if not count:  # the source has shrunk, which the buffer loop says, or a file system that copies nothing
                break
            done += count
            self.advance(count)
        return done

    def flush(self) -> None:
        """Send the buffer on its way, and take a free one."""
        if self.size <= _BUFFER:
            self.sum_up(self.buffer)
            self.write(self.buffer)
        else:
            if not self.threads:
                for _ in range(_BUFFERS - 1):
                    self.free.put(_Buffer(_BUFFER))
                stages = (self.sum_up, self.filled, self.summed.put), (self.write, self.summed, self.free.put)
                self.threads = [threading.Thread(target=self.stage, args=stage, daemon=True) for stage in stages]
                for thread in self.threads:
                    thread.start()
            self.filled.put(self.buffer)
            self.buffer = self.free.get()
        if self.failure is not None:
            raise self.failure

    def stage(
        self, work: Callable[[_Buffer], None], source: SimpleQueue[_Buffer | None], hand_on: Callable[[_Buffer], None]
    ) -> None:
        """In a thread: do the work on buffers as they come, until something has failed, and hand them on."""
        while (buffer := source.get()) is not None:
            try:
                if self.failure is None:
                    work(buffer)
            except BaseException as error:  # for the caller's thread
                self.failure = error
            hand_on(buffer)

    def drain(self) -> None:
        """Flush, and wait until everything is written."""
        if self.buffer.fill:
            self.flush()
        if self.threads:
            for buffer in [self.free.get() for _ in range(_BUFFERS - 1)]:
                self.free.put(buffer)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        for thread, queue in zip(self.threads, (self.filled, self.summed), strict=False):
            queue.put(None)
            thread.join()

    def sum_up(self, buffer: _Buffer) -> None:
        for step in buffer.steps:
            step()
        buffer.steps = []

    def write(self, buffer: _Buffer) -> None:
        data, buffer.fill = buffer.data[: buffer.fill], 0
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


def _fill(part: memoryview, make: Callable[[], bytes]) -> None:
    part[:] = make()
