"""Sources beyond one local file: many files of which few are open at a time, a part of one, what the caller has opened."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from ckpt_tools.errors import DamagedFileError, LimitError, NotACheckpointError, UsageError
from ckpt_tools.io.source import Handed, Source, identity_of, open_regular

if TYPE_CHECKING:
    from ckpt_tools.io.content import Range

OPEN_FILES = 64  # of one checkpoint at a time; systems allow 256 (macOS) to 1024 in a process
Opener: TypeAlias = Callable[[str], Source]


class Files(Source):
    """The files of one checkpoint, as one source: closed, checked and measured together. Nothing is read from it itself."""

    def __init__(
        self, path: Path, folder: Path, opener: Opener | None = None, names: Callable[[], list[str]] | None = None
    ) -> None:
        self.path, self.folder, self.size = path, folder, 0
        self.members: dict[str, Source] = {}
        self.open_members: OrderedDict[str, Member] = OrderedDict()
        self._opener = opener if opener is not None else lambda name: Member(self, name)
        self._names = names
        self._fd, self._identity = -1, object()

    def names(self) -> list[str]:
        if self._names is not None:
            return self._names()
        try:
            return os.listdir(self.folder)
        except OSError as error:
            raise NotACheckpointError(f"{self.folder} cannot be read.", why=f"{error.strerror or error}.") from None

    def open(self, name: str) -> Source:
        """The source of a file in the folder, the same one each time."""
        if name not in self.members:
            if not is_plain_name(name):
                raise DamagedFileError(f"{self.path} names the file {name!r}, which is not a name inside its folder.")
            self.members[name] = member = self._opener(name)
            self.size += member.size
        return self.members[name]

    def adopt(self, source: Source) -> Source:
        """Take in a source that is open already; returns it."""
        self.members[source.path.name] = source
        self.size += source.size
        return source

    def check_unchanged(self) -> None:
        for member in self.members.values():
            member.check_unchanged()

    def close(self) -> None:
        for member in self.members.values():
            member.close()


def is_plain_name(name: str) -> bool:
    """Whether a name from a file can only mean something inside the folder: relative, no `..`, no backslash, no drive."""
    parts = name.split("/")
    return bool(name) and not any(part in ("", ".", "..") for part in parts) and not set(name) & set("\\:\0")


class Member(Source):
    """One local file of several: opened when it is read, closed when others need the room, opened again as the same file."""

    def __init__(self, files: Files, name: str) -> None:
        self.path = files.folder / name
        self._files, self._name, self._fd = files, name, -1
        status = self.status()
        self.size, self._identity = status.st_size, identity_of(status)

    @property
    def fd(self) -> int:
        if self._fd < 0:
            fd = open_regular(self.path)
            if self._identity is not None and identity_of(os.fstat(fd)) != self._identity:
                os.close(fd)
                raise self.changed()
            self._fd, others = fd, self._files.open_members
            others[self._name] = self
            if len(others) > OPEN_FILES:
                others.popitem(last=False)[1].close()
        return self._fd

    def check_unchanged(self) -> None:
        with contextlib.suppress(OSError):
            if identity_of(os.stat(self.path)) == self._identity:
                return
        raise self.changed()


class Window(Source):
    """A part of a source as a source of its own: an archive among several in one file.

    `record` is the range of the source that it is, where the source says the checksum of that.
    """

    def __init__(self, source: Source, start: int, size: int, record: Range | None = None) -> None:
        if start < 0 or size < 0 or start + size > source.size:
            what = f"{source.path} has {source.size} bytes; bytes {start} to {start + size} of it are referred to."
            raise NotACheckpointError(what)
        self.source, self.start, self.size, self.record = source, start, size, record
        self.path, self._fd, self._identity = source.path, -1, object()

    def read(self, offset: int, length: int) -> bytes:
        return self.source.read(self._place(offset, length), length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.source.read_into(self._place(offset, len(buffer)), buffer)

    def _place(self, offset: int, length: int) -> int:
        if length and (offset < 0 or offset + length > self.size):
            raise self.changed()
        return self.start + offset

    def check_unchanged(self) -> None:
        self.source.check_unchanged()

    def close(self) -> None:
        """Nothing: the source belongs to others too."""


class Ahead:
    """Small reads of a source that lie close together: many are read at once, up to an end."""

    def __init__(self, source: Source, end: int, ahead: int) -> None:
        self.source, self.end, self.ahead = source, end, ahead
        self.start, self.block = 0, b""

    def read(self, offset: int, length: int) -> bytes:
        """What is there; less where that would reach beyond the end."""
        at = offset - self.start
        if not 0 <= at <= len(self.block) - length:
            self.start, at, left = offset, 0, self.end - offset
            self.block = self.source.read(offset, min(max(self.ahead, length), left)) if left > 0 else b""
        return self.block[at : at + length]


def write_all(fd: int, left: memoryview) -> None:
    while len(left):
        left = left[os.write(fd, left) :]


class Spooled(Source):
    """Bytes made of another source, in a temporary file without a name, which goes when nothing refers to it any more."""

    def __init__(self, origin: Source, blocks: Iterable[bytes | memoryview]) -> None:
        import tempfile  # few commands need these

        self.origin, self.path, self.size, self._identity = origin, origin.path, 0, object()
        with self._room():
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed with this source
        weakref.finalize(self, file.close)
        self._fd = file.fileno()
        self.add(blocks)

    def add(self, blocks: Iterable[bytes | memoryview]) -> None:
        for block in blocks:
            with self._room():
                write_all(self._fd, memoryview(block))
            self.size += len(block)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{self.path} cannot be inflated into a temporary file: {error.strerror or error}."
            raise LimitError(what, fix="Unpack it, or set TMPDIR to a folder with room.") from None

    def check_unchanged(self) -> None:
        self.origin.check_unchanged()

    def close(self) -> None:
        """Nothing: it ends when nothing refers to it."""


class Reader(RawIOBase):
    """A source as what reads a file of Python's takes it."""

    def __init__(self, source: Source) -> None:
        self.source, self.at = source, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.source.size - self.at)
        data = self.source.read(self.at, left if size is None or size < 0 else min(size, left))
        self.at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.at = offset + (0, self.at, self.source.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at


class HandedSource(Source):
    """An open file as a source, from where it stands, which is where it stands again at the end."""

    def __init__(self, path: Handed) -> None:
        self.path, self._file, self._fd = cast("Path", path), path.file, -1
        self._lock = threading.Lock()  # a position is all that a file has
        try:
            self._start = self._file.tell()
            self.size = self._rest()
            first = self._file.read(0)
            self._file.seek(self._start)
        except (OSError, ValueError, AttributeError) as error:
            if getattr(self._file, "closed", False) is True:
                raise NotACheckpointError(f"{path} cannot be read.", why="It is closed.") from None
            why = f"It has no positions: {error}."
            raise UsageError(f"{path} cannot be read.", why=why, fix="Read it first: io.BytesIO(file.read()).") from None
        if not isinstance(first, bytes):
            raise UsageError(f"{path} is open as text.", fix='Open it with mode "rb".')
        if self.size <= 0 < self._start:
            raise NotACheckpointError(f"{path} stands at its end.", fix="Call its seek(0) first.")
        self._identity = (id(self._file), self._start, self.size)

    def _rest(self) -> int:
        return int(self._file.seek(0, os.SEEK_END) - self._start)

    def check_unchanged(self) -> None:
        with self._lock:
            if self._rest() != self.size:
                raise self.changed()

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.seek(self._start)

    def _pread(self, length: int, offset: int) -> bytes:
        try:
            with self._lock:
                self._file.seek(self._start + offset)
                return cast("bytes", self._file.read(length))
        except OSError as error:
            raise self._unreadable(error) from None
        except ValueError as error:  # closed meanwhile
            raise NotACheckpointError(f"{self.path} cannot be read.", why=f"{error}.") from None
