"""What is at an address: read by ranges, over HTTP or with a driver of fsspec, which also writes files and new folders."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar, cast

from ckpt_tools._version import __version__
from ckpt_tools.errors import CkptError, MissingFileError, OutputError, OutputExistsError, RemoteError
from ckpt_tools.io import temporaries
from ckpt_tools.io.content import crc32
from ckpt_tools.io.output import Output, Staging, exists_error, replacing
from ckpt_tools.io.source import Address, Source
from ckpt_tools.io.sources import Files

_SECONDS = 60
_NEAR, _MOST = 64 << 10, 8 << 20  # bytes fetched at least; at most, when read in order
_GAP = 4 << 10  # between small ranges that are fetched as one
_AT_ONCE, _TRIES = 16, 3
_SLOWEST = 16 << 10  # bytes a second
_TAKEN_WHOLE = 16 << 20  # from a server without ranges
_AS_THEY_ARE = "%/:?#[]@!$&'()*+,;=~-._"
# Stores where an upload becomes an object when it is completed, and a rename would be a second copy, or two more commits.
_WHOLE_ON_COMMIT = ("s3://", "s3a://", "gs://", "gcs://", "hf://")
_HTTP = ("http://", "https://")
_T = TypeVar("_T")


def _bounded(url: str, call: Callable[[], _T], seconds: float = _SECONDS) -> _T:
    """What a call of a driver gives, its errors as ours, and not waited for longer than a minute, or than is said."""
    done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except Exception as error:  # drivers raise what their libraries do
            done.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        value, error = done.get(timeout=seconds)
    except queue.Empty:
        raise _unreadable(url, f"No whole answer within {seconds:.0f} seconds.") from None
    if isinstance(error, FileNotFoundError) and not isinstance(error, CkptError):
        raise MissingFileError(f"{url} cannot be reached.", why="There is no such file.") from None
    if error is not None:
        is_ours, why = isinstance(error, CkptError), f"{type(error).__name__}: {error}"[:300]
        raise (error if is_ours else RemoteError(f"{url} cannot be reached.", why=why)) from None
    return cast("_T", value)


def _unreadable(url: str, why: str) -> RemoteError:
    return RemoteError(f"{url} cannot be read.", why=why)


class RemoteSource(Source):
    """A remote object as a source: ranges are fetched when they are read, ahead where the reading goes on in order."""

    def __init__(self, url: str, version: tuple[Any, ...], first: bytes = b"") -> None:
        self.path = cast("Path", Address(url))
        self._fd, self._identity, self.size = -1, version, int(version[0] or 0)
        # where nothing tells one version from another, the checksums of what was read do
        self._sums: dict[tuple[int, int], int] | None = None if any(version[1:]) else {(0, len(first)): crc32(first)}
        self._blocks: list[tuple[int, bytes]] = [(0, first)]
        self._held, self._next, self._ahead = 0, 0, _NEAR

    def fetch(self, start: int, end: int) -> bytes:
        raise NotImplementedError

    def version(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def read(self, offset: int, length: int) -> bytes:
        if not length:  # beyond the end there are that many too
            return b""
        if offset + length > self.size:
            raise self.changed()
        found = self._kept(offset, length)
        if found is None:
            self._ahead = min(2 * self._ahead, _MOST) if offset and offset == self._next else _NEAR
            found = self._keep(offset, self._get((offset, min(self.size, offset + max(length, self._ahead)))))[:length]
        self._next = offset + length
        return found

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch many small ranges at once, neighbours together."""
        runs: list[tuple[int, int]] = []
        for start, length in sorted(ranges):
            end = min(start + length, self.size)
            if self._kept(start, length) is not None or start >= end:
                continue
            if runs and start - runs[-1][1] <= _GAP:
                runs[-1] = runs[-1][0], max(runs[-1][1], end)
            else:
                runs.append((start, end))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for (start, _), data in zip(runs, pool.map(self._get, runs), strict=True):
                self._keep(start, data)

    def check_unchanged(self) -> None:
        if self.version() != self._identity:
            raise self.changed()
        with ThreadPoolExecutor(_AT_ONCE // 4) as pool:
            for _ in pool.map(self._get, list(self._sums or ())):  # what nothing tells the version of is read twice
                pass

    def _get(self, run: tuple[int, int]) -> bytes:
        data = self.fetch(*run)
        is_same = self._sums is None or self._sums.setdefault(run, found := crc32(data)) == found
        if len(data) < run[1] - run[0] or not is_same:
            raise self.changed()
        return data

    def _keep(self, start: int, data: bytes) -> bytes:
        self._held += len(data)
        if self._held > 4 * _MOST:
            self._blocks, self._held = [], len(data)
        insort(self._blocks, (start, data), key=_start)
        return data

    def _kept(self, offset: int, length: int) -> bytes | None:
        at = bisect_right(self._blocks, offset, key=_start)
        start, data = self._blocks[at - 1] if at else (offset, b"")
        return data[offset - start : offset - start + length] if offset + length <= start + len(data) else None


def _start(block: tuple[int, bytes]) -> int:
    return block[0]


# --- an object of an HTTP server


def _is_private(url: str) -> bool:
    """Whether a host is of this machine or its network; one that cannot be found is reported by whoever connects to it."""
    place = urllib.parse.unquote(urllib.parse.urlsplit(url).netloc)  # urllib connects to `127%2e0%2e0%2e1` too
    host = urllib.parse.urlsplit(f"//{place}").hostname
    try:
        found = socket.getaddrinfo(host or "", None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(row[4][0]).partition("%")[0]).is_global for row in found)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects from an address: within HTTP, never away from encryption, nor into a private network."""

    def __init__(self, url: str) -> None:
        self.url = url

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()  # what it says beside where to go may have no end
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith(_HTTP[1:] if self.url.startswith("https://") else _HTTP):
            raise _unreadable(self.url, f"It redirects to another scheme: {newurl[:200]}.")
        if _is_private(newurl) and not _is_private(self.url):
            raise _unreadable(self.url, f"It redirects into a private network: {newurl[:200]}.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _HttpSource(RemoteSource):
    """An object of an HTTP server, by range requests; of a server without ranges a small one, all of it at once."""

    def __init__(self, url: str) -> None:
        self.url = self.place = url
        self.whole: bytes | None = None
        self.known: tuple[Any, ...] = (0,)  # the size, ETag and date that all answers have said
        first = self.fetch(0, _NEAR)
        super().__init__(url, self.known, first)

    def version(self) -> tuple[Any, ...]:
        if self.size and self.whole is None:
            self.fetch(0, 1)
        return self.known

    def fetch(self, start: int, end: int) -> bytes:
        if self.whole is not None:
            return self.whole[start:end]
        return _bounded(self.url, lambda: self._tried(start, end), 2 * _SECONDS + (end - start) / _SLOWEST)

    def _tried(self, start: int, end: int) -> bytes:
        for left in reversed(range(_TRIES)):
            try:
                return self._request(start, end)
            except CkptError:
                raise
            except ValueError as error:  # not an address, a host that has no name, a size that is no number
                raise _unreadable(self.url, f"{error}.") from None
            except (OSError, HTTPException) as error:
                code, why = 0, f"{getattr(error, 'reason', None) or error or type(error).__name__}."
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    code, why = error.code, f"The server answers {error.code} {' '.join(str(error.reason).split())}."
                if code == 416 and not start:  # an empty file has no range
                    self.whole = b""
                    return b""
                moved, self.place = self.place != self.url, self.url  # a signed address behind a redirect runs out
                if not left or not (code in (0, 429) or code >= 500 or moved):
                    kind = MissingFileError if code in (404, 410) else RemoteError
                    raise kind(f"{self.url} cannot be read.", why=why) from None
            time.sleep(0.5 * (_TRIES - left))
        raise AssertionError

    def _request(self, start: int, end: int) -> bytes:
        headers = {
            "Range": f"bytes={start}-{end - 1}",
            "User-Agent": f"ckpt-tools/{__version__}",
            "Accept-Encoding": "identity",
        }
        place = urllib.parse.quote(self.place, safe=_AS_THEY_ARE, errors="surrogateescape")  # an `é` as a browser sends it
        request = urllib.request.Request(place, headers=headers)  # noqa: S310  http and https only, see _open
        with urllib.request.build_opener(_Redirects(self.url)).open(request, timeout=_SECONDS) as response:
            self.place = self.place if response.geturl() == request.full_url else response.geturl()
            if response.status != 206:  # a server without ranges, which sends all of it
                length = int(response.headers.get("Content-Length") or -1)
                if not 0 <= length <= _TAKEN_WHOLE:
                    what = f"{self.url} cannot be read in parts: the server ignores range requests."
                    raise RemoteError(what, fix="Download it, and name the local file.")
                self.whole = self._taken(response, length, length)
                return self.whole[start:end]
            span, _, size = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
            if not span.startswith(f"{start}-"):
                raise _unreadable(self.url, "The server does not say which range it sent.")
            return self._taken(response, int(size), min(end, int(size)) - start)

    def _taken(self, response: Any, size: int, length: int) -> bytes:
        version = (size, response.headers.get("ETag"), response.headers.get("Last-Modified"))
        if not 0 <= size < 1 << 62 or (len(self.known) > 1 and version != self.known):
            raise _unreadable(self.url, "The file on the server changed while it was read, or has an impossible size.")
        self.known = version
        data = bytes(response.read(length))
        if len(data) != length:
            raise HTTPException("The connection was closed early")
        return data


# --- a file or a folder of any file system that fsspec has a driver for


class _Place:
    """Where an address leads in a file system that fsspec has a driver for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.name = _bounded(url, self._made)

    def _made(self) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs

            return cast("tuple[Any, str]", url_to_fs(self.url))
        except ImportError as error:
            why = f"{error}."
            raise RemoteError(f"{self.url} needs fsspec, or a driver of it, which is not installed.", why=why) from None
        except ValueError as error:
            what = f"{self.url}: {self.url.partition('://')[0]}:// is not a scheme that fsspec knows."
            raise RemoteError(what, why=f"{error}."[:300]) from None

    def ask(self, method: str, *given: Any, **named: Any) -> Any:
        """What a method of the driver gives for this place."""
        return _bounded(self.url, lambda: getattr(self.fs, method)(self.name, *given, **named))

    def names(self) -> list[str]:
        """The names in a folder; none where there is no such folder."""
        self.fs.invalidate_cache()
        try:
            found = [str(row).rstrip("/") for row in self.ask("ls", detail=False)]
        except MissingFileError:
            return []
        # an empty object marks the folder, on a store without folders
        return [name.rpartition("/")[2] for name in found if name != self.name.rstrip("/")]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                self.fs.rm_file(name)


