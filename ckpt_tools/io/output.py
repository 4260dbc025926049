"""Files as this project touches them: a source that is read by position, and an output that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ckpt_tools.errors import (
    ChangedFileError,
    CkptError,
    ConvertError,
    MissingFileError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
)
from ckpt_tools.io.member_paths import Handed

if TYPE_CHECKING:
    from ckpt_tools.io.temporaries import Inputs

_BINARY: int = getattr(os, "O_BINARY", 0)
_RESERVE = 0x40305828  # FS_IOC_RESVSP of linux/falloc.h; where it is another number the call fails
_SPACE = struct.Struct("hhqqiI4i")  # struct space_resv: type, whence, start, length, four fields that are not read
_RESERVE_FROM = 4 << 20  # bytes
_BLOCK = 4 << 20

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether this means something remote: text with a scheme (`s3://...`), and nothing local is called so."""
    text = os.fspath(path)
    return isinstance(text, str) and _ADDRESS.match(text) is not None and not os.path.lexists(os.path.dirname(text))


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


@dataclass(slots=True, eq=False, repr=False)
class Output:
    """The temporary file of `replacing`, which closes `fd`; `path` is where it is until then."""

    fd: int
    target: Path
    path: Path | None = None


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, overwrite: bool = False, durable: bool = False, inputs: Inputs = ()
) -> Iterator[Output]:
    """A temporary file beside `path` that takes its name when the block ends well, and vanishes when it does not."""
    if isinstance(path, Handed):
        with _handing_back(path) as output:
            yield output
        return
    from ckpt_tools.io import temporaries

    with output_errors(Path(path)):
        place = Path(os.path.realpath(path))
        prefix = temporaries.prefix_of(place.name)
        temporaries.remove_orphans(place.parent, prefix)
    target = output_target(path, overwrite=overwrite)
    before = None  # what tells an output that is one of its own inputs from a newer file under its name
    for given in inputs:
        with contextlib.suppress(OSError, ValueError):  # an address, a callable's name, an output that is new
            if os.path.samefile(given, target):
                before = identity_of(os.stat(target))
    with contextlib.ExitStack() as stack:
        with output_errors(target):
            temporary, fd = stack.enter_context(temporaries.temporary(target.parent, prefix))
            if replaces := target.exists():
                temporaries.keep(target, fd)
            else:
                temporaries.narrow(fd, inputs)
        yield Output(fd, target, temporary)
        with output_errors(target):
            if durable or replaces:
                os.fsync(fd)
            os.close(os.dup(fd))  # some file systems say only now that a write has failed
            if before is not None and identity_of(os.stat(target)) != before:
                why = "Another program has put a newer file there, which stays."
                raise ChangedFileError(f"{target} was replaced while it was read.", why=why, fix="Run this again.")
            _commit(temporary, target, overwrite=overwrite)  # still locked: no process may take it for an orphan
            if durable or replaces:
                temporaries.sync_folder(target.parent)


@contextlib.contextmanager
def _handing_back(path: Handed) -> Iterator[Output]:
    """An output that is written to an open file once all of it is there."""
    import tempfile  # few commands need it

    target = _checked_open(path)
    with tempfile.TemporaryFile() as spool:
        yield Output(spool.fileno(), target)
        spool.seek(0)
        with output_errors(target):
            while left := memoryview(spool.read(_BLOCK)):
                while left:  # a raw file may take a part of what it is given; one that would block says None
                    taken = path.file.write(left)
                    if taken is None and isinstance(path.file, io.RawIOBase):
                        raise OutputError(f"{path} takes no more: it is open without blocking.")
                    left = left[len(left) if taken is None else taken :]
            getattr(path.file, "flush", lambda: None)()


def _checked_open(path: Handed) -> Path:
    if getattr(path.file, "closed", False) is True:
        raise OutputError(f"{path} cannot be written.", why="It is closed.")
    if hasattr(path.file, "encoding") or not hasattr(path.file, "write") or not getattr(path.file, "writable", lambda: True)():
        raise OutputError(f"{path} is open as text, or not for writing.", fix='Open it with mode "wb".')
    return cast("Path", path)


def write_all(fd: int, left: memoryview) -> None:
    while len(left):
        left = left[os.write(fd, left) :]


