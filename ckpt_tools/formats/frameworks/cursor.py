"""Reading a file from one place on, number by number: few reads, each length held against what is there."""

from __future__ import annotations

import struct

from ckpt_tools.errors import DamagedFileError
from ckpt_tools.io.output import Source

_WINDOW = 64 << 10


class Cursor:
    """A place in a source. `what` names the format in errors; `order` is "<" or ">"."""

    def __init__(self, source: Source, at: int, end: int, what: str, order: str = "<") -> None:
        self.source, self.at, self.end, self.what, self.order = source, at, end, what, order
        self._window, self._start = b"", at

    def take(self, length: int) -> bytes:
        self.check(length)
        begin = self.at - self._start
        if begin + length > len(self._window):
            self._start, begin = self.at, 0
            self._window = self.source.read(self.at, min(max(length, _WINDOW), self.end - self.at))
        self.at += length
        return self._window[begin : begin + length]

    def skip(self, length: int) -> int:
        """Pass over bytes; where they begin."""
        self.check(length)
        self.at += length
        if self.at > self._start + len(self._window):
            self._start, self._window = self.at, b""
        return self.at - length

    def check(self, length: int) -> None:
        """Raise DamagedFileError where fewer bytes are left."""
        if length > self.end - self.at:
            raise DamagedFileError(
                f"The {self.what} is cut off.",
                why=f"At byte {self.at} it claims {length} more bytes; {self.end - self.at} are left.",
                fix="An interrupted download or a full disk does that: get it again.",
            )  # fmt: skip

    def number(self, code: str) -> int:
        return int(self.numbers(code, 1)[0])

    def numbers(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        self.check(count * struct.calcsize(f"{self.order}{code}"))  # before a format of any length is made
        size = struct.calcsize(f"{self.order}{count}{code}")
        return struct.unpack(f"{self.order}{count}{code}", self.take(size))
