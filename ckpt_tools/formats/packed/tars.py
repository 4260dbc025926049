"""The members of a tar, read from its headers; none is extracted.

Source: POSIX.1-2001, pax, "ustar Interchange Format"; GNU tar's manual, "Basic Tar Format"; CPython's Lib/tarfile.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError
from ckpt_tools.formats.base import TAR_BLOCK
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.stream import FilePart

_REGULAR = (b"0", b"\0")
_LINKS = (b"1", b"2")
_WITHOUT_BYTES = (*_LINKS, b"3", b"4", b"5", b"6")
_PAX, _GNU = (b"x", b"g"), (b"L", b"K")  # what they say is of the member behind them: its path, or that of its link
_MOST_TEXT = 1 << 16  # bytes of a header of names
BYTES_PER_CONTAINER = 4  # of headers, and of the names of folders: Python's tarfile keeps a kilobyte for each header
_LENGTH = re.compile(rb"([1-9][0-9]{0,4}) ")
_IDLE_KEYS = frozenset((b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname", b"comment"))
_IDLE_PREFIXES = (b"LIBARCHIVE.", b"SCHILY.xattr.", b"SCHILY.fflags", b"RHT.security.", b"MSWINDOWS.")


class OddHeaderError(Exception):
    """A header that readers of tars take in different ways. The text says which."""


@dataclass(frozen=True, slots=True)
class Header:
    """One header, as Python's tarfile reads it."""

    name: str
    kind: bytes
    size: int

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file; the oldest tars mark a folder by its name alone."""
        return self.kind in _REGULAR and not self.name.endswith("/")

    @property
    def is_link(self) -> bool:
        """Whether it is a link to another file."""
        return self.kind in _LINKS


@dataclass(frozen=True, slots=True)
class _Said:
    """What headers before a member say of it."""

    size: int | None = None
    path: str | None = None


def entries(source: Source, most: int, *, long_names: bool = False) -> Iterator[tuple[Header, FilePart]]:
    """Each member and its bytes, in file order, up to the first empty block."""
    position, said, budget = 0, _Said(), limits.budget(source.size)
    for _ in range(most):
        if position + TAR_BLOCK > source.size or not any(block := source.read(position, TAR_BLOCK)):
            return
        pay(budget, TAR_BLOCK)
        header, start = _header(block, position, said, long_names=long_names), position + TAR_BLOCK
        if start + header.size > source.size:
            raise DamagedFileError(
                f"The tar is cut off in its member {header.name!r}.",
                why=f"It ends after {source.size} bytes; the member goes up to byte {start + header.size}.",
                fix="An interrupted download or a full disk does that: get it again.",
            )
        if header.kind in (*_PAX, *_GNU):
            text = source.read(start, min(header.size, _MOST_TEXT))
            pay(budget, len(text))
            said = _told(text, header, said, long_names=long_names)
        else:
            yield header, FilePart(source, start, start + header.size)
            said = _Said()
        position = start + -(-header.size // TAR_BLOCK) * TAR_BLOCK
    if position + TAR_BLOCK <= source.size and any(source.read(position, TAR_BLOCK)):
        raise OddHeaderError(f"more than {most} members")


def pay(budget: limits.Budget, count: int) -> None:
    """Count bytes of headers."""
    budget.take(limits.NODES, count // BYTES_PER_CONTAINER, "The tar has more headers than a file of its size can hold.")


def _header(block: bytes, position: int, said: _Said, *, long_names: bool) -> Header:
    """One header, with what was said of it before."""
    name, prefix = (_text(block[start:end]) for start, end in ((0, 100), (345, 500)))
    kind, size = block[156:157], _size(block, position)
    if kind in _PAX or (kind in _GNU and long_names):
        return Header(name, kind, size)
    path = f"{prefix}/{name}" if prefix else name
    header = Header(path if said.path is None else said.path, kind, size if said.size is None else said.size)
    if header.is_file:
        return header
    if header.kind not in (*_REGULAR, *_WITHOUT_BYTES) or header.size:  # some readers pass over the bytes, tarfile does not
        raise OddHeaderError(f"a member of kind {header.kind!r} with {header.size} bytes")
    return replace(header, name=header.name.rstrip("/"))


def _told(data: bytes, header: Header, before: _Said, *, long_names: bool) -> _Said:
    """What a header of names or sizes says of the member behind it. Times, owners and comments change nothing."""
    if header.size > _MOST_TEXT:
        raise OddHeaderError(f"a pax header of {header.size} bytes")
    if header.kind in _GNU:
        return before if header.kind == b"K" else _renamed(_text(data), before)
    said = before
    for key, value in _records(data):
        mine = header.kind == b"x"
        if key == b"size" and mine and said.size is None and value.isdigit():
            said = replace(said, size=int(value))
        elif key == b"path" and mine and long_names:
            said = _renamed(value.decode("utf-8", "surrogateescape"), said)
        elif key not in _IDLE_KEYS and not (long_names and (key == b"linkpath" or key.startswith(_IDLE_PREFIXES))):
            raise OddHeaderError(f"a pax header with {key[:40]!r}")
    return said


def _renamed(path: str, said: _Said) -> _Said:
    if said.path is not None or not path or "\0" in path:
        raise OddHeaderError("two names for one member")
    return replace(said, path=path)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of a pax header, each `LENGTH KEY=VALUE` and a line feed."""
    at = 0
    while at < len(data):
        match = _LENGTH.match(data, at)
        record = data[match.end() : at + int(match[1])] if match else b""
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if match is None or not (equals and key) or not record.endswith(b"\n") or at + int(match[1]) > len(data):
            raise OddHeaderError("a malformed pax header")
        at += int(match[1])
        yield key, value


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _size(header: bytes, position: int) -> int:
    """The size in a header whose checksum is right: octal, or where the first bit is set, binary (GNU, over 8 GB)."""
    try:
        expected = int(header[148:156].strip(b" \0"), 8)
        field = header[124:136]
        size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        expected, size = -1, 0
    if sum(header) - sum(header[148:156]) + 8 * 32 != expected or size < 0:
        raise DamagedFileError(f"The tar header at byte {position} is damaged.", why="Its checksum does not match.")
    return size
