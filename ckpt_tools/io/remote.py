"""Something remote as a source: the directory, the pickle or the header, and then the tensors that are wanted."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, cast

from ckpt_tools.errors import RemoteError
from ckpt_tools.io.address import Address, ForeignError, T, bounded
from ckpt_tools.io.content import crc32
from ckpt_tools.io.http import FIRST, HttpObject
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files

NEAR, FAR, MOST = FIRST, 4 << 10, 8 << 20  # bytes fetched at least: at the ends, elsewhere, and at most when read in order
_KEPT = 16  # blocks
_GAP = 4 << 10  # ranges nearer than this are fetched in one
_AT_ONCE = 16
_READ_AGAIN = 4


class Remote(Protocol):
    """Something remote that is read by ranges."""

    size: int

    def fetch(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""

    def version(self) -> tuple[Any, ...]:
        """Its size, and what changes when the object does, or None where nothing tells."""


class RemoteSource(Source):
    """A remote object as a source: ranges are fetched when they are read, ahead where the reading goes on in order."""

    def __init__(self, url: str, remote: Remote | None = None) -> None:
        self.path = cast("Path", Address(url))
        self._remote = remote if remote is not None else _open_remote(url)
        self.size = self._remote.size
        self._fd, self._identity = -1, self._remote.version()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._ready: dict[int, bytes] = {}
        self._starts: list[int] = []
        self._seen: dict[tuple[int, int], int] | None = None if any(self._identity[1:]) else {}
        if isinstance(self._remote, HttpObject):
            self._blocks[0] = self._note(0, self._remote.first)
        self._expected, self._ahead = 0, NEAR

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        if not length:  # beyond the end there are that many too
            return b""
        if offset + length > self.size:
            raise self.changed()
        found = self._kept(offset, length)
        if found is None:
            found = self._fetch(offset, length)
        self._expected = offset + length
        return found

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        buffer[:] = self.read(offset, len(buffer))

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch many small ranges at once, neighbours together."""
        runs: list[list[int]] = []
        for start, length in sorted(ranges):
            end = min(start + length, self.size)
            if self._kept(start, length) is not None or start >= end:
                continue
            if runs and start - runs[-1][1] <= _GAP:
                runs[-1][1] = max(runs[-1][1], end)
            else:
                runs.append([start, end])
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(lambda run: self._note(run[0], self._remote.fetch(run[0], run[1])), runs)
            self._ready.update(zip((start for start, _ in runs), found, strict=True))
        self._starts = sorted(self._ready)

    def check_unchanged(self) -> None:
        """Raise ChangedFileError when the object is another than when it was opened."""
        if self._remote.version() != self._identity:
            raise self.changed()
        with ThreadPoolExecutor(_READ_AGAIN) as pool:  # what nothing tells the version of is read twice
            for _ in pool.map(lambda span: self._note(span[0], self._remote.fetch(*span)), self._seen or ()):
                pass

    def _note(self, start: int, data: bytes) -> bytes:
        """Where nothing tells one version from another, the checksum of what was read does."""
        if self._seen is not None and self._seen.setdefault((start, start + len(data)), found := crc32(data)) != found:
            raise self.changed()
        return data

    def _kept(self, offset: int, length: int) -> bytes | None:
        for start, data in self._blocks.items():
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        at = bisect.bisect_right(self._starts, offset) - 1
        if at >= 0:
            start = self._starts[at]
            data = self._ready[start]
            if offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return None

    def _fetch(self, offset: int, length: int) -> bytes:
        ends = offset < NEAR or self.size - offset <= 2 * NEAR
        if offset == self._expected and offset:
            self._ahead = min(2 * self._ahead, MOST)
        else:
            self._ahead = NEAR if ends else FAR
        data = self._note(offset, self._remote.fetch(offset, min(self.size, offset + max(length, self._ahead))))
        if len(data) < length:
            raise self.changed()
        self._blocks[offset] = data
        while len(self._blocks) > _KEPT or (sum(map(len, self._blocks.values())) > 4 * MOST and len(self._blocks) > 1):
            self._blocks.popitem(last=False)
        return data[:length]


def open_remote(url: str) -> Source:
    """A remote file as a source, or a remote folder as the files of one."""
    if url.startswith(("http://", "https://")):
        return RemoteSource(url)
    remote = FsspecObject(url)
    if not remote.is_folder():
        return RemoteSource(url, remote)
    folder = url.rstrip("/")
    return Files(
        cast("Path", Address(folder)),
        cast("Path", Address(folder)),
        lambda name: RemoteSource(f"{folder}/{name}"),
        remote.names,
    )


def files_beside(source: RemoteSource) -> Files:
    """The files in the folder of a remote index."""
    address = cast("Address", source.path)

    def names() -> list[str]:
        folder = address.beside("")
        return [] if folder.startswith(("http://", "https://")) else FsspecObject(folder).names()  # HTTP has no listing

    return Files(source.path, source.path, lambda name: RemoteSource(address.beside(name)), names)


def _open_remote(url: str) -> Remote:
    return HttpObject(url) if url.startswith(("http://", "https://")) else FsspecObject(url)


class FsspecObject:
    """A file or folder of any file system that fsspec has a driver for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.name = file_system(url)
        self.info = self._ask(lambda: self.fs.info(self.name))
        self.size = int(self.info.get("size") or 0)

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return bool(self.info.get("type") == "directory")

    def names(self) -> list[str]:
        """The names of the files in the folder."""
        found = self._ask(lambda: self.fs.ls(self.name, detail=False))
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]

    def fetch(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""
        return bytes(self._ask(lambda: self.fs.cat_file(self.name, start=start, end=end)))

    def version(self) -> tuple[Any, ...]:
        """Size and what the file system calls a version."""
        self.fs.invalidate_cache()
        info = self._ask(lambda: self.fs.info(self.name))
        return info.get("size"), *(str(info[key]) for key in ("ETag", "etag", "mtime", "created") if info.get(key))

    def _ask(self, call: Callable[[], T]) -> T:
        return bounded(self.url, call)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path in it."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise RemoteError("This needs fsspec: pip install fsspec", why=f"It reads {url}.") from None
    try:
        fs, name = bounded(url, lambda: url_to_fs(url))
    except ForeignError as error:
        if isinstance(error.error, ImportError):
            raise RemoteError(f"{url} needs a driver that is not installed.", why=f"{error.error}") from None
        if isinstance(error.error, ValueError):
            raise RemoteError(f"{url}: {scheme}:// is not a scheme that fsspec knows.", why=f"{error.error}."[:300]) from None
        raise
    return fs, str(name)