def output_target(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Where an output really goes (links followed), after every check that can be made before work starts."""
    if isinstance(path, Handed):
        return _checked_open(path)
    if is_address(path):
        raise OutputError(
            f"{path} cannot be written.", why="Only what ckpt convert and average write goes to addresses.",
            fix="Write a local file, and copy it.",
        )  # fmt: skip
    with output_errors(Path(path)):
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise OutputError(f"{path} is a directory.", fix="Name a file in it.", errno=errno.EISDIR)
        if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout leads to a pipe, which has no path to follow
            raise OutputError(f"{path} is not a regular file.", why="An output is written under another name and then renamed.")
        if target.exists() and not overwrite:
            raise exists_error(target)
        check_writable(path, target.parent)
        return target


def check_writable(path: str | os.PathLike[str], folder: Path) -> None:
    what = f"{path} cannot be written."
    if not folder.is_dir():
        raise OutputError(what, why=f"There is no folder {folder}.", fix="Make the folder first.", errno=errno.ENOENT)
    if not os.access(folder, os.W_OK):
        raise OutputError(what, why=f"The folder {folder} is read-only.", fix="Name another folder.", errno=errno.EACCES)


def exists_error(target: object) -> OutputExistsError:
    return OutputExistsError(f"{target} already exists.", fix="Give `overwrite=True` to replace it.")


def not_empty(folder: object) -> OutputExistsError:
    fix = "Give `overwrite=True` to replace the checkpoint in it; its other files stay."
    return OutputExistsError(f"{folder} already exists and is not empty.", fix=fix)


@contextlib.contextmanager
def output_errors(target: Path) -> Iterator[None]:
    """What the system says against writing a target, as our error."""
    try:
        yield
    except CkptError:  # some of ours are an OSError too
        raise
    except OSError as error:
        raise output_error(target, error) from None
    except ValueError as error:  # a path with a NUL in it
        raise OutputError(f"{target} cannot be written.", why=f"{error}.") from None


def output_error(target: Path, error: OSError, needed: int = 0) -> OutputError:
    """An OSError of the output as ours; for a full disk with what was needed and what there is."""
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", -1), errno.EFBIG):
        return no_space(target, needed)
    return OutputError(f"{target} cannot be written.", why=f"{error.strerror or error}.", errno=error.errno)


def no_space(target: Path, needed: int) -> OutputError:
    free = free_bytes(target.parent)
    needs = f"It needs {needed} bytes." if needed else ""
    has = "" if free is None else f"The disk has {free} bytes left."
    what, fix = f"{target} cannot be written: no space.", "Make room, or write to another disk."
    return OutputError(what, why=f"{needs} {has}".strip(), fix=fix, errno=errno.ENOSPC)


def check_space(folder: Path, target: Path, size: int, *, fd: int | None = None, written: int = 0) -> None:
    """Raise the error for a full disk when it is known that `folder` has no room for `size` bytes, in a file that has some."""
    free = free_bytes(folder)  # first: what a clone takes from now on is counted twice, and never called missing
    allocated = 0 if fd is None else getattr(os.fstat(fd), "st_blocks", 0) * 512
    if free is not None and free + max(written, allocated) < size:
        raise no_space(target, size)


def reserve(fd: int, size: int) -> None:
    """Have the blocks of a file allocated before its bytes come, where that makes writing faster: ext4, xfs."""
    with contextlib.suppress(ImportError, OSError):
        from fcntl import ioctl

        if size >= _RESERVE_FROM and os.major(os.fstat(fd).st_dev):
            ioctl(fd, _RESERVE, _SPACE.pack(0, os.SEEK_SET, 0, size, 0, 0, 0, 0, 0, 0))


def free_bytes(folder: Path) -> int | None:
    """Bytes that may still be written to the disk of `folder`, or None where the system does not tell."""
    try:
        status = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return status.f_bavail * status.f_frsize


def _commit(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Give the temporary its name. Without `overwrite` by a hard link, which fails when the name is taken meanwhile."""
    try:
        if not overwrite:
            os.link(temporary, target)
            return
    except OSError:  # it is taken, or a file system without hard links (FAT, some network ones)
        if target.exists():
            raise exists_error(target) from None
    os.replace(temporary, target)
