"""What a file may ask for: every limit, its value, and the one way to raise it. docs/limits.md lists them.

They lie far above any real checkpoint, and hold a file under SMALL_FILE bytes to seconds and a few hundred megabytes. A file
beyond one is refused by a LimitError that names it; who trusts the file raises it: `ckpt COMMAND --limit records=2000000`, the
variable CKPT_LIMITS for all commands, or in a program

    with ckpt_tools.limits.raised(records=2_000_000):
        ckpt_tools.inspect("huge.pth")
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from ckpt_tools.errors import CkptError, LimitError, UsageError

SMALL_FILE = 10_000_000


class Limit:
    """One limit. `default` is what it is, `value` what it has been raised to; `counts` says what is counted.

    A larger file may ask for more: `times` more for each of its bytes, or one more for every `per` bytes; beyond SMALL_FILE
    for every `beyond` bytes.
    """

    __slots__ = ("beyond", "counts", "default", "name", "per", "times", "value")

    def __init__(self, name: str, default: int, counts: str, *, times: int = 0, per: int = 0, beyond: int = 0) -> None:
        self.name, self.default, self.value, self.counts = name, default, default, counts
        self.times, self.per, self.beyond = times, per, beyond or per
        LIMITS[name] = self

    def most(self, file_bytes: int) -> int:
        """The limit for a file of this size."""
        small = min(file_bytes, SMALL_FILE)
        more = small // self.per + (file_bytes - small) // self.beyond if self.per else 0
        return self.value + self.times * file_bytes + more

    def check(self, count: int, what: str, file_bytes: int = 0) -> None:
        """Raise the error of `what` where the count is over the limit, for a file of this size where that matters."""
        if count > self.most(file_bytes):
            raise self.error(what, count)

    def error(self, what: str, needed: int = 0, *, fix: str = "") -> LimitError:
        """The error for a file beyond this limit.

        Args:
            what: the sentence that says so. needed: the value that would do, where it is known.
            fix: what else can be done about it.
        """
        value = max(2 * self.value, needed)
        raising = f"Where the file is to be trusted, raise the limit: `limits.raised({self.name}={value})`"
        return LimitError(what, why=f"The limit is {self.value} {self.counts}.", fix=f"{fix} {raising}".strip())


LIMITS: dict[str, Limit] = {}

# what reading a file may take in and make, all of its parts together: see Budget
CONTAINERS = Limit("containers", 400_000, "dicts, lists, tuples and objects, and more in a larger file")
PICKLES = Limit("pickles", 1 << 20, "bytes of all pickles, and 2 more for every byte of the file", times=2)
TEXT_BYTES = Limit("text_bytes", 32 << 20, "bytes of JSON, text and code, and 2 more for every byte of the file", times=2)
INFLATED = Limit("inflated", 512 << 20, "bytes of deflated records, and 16 more for every byte of the file", times=16)
# one part of a file
PICKLE_BYTES = Limit("pickle_bytes", 1 << 30, "bytes of what is read whole: a pickle, an index, a plan, a digest file")
HEADER_BYTES = Limit("header_bytes", 100_000_000, "bytes of a safetensors header")  # safetensors refuses more
RECORDS = Limit("records", 1_000_000, "records of a zip, archives in one file, or places of a .metadata file's lists")
MEMBERS = Limit("members", 50_000, "members that are examined for what they would run; a pickle counts for five")
NESTED = Limit("nested", 8, "archives and pickles in one another")
DEPTH = Limit("depth", 10_000, "levels of nesting")  # C pickle itself cannot write deeper
JSON_DEPTH = Limit(
    "json_depth", 128, "levels of nesting in JSON, of modules in a program, of tuples in a dict key"
)  # serde_json's
GLOBALS = Limit("globals", 100_000, "different globals")  # a checkpoint names a few dozen
CHUNKS = Limit("chunks", 4096, "chunks of one tensor that are not whole rows")  # each is compared with the others
# what is made of it
TENSORS = Limit(
    "tensors",
    60_000,
    "tensors, or entries of metadata, and one more for every 192 bytes of the file's first 10 MB and every 48 beyond",
    per=192,
    beyond=48,
)  # torch spends 300
OBJECTS = Limit("objects", 50_000, "places of objects, and one more for every 64 bytes of the file", per=64)
PATHS = Limit("paths", 4_000_000, "parts of all paths, beyond 16 for every place, or of all dict keys")
NAME_PARTS = Limit("name_parts", 1000, "dots in the name of a tensor that is renamed")
SUBMODULES = Limit("submodules", 100_000_000, "characters of the names in one pickled module")
WORK_BYTES = Limit("work_bytes", 1 << 28, "bytes to be hashed, counted and proved, beyond 8 times the file", times=8)

# what earlier versions called them
_REPLACED = {
    "inflated_pickle": "pickles", "code_bytes": "text_bytes", "program_bytes": "text_bytes", "module_depth": "json_depth",
    "index_bytes": "pickle_bytes", "metadata_bytes": "pickle_bytes", "digest_bytes": "pickle_bytes",
    "plan_bytes": "pickle_bytes", "archives": "records", "filled": "inflated", "proved": "work_bytes",
    "key_depth": "json_depth", "key_parts": "paths", "list_items": "records",
}  # fmt: skip


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """What Python says where the system has no more memory is a MemoryError: it may also be that a module cannot be mapped.

    Raises:
        MemoryError: in place of another error of the block that means it.
    """
    try:
        yield
    except (ImportError, OSError) as error:
        told = not isinstance(error, CkptError) and any(text in str(error) for text in _NO_MEMORY)
        if not told:
            raise
        raise MemoryError from None


# of ENOMEM, and of glibc where a module is loaded
_NO_MEMORY = (os.strerror(errno.ENOMEM), "failed to map segment", "cannot allocate memory", "cannot create shared object")


def exhausted(error: MemoryError | RecursionError, what: str) -> LimitError:
    """The error for what Python itself ran out of, in whichever part: nothing of it may end in a traceback."""
    if isinstance(error, MemoryError):
        return LimitError(
            f"{what}: there is not enough memory for it.", why="The machine, or a limit of its system, has no more."
        )
    return LimitError(f"{what}: it is nested deeper than Python can follow.")


# --- raising them


def parse(text: str) -> tuple[str, int]:
    """`NAME=VALUE`.

    Raises:
        UsageError: there is no such limit, or the value is not a number above 0.
    """
    name, _, number = text.partition("=")
    if name not in LIMITS:
        fix = f"It is a part of {_REPLACED[name]!r} now." if name in _REPLACED else ""
        why = f"There are {', '.join(sorted(LIMITS))}."
        raise UsageError(f"{text!r}: there is no limit {name!r}.", why=why, fix=fix)
    if not (number.isascii() and number.isdecimal() and 0 < len(number) < 19 and int(number)):
        raise UsageError(
            f"{text!r}: the value is not a whole number above 0.", fix=f"For example: `limits.raised({name}=1000000)`"
        )
    return name, int(number)


def set_limits(values: Iterable[tuple[str, int]]) -> None:
    """Set limits for this process, by name."""
    for name, value in values:
        LIMITS[name].value = value


def changed() -> list[tuple[str, int]]:
    """The limits that have been set, for a process that shall have the same."""
    return [(limit.name, limit.value) for limit in LIMITS.values() if limit.value != limit.default]


@contextlib.contextmanager
def raised(**values: int) -> Iterator[None]:
    """Other limits inside the block, for all of this process: `raised(records=2_000_000)`.

    Raises:
        UsageError: there is no limit of such a name.
    """
    pairs = [parse(f"{name}={value}") for name, value in values.items()]
    with kept():
        set_limits(pairs)
        yield


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Afterwards the limits are what they were before."""
    before = [(limit.name, limit.value) for limit in LIMITS.values()]
    try:
        yield
    finally:
        set_limits(before)


