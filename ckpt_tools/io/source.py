"""What is read: a file, by position; and what may stand where a path is expected.

That is a member of an archive (`model.tar.gz!run/model.pth`), an open file, or an address.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias

from ckpt_tools.errors import ChangedFileError, CkptError, ConvertError, DamagedFileError, MissingFileError, NotACheckpointError

_BINARY: int = getattr(os, "O_BINARY", 0)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
MARK = "!"
AnyPath: TypeAlias = str | os.PathLike[str]
File: TypeAlias = str | os.PathLike[str] | BinaryIO


class Source:
    """A file opened for reading by position (pread: a memory map of a file that shrinks kills the process)."""

    size: int
    _identity: object = None

    @cached_property
    def expected(self) -> dict[tuple[int, int], tuple[int, str, int]]:
        """Of ranges that are checked when they are read whole, by offset and length: the CRC-32, a name, and the CRC-32 of
        what it counts in before the range."""
        return {}

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = open_regular(self.path)
        try:
            status = self.status()
        except BaseException:
            self.close()
            raise
        self.size, self._identity = status.st_size, identity_of(status)

    @property
    def fd(self) -> int:
        """The descriptor that the kernel can copy from; -1 where there is none, and the bytes have to be read."""
        return self._fd

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; ChangedFileError when the file has become shorter."""
        data = self._pread(length, offset)
        while len(data) < length:
            more = self._pread(length - len(data), offset + len(data))
            if not more:
                raise self.changed()
            data += more
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if not hasattr(os, "preadv") or self.fd < 0:
            buffer[:] = self.read(offset, len(buffer))
            return
        while len(buffer):
            fd = self.fd  # opens a file that was closed meanwhile; that it is gone is an OSError too
            try:
                count = os.preadv(fd, [buffer], offset)
            except OSError as error:
                raise self._unreadable(error) from None
            if not count:
                raise self.changed()
            buffer, offset = buffer[count:], offset + count

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Get ready many small ranges (offset, length) that will be read; for sources where each read is a journey."""

    def check_unchanged(self) -> None:
        """Raise ChangedFileError when size or modification time differ from when the file was opened."""
        if identity_of(self.status()) != self._identity:
            raise self.changed()

    def status(self) -> os.stat_result:
        fd = self.fd
        try:
            return os.fstat(fd)
        except OSError as error:
            raise self._unreadable(error) from None

    def is_same(self, other: Source) -> bool:
        """Whether another source was opened on the same file in the same state."""
        return self._identity == other._identity

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written by it, so nothing can be lost
                os.close(fd)

    def _pread(self, length: int, offset: int) -> bytes:
        fd = self.fd
        try:
            if hasattr(os, "pread"):
                return os.pread(fd, length, offset)
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, length)
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> CkptError:
        if error.errno == errno.EFAULT:
            return ConvertError(f"{self.path} cannot be read into a tensor whose memory is read-only.")
        return NotACheckpointError(f"{self.path} cannot be read.", why=f"{error.strerror or error}.")

    def changed(self) -> ChangedFileError:
        """The error for a file that is no longer what it was."""
        return ChangedFileError(
            f"{self.path} changed while it was read.", fix="Wait until whoever writes it has finished, then run this again."
        )


def identity_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """What tells a file in one state from others, and from itself after a change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_regular(path: Path) -> int:
    """Open for reading; a directory, a FIFO or a dangling link is refused, and never waited for."""
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for ever. It means nothing for a regular file.
        fd = os.open(path, os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError) as error:
        if not os.path.exists(path) or os.path.isfile(path):  # Windows opens no directory, Linux no socket
            why = f"{getattr(error, 'strerror', None) or error}."
            raise NotACheckpointError(f"{path} cannot be read.", why=why) from None
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    what = "a directory" if os.path.isdir(path) else "not a regular file (a pipe, socket or device)"
    raise NotACheckpointError(f"{path} is {what}.", why="A checkpoint in torch-zip or safetensors is a single file.")


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether something is at a path; what may not be looked at counts: whoever opens it is told why."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


