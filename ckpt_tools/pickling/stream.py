"""Pickles one behind another, and raw bytes between them: only reading a pickle tells where it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, PickleError
from ckpt_tools.io.content import Content, Literal, Range
from ckpt_tools.io.source import Source
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS
from ckpt_tools.tree.nodes import Global, Node

WINDOW = 1 << 16
_SMALL, _GROWTH, _SLOW_GROWTH = 10_000_000, 16, 4  # bytes; up to there, beyond: reading twice costs time, reading on memory


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes of a file, where positions are the file's; or bytes at hand, which may lie in the file from `at` on."""

    source: Source | None
    start: int
    end: int
    data: bytes | None = None
    at: int = 0

    @classmethod
    def of_bytes(cls, data: bytes, source: Source | None = None, at: int = 0) -> Part:
        return cls(source, 0, len(data), data, at)

    def read(self, offset: int, length: int) -> bytes:
        if self.data is not None:
            return self.data[offset : offset + length]
        assert self.source is not None
        return self.source.read(offset, length)

    def content(self, offset: int, length: int) -> Content:
        return Literal(self.read(offset, length)) if self.source is None else Range(self.source, self.at + offset, length)


class Pickles:
    """A reader that goes through a part from its start: pickles, numbers, and bytes that are passed over unread."""

    def __init__(self, part: Part, window: int = WINDOW) -> None:
        self.part, self.window = part, window
        self.position = self.anchor = part.start
        self.data = b""
        self.cut = False
        self.machine: Machine | None = None  # that read last
        self.globals: dict[Global, None] = {}  # of pickles that describe others
        self.unusual: dict[str, None] = {}

    @property
    def left(self) -> int:
        return self.part.end - self.position

    def load(self, make: Callable[[bytes, int], Machine]) -> tuple[Machine, Node]:
        """The pickle that begins here. A pickle that is longer than what was read of it is read again from its start."""
        self.machine = None
        if not self._ready:
            self._fill(self.window)
        budget = limits.budget(self.left)
        while True:
            before = budget.taken.copy()
            machine = self.machine = make(self.data, self.position - self.anchor)
            try:
                root = machine.load()
            except CkptError:
                room = self.part.end - self.anchor
                self.cut = machine.cut and (len(self.data) == room or machine.position > room)
                if self.cut or not machine.cut:
                    raise
                budget.taken = before  # the same bytes again are no further ones
                growth = _GROWTH if self._ready < _SMALL else _SLOW_GROWTH
                most = budget.room(limits.MEMORY) + self.window
                if self._ready >= most:
                    raise limits.MEMORY.error("The pickles are longer than a file of this size may have them.") from None
                self._fill(min(max(self.window, growth * self._ready), most))
            else:
                self.position = self.anchor + machine.position
                return machine, root

    def description(self) -> Node:
        """The next pickle, which describes others. torch runs it like any other, so what it names is told too."""
        machine, node = self.load(lambda data, offset: Machine(data, MAKERS, _refuse, offset))
        self.globals.update(machine.globals)
        self.unusual.update(machine.unusual)
        validate(node)
        return node

    def tell(self, machine: Machine) -> None:
        machine.globals |= self.globals
        machine.unusual |= self.unusual

    def skip(self, length: int) -> None:
        if not 0 <= length <= self.left:
            raise PickleError(f"{length} bytes are missing at offset {self.position}.")
        self.position += length

    def take(self, length: int) -> bytes:
        start = self.position
        self.skip(length)
        data = self.data[start - self.anchor : self.position - self.anchor]
        return data if len(data) == length else self.part.read(start, length)

    @property
    def _ready(self) -> int:
        """How many bytes from the current position on have been read."""
        return max(0, self.anchor + len(self.data) - self.position)

    def _fill(self, length: int) -> None:
        """Have `length` bytes from the current position on, or as many as there are; what lies before is let go."""
        kept = self.data[self.position - self.anchor :] if self._ready else b""
        self.anchor = self.position
        self.data = kept + self.part.read(self.anchor + len(kept), min(length, self.left) - len(kept))


def _refuse(pid: Node) -> Node:
    raise PickleError("A pickle that describes others refers to something outside it.")
