"""The one loop that moves bytes: every container's output, every progress bar and every checksum goes through here."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeAlias

from ckpt_tools.errors import CkptError
from ckpt_tools.io.content import CHUNK, Checksum, Content, Joined, Late, Piece, Range, chunks, passing, total
from ckpt_tools.io.output import Output, Source, free_bytes, no_space, output_error, output_errors, reserve

Progress: TypeAlias = Callable[[int, int], None]

# From this size on the kernel copies a range by itself (and shares the blocks where the file system can); below it, a
# trip through the buffer costs fewer system calls. Of a range that moves to another offset modulo 64 KiB, the buffer is faster.
_KERNEL_COPY = 1 << 20
_CONGRUENT = 65536
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY}
_CLONED_FROM = 32 << 20  # below this a copy takes less time than a thread is worth
_STEP, _STEP_SECONDS = 64 << 20, 0.1  # a step grows while it takes less: after each the thread waits for Python's lock
_ZIP = b"PK\x03\x04"
_BUFFER = 1 << 20  # bytes: what is read should still be in the cache when it is summed up and written


class Clone:
    """A copy of `path` into `output` at the same offsets, under way in a thread while Python works out what to change in it.

    When a checkpoint is renamed, its tensors stay where they are in the file: the output is the input with another pickle and
    another directory, and the writer passes over what is there already. Whatever was not copied ahead, or is not wanted, is
    written as ever. (Without the copy ahead, renaming 300 MB takes 1.13 times as long.)
    """

    def __init__(self, path: str | os.PathLike[str], output: Output) -> None:
        self.path, self.output = path, output
        self.source: Source | None = None
        self.done = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        try:
            self.source = Source(self.path)
            known = self.source.fd >= 0 and self.source.size >= _CLONED_FROM
            if not known or self.source.read(0, 4) != _ZIP:  # no other container's storages can stay in place
                return self
        except CkptError:  # whoever reads the input says what is wrong with it
            return self
        free = free_bytes(self.output.target.parent)
        if hasattr(os, "copy_file_range") and (free is None or free > self.source.size):
            reserve(self.output.fd, self.source.size)
            self._thread = threading.Thread(target=self._copy, args=(self.source,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
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

    def is_running(self, seconds: float) -> bool:
        """Whether the copy still runs after waiting for so long."""
        if self._thread is None:
            return False
        self._thread.join(seconds)
        return self._thread.is_alive()

    def holds(self, source: Source, offset: int, length: int) -> bool:
        """Whether this range of the source is in the output already; to be asked when the copy no longer runs."""
        return self.source is not None and offset + length <= self.done and self.source.is_same(source)


def write(pieces: Sequence[Piece], output: Output, progress: Progress | None = None, clone: Clone | None = None) -> int:
    """Write the pieces in order and return the number of bytes. Memory stays at two buffers of 1 MiB."""
    loop = _Loop(output, total(pieces), progress, clone)
    if clone is None or not clone.done:
        reserve(output.fd, loop.size)
    while clone is not None and clone.is_running(0.1):
        if progress is not None:
            progress(min(clone.done, loop.size), loop.size)
    with loop.pool:
        for piece in pieces:
            loop.add(piece.content, piece.checksum)
        loop.drain()
    if clone is not None:
        with output_errors(output.target):
            os.ftruncate(output.fd, loop.position)
    return loop.position


class _Loop:
    """The pieces one after another; `position` is where the next byte goes, once the buffer is written."""

    def __init__(self, output: Output, size: int, progress: Progress | None, clone: Clone | None) -> None:
        self.output, self.size, self.progress, self.clone = output, size, progress, clone
        self.position = 0
        self.kernel_copy = hasattr(os, "copy_file_range")
        self.pool = ThreadPoolExecutor(1)  # writes one buffer while the caller fills the other
        self.written: Future[None] | None = None
        self.fill = 0
        self.buffer, self.other = (memoryview(bytearray(min(_BUFFER, max(size, 1)))) for _ in range(2))

    def add(self, content: Content | Late, checksum: Checksum | None) -> None:
        if isinstance(content, Joined):
            for part in content.parts:
                self.add(part, checksum)
        elif isinstance(content, Range):
            self.range(content, checksum)
        else:
            for chunk in (content.make(),) if isinstance(content, Late) else chunks(content):
                self.append(memoryview(chunk), checksum)

    def range(self, content: Range, checksum: Checksum | None) -> None:
        source, offset, left = content.source, content.offset, content.length
        if checksum is None and offset == self.position and self.clone is not None and self.clone.holds(source, offset, left):
            self.drain()
            with output_errors(self.output.target):
                os.lseek(self.output.fd, left, os.SEEK_CUR)
            self.advance(left)
            return
        is_checked = checksum is not None or (offset, left) in source.expected
        if not is_checked and left >= _KERNEL_COPY and (offset - self.position) % _CONGRUENT == 0 and source.fd >= 0:
            copied = self.copy_in_kernel(source, offset, left)
            offset, left = offset + copied, left - copied
        with passing(content) as check:
            while left:
                if self.fill == len(self.buffer):
                    self.flush()
                part = self.buffer[self.fill : self.fill + left]
                source.read_into(offset, part)
                check(part)
                if checksum is not None:
                    checksum.update(part)
                self.fill += len(part)
                offset, left = offset + len(part), left - len(part)
                self.advance(len(part))

    def append(self, data: memoryview, checksum: Checksum | None) -> None:
        if checksum is not None:
            checksum.update(data)
        if len(data) > len(self.buffer) - self.fill:
            self.flush()
        if len(data) > len(self.buffer):
            self.drain()
            self.write(data)
        else:
            self.buffer[self.fill : self.fill + len(data)] = data
            self.fill += len(data)
        self.advance(len(data))

    def copy_in_kernel(self, source: Source, offset: int, length: int) -> int:
        """Copy without the bytes passing through this process; how many, where the kernel cannot (go on)."""
        self.drain()
        done = 0
        while self.kernel_copy and done < length:
            count = self.copy_some(source, offset + done, min(length - done, 16 * CHUNK))
            if not count:  # the source has shrunk, which the buffer loop says, or a file system that copies nothing
                break
            done += count
            self.advance(count)
        return done

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

    def flush(self) -> None:
        """Send the buffer on its way, and take the other."""
        if self.written is not None:
            self.written.result()
        data, self.fill = self.buffer[: self.fill], 0
        self.written = self.pool.submit(self.write, data)
        self.buffer, self.other = self.other, self.buffer

    def drain(self) -> None:
        """Flush, and wait until everything is written."""
        self.flush()
        if self.written is not None:
            self.written.result()

    def write(self, data: memoryview) -> None:
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
