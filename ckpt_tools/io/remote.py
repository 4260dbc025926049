"""Something remote as a source: the directory, the pickle or the header, and then the tensors that are wanted."""

from __future__ import annotations

import bisect
import ipaddress
import queue
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar, cast

from ckpt_tools._version import __version__
from ckpt_tools.errors import CkptError, MissingFileError, RemoteError
from ckpt_tools.io.content import crc32
from ckpt_tools.io.member_paths import Address
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files

SECONDS = 60
_T = TypeVar("_T")


class ForeignError(RemoteError):
    """An error of a driver, kept."""

    def __init__(self, url: str, error: BaseException) -> None:
        super().__init__(f"{url} cannot be reached.", why=f"{type(error).__name__}: {error}"[:300])
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: without what the driver raised, which need not be known there."""
        return RemoteError, (self.what,), {"what": self.what, "why": self.why, "fix": self.fix}


def bounded(url: str, call: Callable[[], _T], seconds: float = SECONDS) -> _T:
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
    if error is None:
        return cast("_T", value)
    if isinstance(error, CkptError):
        raise error
    if isinstance(error, FileNotFoundError):
        raise MissingFileError(f"{url} cannot be reached.", why="There is no such file.") from None
    raise ForeignError(url, error) from None


def _unreadable(url: str, why: str) -> RemoteError:
    return RemoteError(f"{url} cannot be read.", why=why)


# --- an object of an HTTP server, by range requests


_FIRST = 64 << 10  # bytes of the first request, which also tells the size
_TRIES = 3
_SLOWEST = 16 << 10  # bytes a second
_LONGEST_HEADERS = 256 << 10
_TAKEN_WHOLE = 16 << 20  # from a server without ranges
_AS_THEY_ARE = "%/:?#[]@!$&'()*+,;=~-._"
_MISSING = {404, 410}


def _in_ascii(url: str) -> str:
    """An address as HTTP sends it: an `é` in a path or a host is what a browser makes of it."""
    scheme, rest = url.split("://", 1)
    host, slash, path = rest.partition("/")
    name = host if host.isascii() else host.encode("idna").decode()
    return f"{scheme}://{name}{slash}{urllib.parse.quote(path, safe=_AS_THEY_ARE, errors='surrogateescape')}"


def _is_number(text: str) -> bool:
    """Whether a header's text is a number of bytes that a file can have."""
    return text.isascii() and text.isdecimal() and len(text) < 20


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to HTTP's own schemes, never away from encryption, never from a public into a private network."""

    def __init__(self, url: str) -> None:
        self.url = url

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self.check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, _in_ascii(newurl))

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """The answer is closed also where it leads nowhere."""
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except urllib.error.HTTPError:  # it has the answer, and closes it
            raise
        except BaseException:
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def check(self, newurl: str) -> None:
        """Refuse a place that is not to be followed to."""
        if not newurl.startswith(("https://",) if self.url.startswith("https://") else ("https://", "http://")):
            raise _unreadable(self.url, f"It redirects to another scheme: {newurl[:200]}.")
        if _is_private(newurl) and not _is_private(self.url):
            raise _unreadable(self.url, f"It redirects into a private network: {newurl[:200]}.")


def _is_private(url: str) -> bool:
    """Whether a host is of this machine or its network; one that cannot be found is reported by whoever connects to it."""
    try:
        found = socket.getaddrinfo(urllib.parse.urlsplit(_in_ascii(url)).hostname or "", None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(row[4][0]).partition("%")[0]).is_global for row in found)


class _Lines:
    """An answer's bytes as lines, which together are no longer than headers are."""

    def __init__(self, file: Any) -> None:
        self.file, self.left = file, _LONGEST_HEADERS

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self.file.readline(limit)
        self.left -= len(line)
        if self.left < 0:
            raise HTTPException("The headers of its answer are longer than any")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Response(HTTPResponse):
    """An answer whose headers are bounded: Python reads a hundred of 64 KiB each, in memory several times as large."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp = cast("Any", _Lines(self.fp))


class _Http(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Connections with such answers."""

    def do_open(self, http_class: Any, req: Any, **http_conn_args: Any) -> Any:
        bounded_class: Any = type(http_class.__name__, (http_class,), {"response_class": _Response})
        return super().do_open(bounded_class, req, **http_conn_args)