class _FsspecSource(RemoteSource):
    def __init__(self, url: str) -> None:
        self.place = _Place(url)
        super().__init__(url, self.version())

    def fetch(self, start: int, end: int) -> bytes:
        return bytes(self.place.ask("cat_file", start=start, end=end))

    def version(self) -> tuple[Any, ...]:
        self.place.fs.invalidate_cache()
        info = self.place.ask("info")
        return info.get("size"), *(str(info[key]) for key in ("ETag", "etag", "mtime", "created") if info.get(key))


def _open(url: str) -> RemoteSource:
    return _HttpSource(url) if url.startswith(_HTTP) else _FsspecSource(url)


def open_remote(url: str) -> Source:
    """A remote file as a source, or a remote folder as the files of one."""
    if not url.startswith(_HTTP) and _Place(url).ask("info").get("type") == "directory":
        folder = url.rstrip("/")
        place = cast("Path", Address(folder))
        return Files(place, place, lambda name: _open(f"{folder}/{name}"), lambda: _Place(folder).names())
    return _open(url)


def files_beside(source: Source) -> Files:
    address = cast("Address", source.path)

    def names() -> list[str]:
        folder = address.beside("")
        return [] if folder.startswith(_HTTP) else _Place(folder.rstrip("/")).names()  # HTTP has no listing

    return Files(source.path, source.path, lambda name: _open(address.beside(name)), names)