def leads_out(link: str | os.PathLike[str], top: str | os.PathLike[str]) -> bool:
    """Whether a link to a folder leads to where what is below a folder is not."""
    try:
        place, whole = os.path.realpath(link), os.path.realpath(top)
    except OSError:  # another user's `/proc/PID/cwd`, which may not be followed
        return True
    return place != whole and not place.startswith(os.path.join(whole, ""))


def missing(path: Path) -> MissingFileError:
    """The error for a path at which there is nothing, with the names beside it that are like its own."""
    why = "It is a link to a file that is not there." if os.path.islink(path) else "There is no such file."
    fix = "Without quotes, the shell puts the names of the files that match in its place." if "*" in path.name else ""
    with contextlib.suppress(OSError):
        from ckpt_tools.text import did_you_mean_file

        near = sorted(name for name in os.listdir(path.parent) if name != path.name)  # a dangling link is listed too
        fix = fix or did_you_mean_file(path.name, near)
    return MissingFileError(f"{path} cannot be read.", why=why, fix=fix)


# --- what may stand where a path is expected


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether this means something remote: text with a scheme (`s3://...`), and nothing local is called so."""
    text = os.fspath(path)
    return isinstance(text, str) and _ADDRESS.match(text) is not None and not os.path.lexists(os.path.dirname(text))


def archive_and_member(path: AnyPath) -> tuple[AnyPath, str]:
    """The path of an archive, and the member of it that a path names; "" where it names a file or a folder itself."""
    text = os.fspath(path)
    if not isinstance(text, str) or MARK not in text or os.path.lexists(text):
        return path, ""
    at = text.find(MARK)
    while at >= 0:
        if os.path.isfile(text[:at]):
            return text[:at], text[at + 1 :].rstrip("/")
        at = text.find(MARK, at + 1)
    return path, ""


class Handed(PurePosixPath):
    """An open file where a path is expected: it has a name, and no file of this machine is meant by it."""

    file: Any = None
    called: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handed) and other.file is self.file

    def __hash__(self) -> int:
        return id(self.file)


def is_open_file(value: object) -> bool:
    """Whether it is what `open` gives, or does as that does."""
    return not isinstance(value, os.PathLike) and (hasattr(value, "read") or hasattr(value, "write"))


def as_path(file: File) -> AnyPath:
    """A path as it is; an open file as what stands where a path is expected, named in brackets: no file is called so."""
    if isinstance(file, str | os.PathLike):
        return file
    called = getattr(file, "name", "")
    called = called if isinstance(called, str) else ""
    made = Handed(f"<{os.path.basename(called) or type(file).__name__}>")
    made.file, made.called = file, called
    return made


class Address(PurePosixPath):
    """An address where a path is expected: it has a name and a suffix, reads as it was given, and is not a local file."""

    def __new__(cls, url: str) -> Address:
        """Keeps the text: a path would make `https:/` of `https://`."""
        made = super().__new__(cls, url)
        made._url = url  # type: ignore[attr-defined]
        return made

    def __str__(self) -> str:
        return getattr(self, "_url", None) or super().__str__()  # its parent is made without

    def __fspath__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[type[Address], tuple[str]]:
        return Address, (str(self),)  # a path would be put together from its parts

    def beside(self, name: str) -> str:
        """The address of another file in its folder, whose name is not an address: `%` and `?` are letters of it."""
        import urllib.parse

        if any(mark in urllib.parse.unquote(name) for mark in ("/", "\\", "\0")) or urllib.parse.unquote(name) in (".", ".."):
            raise DamagedFileError(f"{self} names the file {name!r}, which is not a name inside its folder.")
        web = str(self).startswith(("http://", "https://"))
        return str(self).split("?")[0].rpartition("/")[0] + "/" + (urllib.parse.quote(name) if web else name)
