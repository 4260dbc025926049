"""The one loop that moves bytes: every container's output, every progress bar and every checksum goes through here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckpt_tools.cloning import Clone
from ckpt_tools.files import Output, no_space, output_error
from ckpt_tools.plan import CHUNK, Checksum, Late, Literal, Piece, Range, chunks, total

Progress: TypeAlias = Callable[[int, int], None]

# From this size on the kernel copies a range by itself (and shares the blocks where the file system can); below it, a
# trip through the buffer costs fewer system calls.
KERNEL_COPY = 1 << 20
CONGRUENT = 65536
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY}


def write(pieces: Sequence[Piece], output: Output, progress: Progress | None = None, clone: Clone | None = None) -> int:
    """Write the pieces in order and return the number of bytes. Memory stays at one buffer of 4 MiB.

    Args:
        pieces: what to write.
        output: the temporary of `files.replacing`.
        progress: called with (bytes done, bytes in total) every few megabytes.
        clone: a copy of the source that runs ahead; ranges that it has put in their place already are passed over.

    Raises:
        OutputError: the disk is full or fails. ChecksumError: a piece does not match. ChangedFileError: a source shrank.
    """
    loop = _Loop(output, total(pieces), progress, clone)
    running = clone is not None
    while clone is not None and running:
        if progress is not None:
            progress(min(clone.done, loop.size), loop.size)
        running = clone.under_way(0.1)
    for piece in pieces:
        loop.add(piece)
    loop.flush()
    if clone is not None:
        os.ftruncate(output.fd, loop.done)
    return loop.done


class _Loop:
    def __init__(self, output: Output, size: int, progress: Progress | None, clone: Clone | None) -> None:
        self.output, self.size, self.progress, self.clone = output, size, progress, clone
        self.buffer = memoryview(bytearray(min(CHUNK, max(size, 1))))
        self.fill = self.done = 0
        self.kernel_copy = hasattr(os, "copy_file_range")

    def add(self, piece: Piece) -> None:
        content = piece.content
        if isinstance(content, Range):
            if piece.checksum is None and self.pass_over(content):
                return
            if piece.checksum is None and content.length >= KERNEL_COPY and self.kernel_copy and self.congruent(content):
                content = self.copy_in_kernel(content)
            self.copy(content, piece.checksum)
        elif isinstance(content, Literal | Late):
            data = content.data if isinstance(content, Literal) else content.make()
            self.append(data, piece.checksum)
        else:
            for chunk in chunks(content):
                self.append(chunk, piece.checksum)

    def congruent(self, content: Range) -> bool:
        """Whether a range keeps its offset modulo 64 KiB; else the buffer is faster than the kernel (docs/benchmarks.md)."""
        return (content.offset - self.done - self.fill) % CONGRUENT == 0

    def pass_over(self, content: Range) -> bool:
        """Leave a range where the clone has put it, if it is to stand at its own offset."""
        there = self.clone is not None and content.offset == self.done + self.fill
        if not there or not self.clone or not self.clone.holds(content.source, content.offset, content.length):
            return False
        self.flush()
        os.lseek(self.output.fd, content.length, os.SEEK_CUR)
        self.report(content.length)
        return True

    def append(self, data: bytes | memoryview, checksum: Checksum | None) -> None:
        if checksum is not None:
            checksum.update(data)
        if self.fill + len(data) > len(self.buffer):
            self.flush()
        if len(data) > len(self.buffer):
            self.write(memoryview(data))
        else:
            self.buffer[self.fill : self.fill + len(data)] = data
            self.fill += len(data)

    def copy(self, content: Range, checksum: Checksum | None) -> None:
        """A range through the buffer: many small ones share a write."""
        offset, left = content.offset, content.length
        while left:
            if self.fill == len(self.buffer):
                self.flush()
            part = self.buffer[self.fill : self.fill + left]
            content.source.read_into(offset, part)
            if checksum is not None:
                checksum.update(part)
            self.fill += len(part)
            offset, left = offset + len(part), left - len(part)

    def copy_in_kernel(self, content: Range) -> Range:
        """Copy without the bytes passing through this process; returns what is left when the kernel cannot (go on)."""
        self.flush()
        offset, left = content.offset, content.length
        while left:
            try:
                count = os.copy_file_range(content.source.fd, self.output.fd, min(left, 16 * CHUNK), offset)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise output_error(self.output.target, error, self.size) from None
                self.kernel_copy = False
                break
            if not count:  # the source has shrunk, which the buffer loop says, or a file system that copies nothing
                break
            offset, left = offset + count, left - count
            self.report(count)
        return Range(content.source, offset, left)

    def flush(self) -> None:
        if self.fill:
            fill, self.fill = self.fill, 0
            self.write(self.buffer[:fill])

    def write(self, data: memoryview) -> None:
        while len(data):
            try:
                count = os.write(self.output.fd, data)
            except OSError as error:
                raise output_error(self.output.target, error, self.size) from None
            if not count:
                raise no_space(self.output.target, self.size)
            data = data[count:]
            self.report(count)

    def report(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.size)