# --- writing


def _writable(url: str) -> _Place:
    if url.startswith(_HTTP):
        raise OutputError(f"{url} cannot be written: HTTP has no upload that all servers share.", fix="Write a local file.")
    return _Place(url)


def check_upload(url: str, *, overwrite: bool) -> _Place:
    """Where an output goes, after what can be checked before work starts."""
    place = _writable(url)
    if place.ask("isdir"):
        raise OutputError(f"{url} is a directory.", fix="Name a file in it.")
    if not overwrite and place.ask("exists"):
        raise exists_error(url)
    return place


@contextlib.contextmanager
def uploading(url: str, *, overwrite: bool) -> Iterator[Output]:
    """An output in a temporary file of this machine, which is uploaded when the block ends well."""
    place = check_upload(url, overwrite=overwrite)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "whole")
        with replacing(path) as output:
            yield Output(output.fd, cast("Path", Address(url)), output.path)
        _upload(place, path)


def _upload(place: _Place, path: Path, name: str = "") -> None:
    """Put a local file there, whole or not at all: under another name first, where it is seen before it is complete."""
    seconds, name = 2 * _SECONDS + path.stat().st_size / _SLOWEST, f"{place.name}/{name}" if name else place.name
    folder, slash, last = name.rpartition("/")
    hidden = f"{folder}{slash}{temporaries.new_name(temporaries.prefix_of(last))}"
    if place.url.startswith(_WHOLE_ON_COMMIT):
        _bounded(place.url, lambda: place.fs.put_file(str(path), name), seconds)
        return
    try:
        _bounded(place.url, lambda: place.fs.put_file(str(path), hidden), seconds)
        _bounded(place.url, lambda: place.fs.mv(hidden, name), seconds)
    except BaseException:
        place.remove([hidden])
        raise


def check_new_folder(url: str) -> _Place:
    """Refuse a remote folder that cannot be written, or that holds something: files there do not change all at once."""
    place = _writable(url.rstrip("/"))
    if place.ask("isfile"):
        raise OutputError(f"{url} is a file.", why="Several files are written here: OUT must be a folder.")
    if place.names():
        raise OutputExistsError(f"{url} is not empty, and several files cannot change at once there.", fix="Name a new folder.")
    return place


@contextlib.contextmanager
def uploading_folder(url: str, *, last: str) -> Iterator[Staging]:
    """A folder of this machine that is uploaded when the block ends well, the index last; nothing stays when that fails."""
    place = check_new_folder(url)
    with tempfile.TemporaryDirectory() as folder:
        yield Staging(Path(folder), cast("Path", Address(place.url)))
        names = sorted(os.listdir(folder), key=lambda name: (name == last, name))
        is_new = not place.url.startswith(_WHOLE_ON_COMMIT) and not place.ask("isdir")  # a store has no folders
        try:
            if is_new:
                place.ask("makedirs", exist_ok=True)
            for name in names:
                _upload(place, Path(folder, name), name)
        except BaseException:
            place.remove([f"{place.name}/{name}" for name in names])
            if is_new:
                with contextlib.suppress(Exception):
                    place.fs.rmdir(place.name)
            raise
