"""What the readers of several containers need: warnings, tensors of a run of bytes, a place in a file that is read from."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, TensorError
from ckpt_tools.io.content import Content, Range
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Ahead
from ckpt_tools.pickling.checks import validate
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS, Entry, Node, Storage, check, contiguous_stride

# The containers of programs: the code of the warning that a file is one, and what it is called.
PROGRAMS = {
    "torchscript": ("torchscript-program", "a TorchScript program"),
    "torch-export": ("exported-program", "an exported program"),
}


# folders of many ranks' files, each with parts of the tensors
PART_CONTAINERS = ("rank-files", "consolidated", "megatron", "deepspeed")


def is_zip(head: bytes) -> bool:
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


TAR_BLOCK = 512


def is_tar(head: bytes) -> bool:
    """Whether Python's tarfile, and so `torch.load`, takes a file that starts with these bytes for a tar: by its checksum."""
    field = head[148:156]
    if field[:1] not in (b"\x80", b"\xff") and field.partition(b"\0")[0].strip().strip(b"01234567_+-oO"):
        return False  # where its checksum stands is no number
    import tarfile

    try:
        tarfile.TarInfo.frombuf(head[:TAR_BLOCK], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def repeated(pairs: Iterable[tuple[str, object]]) -> str | None:
    """The first key that comes a second time, in one pass: a file may hold a million of them."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A map of JSON, each of whose keys is text, and is there once. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"the key {repeated(pairs)!r} is there twice")
    check_text(found)
    return found


def check_text(texts: Iterable[str]) -> None:
    """Raise UnicodeEncodeError, a ValueError, for a lone surrogate, which JSON can write and UTF-8 cannot."""
    "".join(texts).encode()


def row_major(key: str, dtype: DType, shape: tuple[int, ...], content: Content, called: str) -> Entry:
    """The tensor whose elements are all of a content; errors say what it is called."""
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise TensorError(f"{called} has a shape of impossible sizes.")
    if type(content) is Range and content.offset + content.length > content.source.size:
        raise DamagedFileError(f"{called} reaches beyond the end of the file.", why="It was cut off, or says wrong sizes.")
    entry = Entry(Storage(key, dtype, content.length, None, content), dtype, shape, contiguous_stride(shape), 0)
    if entry.nbytes != content.length:
        raise TensorError(f"{called} has {content.length} bytes, and its shape needs {entry.nbytes}.")
    check(entry, called)
    return entry


@dataclass(slots=True, eq=False, repr=False)
class Warned:
    code: str
    found: str
    expected: str = ""
    severity: str = "warning"
    fix: str = ""


def validate_tree(root: Node) -> list[Warned]:
    """Check a tree that was read from a pickle, and merge keys that are set twice; the first of those as warnings."""
    return [Warned("repeated-key", f"the key {key!r} is set twice; the last value wins") for key in validate(root)[:20]]


def trailing(count: int, what: str, code: str = "trailing-bytes") -> list[Warned]:
    return [Warned(code, f"{count} bytes after {what}", "nothing; they are not kept")] if count else []


class Keys:
    """New keys for the storages of several files, each of which counts from 0."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> str:
        self.count += 1
        return str(self.count - 1)

    def renew(self, root: Node) -> Node:
        new = functools.cache(lambda storage: replace(storage, key=self.next()))

        def swap(node: Node) -> Node:
            if type(node) is Entry:
                return replace(node, storage=new(node.storage))
            return new(node) if type(node) is Storage else node

        return exchange.replace(root, swap)


# --- reading a file from one place on, number by number: few reads, each length held against what is there

_WINDOW = 64 << 10


class Cursor:
    """A place in a source. `what` names the format in errors; `order` is "<" or ">"."""

    def __init__(self, source: Source, at: int, end: int, what: str, order: str = "<") -> None:
        self.source, self.at, self.end, self.what, self.order = source, at, end, what, order
        self._ahead, self._budget = Ahead(source, end, _WINDOW), limits.budget(source.size)

    def count(self, nodes: int) -> None:
        """Count values before they are made."""
        self._budget.take(limits.NODES, nodes, f"The {self.what} has more values than a file of its size can hold.")

    def hold(self, length: int) -> None:
        """Count bytes before they are read whole."""
        self._budget.take(limits.MEMORY, length, f"The {self.what} has more text, or bytes outside its tensors, than any has.")

    def take(self, length: int) -> bytes:
        return self._ahead.read(self.skip(length), length)

    def skip(self, length: int) -> int:
        """Pass over bytes; where they begin."""
        self.check(length)
        self.at += length
        return self.at - length

    def check(self, length: int) -> None:
        if length > self.end - self.at:
            why = f"At byte {self.at} it claims {length} more bytes; {self.end - self.at} are left."
            fix = "An interrupted download or a full disk does that: get it again."
            raise DamagedFileError(f"The {self.what} is cut off.", why=why, fix=fix)

    def number(self, code: str) -> int:
        return int(self.numbers(code, 1)[0])

    def numbers(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        self.check(count * struct.calcsize(f"{self.order}{code}"))  # before a format of any length is made
        size = struct.calcsize(f"{self.order}{count}{code}")
        return struct.unpack(f"{self.order}{count}{code}", self.take(size))