# --- what the reading of one file may take in and make

_BYTES_PER_CONTAINER = 32  # in a small file; a tensor makes 7, and takes 300 bytes with its record
_INDEX = ".metadata"  # torch.distributed.checkpoint's
_BYTES_PER_CONTAINER_OF_INDEX = 2  # torch takes 140 bytes for a chunk: 48 containers, and 16 texts and uses of the memo
_GLOBAL, _GLOBAL_OF_INDEX = 6, 2  # to name one, mostly for an object, which every walk looks into; an index is walked once
BYTES_PER_NODE = 6  # beyond: tensors that share a storage take 66 bytes in a pickle
LONG_TEXT = 1024  # characters; using a longer one again costs a container for every BYTES_OF_SHARED_TEXT of them
BYTES_OF_SHARED_TEXT = 16
FREE_LIGHT = 700_000  # texts, and uses of a memo, that cost nothing; each further one takes the memory of a container


class Budget:
    """What all parts of a file together may still cost, however they are nested, deflated or repeated in it.

    Args:
        file_bytes: its size. index: whether it is nothing but an index of other files.

    Attributes:
        containers: how many dicts, lists, tuples and objects may still be made. light: texts and uses of a memo so far.
        cost_of_global: what it costs to name a global that is not a tensor's.
    """

    __slots__ = ("containers", "cost_of_global", "file_bytes", "light", "spent")

    def __init__(self, file_bytes: int, *, index: bool = False) -> None:
        small = min(file_bytes, SMALL_FILE)
        more = small // _BYTES_PER_CONTAINER + (file_bytes - small) // BYTES_PER_NODE
        self.containers = CONTAINERS.value + (file_bytes // _BYTES_PER_CONTAINER_OF_INDEX if index else more)
        self.cost_of_global = _GLOBAL_OF_INDEX if index else _GLOBAL
        self.file_bytes = file_bytes
        self.spent: dict[str, int] = {}
        self.light = 0

    def make(self, count: int, what: str) -> None:
        """Count containers, before they are made; the error of `what` where they are too many.

        Raises:
            LimitError: they are.
        """
        if count > self.containers:
            raise CONTAINERS.error(what)
        self.containers -= count

    def take(self, limit: Limit, count: int, what: str) -> None:
        """Count bytes against a limit, before they are read; the error of `what` where they are too many.

        Raises:
            LimitError: they are.
        """
        spent = self.spent.get(limit.name, 0) + count
        limit.check(spent, what, self.file_bytes)
        self.spent[limit.name] = spent

    def note(self, limit: Limit, count: int) -> None:
        """Count bytes that have been read already; there may be less than no room then."""
        self.spent[limit.name] = self.spent.get(limit.name, 0) + count

    def room(self, limit: Limit) -> int:
        """How many bytes a limit still leaves."""
        return limit.most(self.file_bytes) - self.spent.get(limit.name, 0)

    def copy(self) -> Budget:
        """What has been spent so far, for `restore`."""
        copied = Budget(self.file_bytes)
        copied.restore(self)
        return copied

    def restore(self, before: Budget) -> None:
        """Take back what was spent since."""
        self.containers, self.spent, self.light = before.containers, dict(before.spent), before.light


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextlib.contextmanager
def of_file(file_bytes: int, name: str = "") -> Iterator[None]:
    """All that is read inside the block is of one file of this size and name, and shares its `Budget`."""
    before = _budget.set(Budget(file_bytes, index=name == _INDEX))
    try:
        yield
    finally:
        _budget.reset(before)


def budget(file_bytes: int) -> Budget:
    """The budget of the file that is being read; outside `of_file` one for this size."""
    return _budget.get() or Budget(file_bytes)