class HttpObject:
    """An object of an HTTP server, by range requests."""

    def __init__(self, url: str) -> None:
        self.url = self.place = url
        self.whole: bytes | None = None
        self.size = 0
        self._version: tuple[Any, ...] = ()
        self.first = self.fetch(0, _FIRST)

    def fetch(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, by one request; three tries."""
        if self.whole is not None:
            return self.whole[start:end]
        return bounded(self.url, lambda: self._tried(start, end), 2 * SECONDS + (end - start) / _SLOWEST)

    def _tried(self, start: int, end: int) -> bytes:
        for left in reversed(range(_TRIES)):
            try:
                return self._request(start, end)
            except urllib.error.HTTPError as error:
                with error:
                    self._check_refusal(error, start, left)
                if self.whole is not None:
                    return self.whole
            except CkptError:
                raise
            except ValueError as error:  # not an address, a host that has no name
                raise _unreadable(self.url, f"{error}.") from None
            except (OSError, HTTPException) as error:
                if not left:
                    raise _unreadable(self.url, f"{getattr(error, 'reason', None) or error or type(error).__name__}.") from None
            time.sleep(0.5 * (_TRIES - left))
        raise AssertionError

    def _check_refusal(self, error: urllib.error.HTTPError, start: int, left: int) -> None:
        """What an answer that is not the bytes means: an empty file, an error, or nothing yet where another try may help."""
        if error.code == 416 and not start:  # an empty file has no range
            self.whole = b""
            return
        moved, self.place = self.place != self.url, self.url  # a signed address behind a redirect runs out
        if not left or not (error.code >= 500 or error.code == 429 or moved):
            kind = MissingFileError if error.code in _MISSING else RemoteError
            raise kind(f"{self.url} cannot be read.", why=f"The server answers {error.code} {error.reason}.") from None

    def _request(self, start: int, end: int) -> bytes:
        headers = {
            "Range": f"bytes={start}-{end - 1}",
            "User-Agent": f"ckpt-tools/{__version__}",
            "Accept-Encoding": "identity",
        }
        request = urllib.request.Request(_in_ascii(self.place), headers=headers)  # noqa: S310  http and https only, see open_remote
        with urllib.request.build_opener(_Http, _Redirects(self.url)).open(request, timeout=SECONDS) as response:
            if response.status != 206:
                return self._take_whole(response, start, end)
            self.place = response.geturl()
            span, _, size = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
            if not _is_number(size) or not span.startswith(f"{start}-"):
                raise _unreadable(self.url, "The server does not say which range it sent.")
            self._note(int(size), response.headers)
            data = bytes(response.read(end - start))
            if len(data) != min(end, self.size) - start:
                raise HTTPException("The connection was closed early")
            return data

    def _note(self, size: int, headers: Any) -> None:
        version = (size, headers.get("ETag"), headers.get("Last-Modified"))
        if not self._version:
            self.size, self._version = size, version
        elif version != self._version:
            raise _unreadable(self.url, "The file on the server changed while it was read.")

    def _take_whole(self, response: Any, start: int, end: int) -> bytes:
        """A server that ignores ranges sends all of it: fine for a small file."""
        length = response.headers.get("Content-Length", "")
        if not _is_number(length) or int(length) > _TAKEN_WHOLE:
            size = f"{length} bytes" if _is_number(length) else "a file of unknown size"
            raise RemoteError(
                f"{self.url} cannot be read in parts: the server ignores range requests.",
                why=f"Every read would download {size}; files of up to {_TAKEN_WHOLE} bytes are downloaded whole.",
                fix="Download it, and name the local file.",
            )
        whole = bytes(response.read(_TAKEN_WHOLE + 1))
        if len(whole) != int(length):
            raise HTTPException("The connection was closed early")
        self._note(len(whole), response.headers)
        self.whole = whole
        return whole[start:end]

    def version(self) -> tuple[Any, ...]:
        """Size, ETag and date as the server says now."""
        if self.size and self.whole is None:
            self.fetch(0, 1)
        return self._version


# --- a file or a folder of any file system that fsspec has a driver for


class FsspecObject:
    """A file or folder of any file system that fsspec has a driver for."""

    first = b""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.name = file_system(url)
        self.info = bounded(url, lambda: self.fs.info(self.name))
        self.size = int(self.info.get("size") or 0)

    def names(self) -> list[str]:
        """The names of the files in the folder."""
        found = bounded(self.url, lambda: self.fs.ls(self.name, detail=False))
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]

    def fetch(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""
        return bytes(bounded(self.url, lambda: self.fs.cat_file(self.name, start=start, end=end)))

    def version(self) -> tuple[Any, ...]:
        """Size and what the file system calls a version."""
        self.fs.invalidate_cache()
        info = bounded(self.url, lambda: self.fs.info(self.name))
        return info.get("size"), *(str(info[key]) for key in ("ETag", "etag", "mtime", "created") if info.get(key))


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path in it."""
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
            what = f"{url}: {url.partition('://')[0]}:// is not a scheme that fsspec knows."
            raise RemoteError(what, why=f"{error.error}."[:300]) from None
        raise
    return fs, str(name)


# --- either as a source


_NEAR, _FAR, MOST = _FIRST, 4 << 10, 8 << 20  # bytes fetched at least: at the ends, elsewhere, and at most when read in order
_KEPT = 16  # blocks
_GAP = 4 << 10  # ranges nearer than this are fetched in one
_AT_ONCE = 16
_READ_AGAIN = 4


class RemoteSource(Source):
    """A remote object as a source: ranges are fetched when they are read, ahead where the reading goes on in order."""

    def __init__(self, url: str, remote: HttpObject | FsspecObject | None = None) -> None:
        self.path = cast("Path", Address(url))
        self._remote = remote or (HttpObject(url) if _is_http(url) else FsspecObject(url))
        self.size = self._remote.size
        self._fd, self._identity = -1, self._remote.version()
        self._sums: dict[tuple[int, int], int] | None = None if any(self._identity[1:]) else {}
        self._blocks = OrderedDict({0: self._checked(0, self._remote.first)} if self._remote.first else {})
        self._ready: dict[int, bytes] = {}  # what was fetched before it is read
        self._starts: list[int] = []
        self._expected, self._ahead = 0, _NEAR

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        if not length:  # beyond the end there are that many too
            return b""
        if offset + length > self.size:
            raise self.changed()
        found = self._kept(offset, length)
        if found is None:
            found = self._fetched(offset, length)
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
            self._ready.update(zip((run[0] for run in runs), pool.map(lambda run: self._get(*run), runs), strict=True))
        self._starts = sorted(self._ready)

    def check_unchanged(self) -> None:
        """Raise ChangedFileError when the object is another than when it was opened."""
        if self._remote.version() != self._identity:
            raise self.changed()
        with ThreadPoolExecutor(_READ_AGAIN) as pool:  # what nothing tells the version of is read twice
            for _ in pool.map(lambda span: self._get(*span), self._sums or ()):
                pass

    def _get(self, start: int, end: int) -> bytes:
        return self._checked(start, self._remote.fetch(start, end))

    def _checked(self, start: int, data: bytes) -> bytes:
        """Where nothing tells one version from another, the checksum of what was read does."""
        if self._sums is not None and self._sums.setdefault((start, start + len(data)), found := crc32(data)) != found:
            raise self.changed()
        return data

    def _kept(self, offset: int, length: int) -> bytes | None:
        at = bisect.bisect_right(self._starts, offset) - 1
        ready = [(self._starts[at], self._ready[self._starts[at]])] if at >= 0 else []
        for start, data in (*self._blocks.items(), *ready):
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return None

    def _fetched(self, offset: int, length: int) -> bytes:
        if offset == self._expected and offset:
            self._ahead = min(2 * self._ahead, MOST)
        else:
            self._ahead = _NEAR if offset < _NEAR or self.size - offset <= 2 * _NEAR else _FAR
        data = self._get(offset, min(self.size, offset + max(length, self._ahead)))
        if len(data) < length:
            raise self.changed()
        self._blocks[offset] = data
        while len(self._blocks) > _KEPT or (sum(map(len, self._blocks.values())) > 4 * MOST and len(self._blocks) > 1):
            self._blocks.popitem(last=False)
        return data[:length]


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def open_remote(url: str) -> Source:
    """A remote file as a source, or a remote folder as the files of one."""
    if _is_http(url):
        return RemoteSource(url)
    remote = FsspecObject(url)
    if remote.info.get("type") != "directory":
        return RemoteSource(url, remote)
    folder = url.rstrip("/")
    place = cast("Path", Address(folder))
    return Files(place, place, lambda name: RemoteSource(f"{folder}/{name}"), remote.names)


def files_beside(source: RemoteSource) -> Files:
    """The files in the folder of a remote index."""
    address = cast("Address", source.path)

    def names() -> list[str]:
        folder = address.beside("")
        return [] if _is_http(folder) else FsspecObject(folder).names()  # HTTP has no listing

    return Files(source.path, source.path, lambda name: RemoteSource(address.beside(name)), names)
