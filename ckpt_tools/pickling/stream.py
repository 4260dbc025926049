"""Pickles one behind another, and raw bytes between them: only reading a pickle tells where it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, PickleError
from ckpt_tools.io.content import Content, Literal, Range
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS
from ckpt_tools.tree.nodes import Global, Node

WINDOW = 1 << 16
_SMALL, _GROWTH, _SLOW_GROWTH = 10_000_000, 16, 4  # bytes; up to there, beyond: reading twice costs time, reading on memory


@dataclass(frozen=True, slots=True)
class FilePart:
    """A run of bytes in a file. Positions count from the file's start."""

    source: Source
    start: int
    end: int

    def read(self, offset: int, length: int) -> bytes:
        return self.source.read(offset, length)

    def content(self, offset: int, length: int) -> Content:
        return Range(self.source, offset, length)


@dataclass(frozen=True, slots=True)
class BytesPart:
    """A run of bytes at hand; where `source` is set, they lie in that file from `at` on. Positions count from their start."""

    data: bytes
    source: Source | None = None
    at: int = 0

    start = 0

    @property
    def end(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def content(self, offset: int, length: int) -> Content:
        if self.source is not None:
            return Range(self.source, self.at + offset, length)
        return Literal(self.data[offset : offset + length])


Part: TypeAlias = FilePart | BytesPart


class Pickles:
    """A reader that goes through a part from its start: pickles, numbers, and bytes that are passed over unread."""

    def __init__(self, part: Part, window: int = WINDOW) -> None:
        self.part, self.window = part, window
        self.position = self.anchor = part.start
        self.data = b""
        self.cut = False

    @property
    def left(self) -> int:
        return self.part.end - self.position

    def load(self, make: Callable[[bytes, int], Machine]) -> tuple[Machine, Node]:
        """The pickle that begins here. A pickle that is longer than what was read of it is read again from its start."""
        if not self._ready:
            self._fill(self.window)
        budget = limits.budget(self.left)
        while True:
            before = dict(budget.taken)
            machine = make(self.data, self.position - self.anchor)
            try:
                root = machine.load()
            except CkptError:
                room = self.part.end - self.anchor
                self.cut = machine.cut and (len(self.data) == room or machine.needed > room)
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

    def take(self, length: int) -> bytes:
        if length > self.left:
            raise PickleError(f"{length} bytes are missing at offset {self.position}.")
        inside = self.position - self.anchor
        data = self.data[inside : inside + length]
        if len(data) < length:
            data = self.part.read(self.position, length)
        self.position += length
        return data

    def skip(self, length: int) -> None:
        self.position += length

    @property
    def _ready(self) -> int:
        """How many bytes from the current position on have been read."""
        return max(0, self.anchor + len(self.data) - self.position)

    def _fill(self, length: int) -> None:
        """Have `length` bytes from the current position on, or as many as there are; what lies before is let go."""
        kept = self.data[self.position - self.anchor :] if self._ready else b""
        self.anchor = self.position
        self.data = kept + self.part.read(self.anchor + len(kept), min(length, self.left) - len(kept))


@dataclass(slots=True)
class SmallPickles:
    """Pickles that describe others, and refer to nothing. torch runs them like any other, so what they name is told too."""

    pickles: Pickles
    what: str
    globals: dict[Global, None] = field(default_factory=dict)
    unusual: dict[str, None] = field(default_factory=dict)

    def load(self) -> Node:
        machines = []

        def make(data: bytes, offset: int) -> Machine:
            machines.append(Machine(data, MAKERS, self._refuse, offset))
            return machines[-1]

        try:
            node = self.pickles.load(make)[1]
            validate(node)
            return node
        finally:
            for machine in machines[-1:]:  # none where it was interrupted before
                self.globals.update(machine.globals)
                self.unusual.update(machine.unusual)

    def tell(self, machine: Machine) -> None:
        """Add what they name to what a machine has found."""
        machine.globals.update(self.globals)
        machine.unusual.update(self.unusual)

    def _refuse(self, pid: Node) -> Node:
        raise PickleError(f"{self.what} refers to something outside it.")
