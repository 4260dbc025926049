"""The way of a buffer: the caller fills it, one thread works out what depends on its bytes, another writes it.

Reading, summing up and writing two gigabytes take about as long as each other; all three leave Python's lock alone while they
work on a buffer, so they overlap. Steps run in the order in which they were added, across buffers, and writes in order too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

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
    """Buffers on their way to an output.

    Args:
        write: writes all of a buffer's bytes.
        size: how many bytes will come; one buffer's worth is worked on without threads.
        works: whether there is work on the bytes; a mere copy does without the thread for it.
    """

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
        """Send the buffer at hand on its way, and take a free one.

        Raises:
            Whatever a step or a write raised, of this buffer or an earlier one.
        """
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
