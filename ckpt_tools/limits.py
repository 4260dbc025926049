"""What a file may ask for, and the one way to raise it (docs/limits.md). What is beyond a limit is refused by its name.

Who trusts the file raises it: `ckpt COMMAND --limit records=2000000`, CKPT_LIMITS for all commands, in a program `raised`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from ckpt_tools.errors import LimitError, UsageError


@dataclass(slots=True, eq=False, repr=False)
class Limit:
    """One limit: what it is now, what is counted, how many more a file has for each of its bytes."""

    name: str
    value: int
    counts: str
    per_byte: float = 0

    def most(self, file_bytes: int) -> int:
        return self.value + int(self.per_byte * file_bytes)

    def check(self, count: int, what: str, file_bytes: int = 0) -> None:
        """Raise the error of `what` where the count is over the limit for a file of this size."""
        if count > self.most(file_bytes):
            raise self.error(what, count)

    @property
    def said(self) -> str:
        return f"The limit is {self.value} {self.counts}."

    def error(self, what: str, needed: int = 0, *, fix: str = "") -> LimitError:
        """The error for a file beyond this limit, of which it needs so many."""
        raising = f"`limits.raised({self.name}={max(2 * self.value, needed)})`"
        return LimitError(what, why=self.said, fix=f"{fix} Where the file is to be trusted, raise the limit: {raising}".strip())


NODES = Limit("nodes", 1_000_000, "containers, objects and calls, and one more for every 4 bytes of the file", 0.25)
MEMORY = Limit("memory", 16 << 20, "bytes that are read or made whole, and 8 more for every byte of the file", 8)
HEADER = Limit("header", 100_000_000, "bytes of a header, an index or another text that is read whole")  # as safetensors
RECORDS = Limit("records", 1_000_000, "records of a zip, archives in one file, or places of a .metadata file's lists")
NESTED = Limit("nested", 8, "archives and pickles in one another")
LIMITS = {limit.name: limit for limit in (NODES, MEMORY, HEADER, RECORDS, NESTED)}
DEPTH, JSON_DEPTH = 10_000, 128  # levels: C's pickle cannot write deeper, nor can serde_json read
STREAMED = 32  # bytes that only pass through take as much memory as one that is held
LISTED = 8  # nodes that a tensor takes where it is listed, beside those of its pickle


def check_depth(depth: int, what: str, most: int = JSON_DEPTH) -> None:
    """Raise the error of `what` where something is nested deeper than readers that recurse can follow."""
    if depth > most:
        raise LimitError(what, why=f"At most {most} levels are read.")


def set_limits(texts: Iterable[str]) -> None:
    """Set limits for this process: NAME=VALUE each."""
    for text in texts:
        name, _, number = text.partition("=")
        if name not in LIMITS:
            raise UsageError(f"{text!r}: there is no limit {name!r}.", why=f"There are {', '.join(sorted(LIMITS))}.")
        if not (number.isascii() and number.isdecimal() and 0 < len(number) < 19 and int(number)):
            what, fix = f"{text!r}: the value is not a whole number above 0.", f"For example: `limits.raised({name}=1000000)`"
            raise UsageError(what, fix=fix)
        LIMITS[name].value = int(number)


def as_set() -> list[str]:
    """What the limits are now, for `set_limits`."""
    return [f"{limit.name}={limit.value}" for limit in LIMITS.values()]


@contextlib.contextmanager
def raised(**values: int) -> Iterator[None]:
    """Other limits inside the block, for all of this process: `raised(records=2_000_000)`.

    Raises:
        UsageError: there is no limit of such a name.
    """
    before = as_set()
    try:
        set_limits(f"{name}={value}" for name, value in values.items())
        yield
    finally:
        set_limits(before)


@dataclass(slots=True)
class Budget:
    """What the reading of one file has taken so far, all of its parts together."""

    file_bytes: int
    taken: Counter[str] = field(default_factory=Counter)

    def take(self, limit: Limit, count: int, what: str) -> None:
        """Count before it is read or made; the error of `what` where it is too much."""
        limit.check(self.taken[limit.name] + count, what, self.file_bytes)
        self.taken[limit.name] += count

    def room(self, limit: Limit) -> int:
        """How much a limit still leaves."""
        return limit.most(self.file_bytes) - self.taken[limit.name]


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextlib.contextmanager
def of_file(file_bytes: int) -> Iterator[None]:
    """All that is read inside the block is of one file of this size, and shares its `Budget`."""
    before = _budget.set(Budget(file_bytes))
    try:
        yield
    finally:
        _budget.reset(before)


def budget(file_bytes: int) -> Budget:
    """The budget of the file that is being read; outside `of_file` one for this size."""
    return _budget.get() or Budget(file_bytes)
