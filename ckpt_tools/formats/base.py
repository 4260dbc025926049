"""What every container's reader returns, and what its layout is asked for."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt_tools.errors import DamagedFileError, TensorError
from ckpt_tools.formats.zip_directory import Record
from ckpt_tools.io.content import Content
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS, Dict, Entry, Global, Node, Storage, check, contiguous_stride

# The containers of programs: the code of the warning that a file is one, and what it is called.
PROGRAMS = {
    "torchscript": ("torchscript-program", "a TorchScript program"),
    "torch-export": ("exported-program", "an exported program"),
}


def program(container: str, holds: str, constants: Sequence[Record]) -> Warned:
    """What a state dict of a program leaves behind."""
    code, called = PROGRAMS[container]
    found = f"{called}: {holds}"
    if constants:
        found += f", {len(constants)} constants of {sum(row.size for row in constants)} bytes"
    return Warned(code, found, "a state dict, which a model's own code loads")


# folders of many ranks' files, each with parts of the tensors
PART_CONTAINERS = ("rank-files", "consolidated", "megatron", "deepspeed")
CUT_ARCHIVE = "cut-archive"  # the code of the warning that another archive begins behind the one that is read


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
    """A map of JSON, in which no key is there twice. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"the key {repeated(pairs)!r} is there twice")
    return found


def row_major(key: str, dtype: DType, shape: tuple[int, ...], content: Content, called: str) -> Entry:
    """The tensor whose elements are all of a content; errors say what it is called."""
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise TensorError(f"{called} has a shape of impossible sizes.")
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


@dataclass(slots=True, eq=False, repr=False)
class Packed:
    kind: str
    member: str
    source: Source
    whole: Source
    path: Path
    folder: Files | None = None


@dataclass(slots=True, repr=False, eq=False)
class Decoded:
    container: str
    root: Node
    source: Source
    globals: list[Global] = field(default_factory=list)
    unusual: list[str] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: list[Warned] = field(default_factory=list)
    storage_bytes: int = 0
    byteorder: str = "little"
    has_checksums: bool = False
    root_folder: str = "archive"
    records: Sequence[Record] = ()
    dead_bytes: Callable[[], int] = lambda: 0
    lost: list[tuple[str, str]] = field(default_factory=list)
    locate: Callable[[Node], Node] | None = None
    misplaced: Callable[[], Iterator[str]] | None = None
    others: Mapping[str, Callable[[], Node]] = field(default_factory=dict)
    beside: Mapping[str, Node] = field(default_factory=dict)
    packed: Packed | None = None
    encodings: Mapping[str, str] = field(default_factory=dict)
    examined: Mapping[Source, Sequence[Global]] = field(default_factory=dict)

    @property
    def is_examined(self) -> bool:
        """Whether its reader has seen every pickle of the file, and none names a class: there is nothing else to be rated."""
        return self.container in _READ_WHOLE and ALLOWED.issuperset(self.globals) and not self._may_hide

    @property
    def _may_hide(self) -> bool:
        """Whether the file has what its reader did not read as it is: a record, a text, a call of what a call made."""
        if any(use.startswith("call of") for use in self.unusual) or any(row.code in _MORE_BYTES for row in self.warnings):
            return True
        if any(len(text) >= _MAY_BE_PICKLE for text in self.metadata.values()):
            return True
        storages, known = f"{self.root_folder}/data/", {f"{self.root_folder}/{name}" for name in _RECORDS}
        return not known.issuperset([row.name for row in self.records if row.is_array or not row.name.startswith(storages)])

    def merge(self, part: Decoded, name: str) -> None:
        """What must be told of a checkpoint that lies in this one under a name: its globals, odd uses and warnings."""
        self.globals = list(dict.fromkeys((*self.globals, *part.globals)))
        self.unusual = list(dict.fromkeys((*self.unusual, *part.unusual)))
        self.warnings += [replace(warned, found=f"{warned.found} in {name}") for warned in part.warnings]


def state_dict(container: str, source: Source, items: Sequence[tuple[str, Node]]) -> Decoded:
    if (twice := repeated(items)) is not None:
        raise DamagedFileError(f"Two tensors of the file would be called {twice!r}.", why="A name in it may have a dot.")
    made = Decoded(container, Dict([*items], ordered=True), source)
    made.storage_bytes = sum(node.storage.nbytes for _, node in items if type(node) is Entry)
    return made


class Keys:
    """New keys for the storages of several files, each of which counts from 0."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> str:
        self.count += 1
        return str(self.count - 1)

    def renew(self, root: Node) -> Node:
        renewed: dict[int, Storage] = {}

        def new(storage: Storage) -> Storage:
            if id(storage) not in renewed:
                renewed[id(storage)] = replace(storage, key=self.next())
            return renewed[id(storage)]

        def swap(node: Node) -> Node:
            if type(node) is Entry:
                return replace(node, storage=new(node.storage))
            return new(node) if type(node) is Storage else node

        return exchange.replace(root, swap)


# The containers of which nothing but what their reader has read is a pickle.
_READ_WHOLE = frozenset(("torch-zip", "torch-legacy", "safetensors", "gguf", "onnx", "flax"))
_MAY_BE_PICKLE = 16  # characters of metadata that could be one in base64
# Readers say so of what they did not read, or of what lies behind the end of what they read.
_MORE_BYTES = frozenset(("trailing-bytes", "trailing-pickle-bytes"))
_RECORDS = ("data.pkl", "version", "byteorder", ".data/serialization_id", ".format_version", ".storage_alignment")


# --- reading a file from one place on, number by number: few reads, each length held against what is there

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
