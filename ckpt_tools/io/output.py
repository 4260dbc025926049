"""What is written: a file or a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ckpt_tools.errors import ChangedFileError, CkptError, OutputError, OutputExistsError, UsageError
from ckpt_tools.io import temporaries
from ckpt_tools.io.source import Handed, identity_of, is_address
from ckpt_tools.io.temporaries import Inputs

_RESERVE = 0x40305828  # FS_IOC_RESVSP of linux/falloc.h; where it is another number the call fails
_SPACE = struct.Struct("hhqqiI4i")  # struct space_resv: type, whence, start, length, four fields that are not read
_RESERVE_FROM = 4 << 20  # bytes
_BLOCK = 4 << 20


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
    import shutil  # few commands need these
    import tempfile

    target = _checked_open(path)
    with tempfile.TemporaryFile() as spool:
        yield Output(spool.fileno(), target)
        spool.seek(0)
        with output_errors(target):
            shutil.copyfileobj(spool, path.file, _BLOCK)
            getattr(path.file, "flush", lambda: None)()


def _checked_open(path: Handed) -> Path:
    if getattr(path.file, "closed", False) is True:
        raise OutputError(f"{path} cannot be written.", why="It is closed.")
    if hasattr(path.file, "encoding") or not hasattr(path.file, "write") or not getattr(path.file, "writable", lambda: True)():
        raise OutputError(f"{path} is open as text, or not for writing.", fix='Open it with mode "wb".')
    if isinstance(path.file, io.RawIOBase):  # which may take a part of what it is given
        raise OutputError(f"{path} is open without a buffer.", fix='Open it with mode "wb", and without buffering=0.')
    return cast("Path", path)


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
        if target.exists() and not overwrite:  # perhaps of a run that was killed at its very end
            temporaries.remove_orphans(target.parent, temporaries.prefix_of(target.name))
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


# --- a folder: its files appear all together, or not at all


@dataclass(frozen=True, slots=True)
class Staging:
    """A temporary folder until all files are there: write them into `path`. Each process of a job has one for it."""

    path: Path
    target: Path
    inputs: tuple[str | os.PathLike[str], ...] = ()

    def output(self, name: str) -> AbstractContextManager[Output]:
        return replacing(self.path / name, inputs=self.inputs)

    def sizes(self) -> dict[str, int]:
        with output_errors(self.target), os.scandir(self.path) as rows:
            return {row.name: row.stat().st_size for row in rows if row.is_file()}

    def check_space(self, size: int) -> None:
        check_space(self.path, self.target, size)

    def check_seen(self, rank: int) -> None:
        """Raise OutputError when this process does not see the folder that the first one made."""
        if not self.path.is_dir():
            raise OutputError(
                f"Process {rank} of the job does not see {self.path}.", fix="Name a folder that all machines share."
            )


def check_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Where a local output folder really goes (links followed), after every check that can be made before work starts."""
    if isinstance(path, Handed):
        raise UsageError(f"{path} is an open file, and a folder is to be written.", fix="Name the folder.")
    with output_errors(Path(path)):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_dir():
            raise OutputError(f"{path} is a file.", why="Several files are written here: OUT must be a folder.")
        check_writable(path, target if target.is_dir() else target.parent)
        if target.is_dir() and not overwrite and any(target.iterdir()):
            fix = "Give `overwrite=True` to replace the checkpoint in it; its other files stay."
            raise OutputExistsError(f"{path} already exists and is not empty.", fix=fix)
        return target


@contextlib.contextmanager
def replacing_folder(
    path: str | os.PathLike[str],
    *,
    last: str,
    stale: re.Pattern[str],
    overwrite: bool = False,
    durable: bool = False,
    inputs: tuple[str | os.PathLike[str], ...] = (),
) -> Iterator[Staging]:
    """A temporary folder whose files take their places when the block ends well, and which vanishes when it does not."""
    target = check_folder(path, overwrite=overwrite)
    existing = target.is_dir() and any(target.iterdir())
    holder, prefix = (target, ".") if existing else (target.parent, temporaries.prefix_of(target.name))
    temporaries.remove_orphans(holder, prefix, folders=True)
    with contextlib.ExitStack() as stack:
        with output_errors(target):
            temporary, _ = stack.enter_context(temporaries.temporary(holder, prefix, folder=True))
        yield Staging(temporary, target, inputs)
        with output_errors(target):
            names = sorted(os.listdir(temporary), key=lambda name: (name == last, name))
            if durable or existing:
                for name in names:
                    temporaries.sync(temporary / name, os.O_RDWR)
            if existing:
                _move_in(temporary, target, names, last, stale)
            else:
                if target.is_dir():  # one rename; a folder that has been filled meanwhile refuses
                    target.rmdir()
                os.rename(temporary, target)
            if durable or existing:
                temporaries.sync_folder(target)
                temporaries.sync_folder(target.parent)


def _move_in(temporary: Path, target: Path, names: Sequence[str], last: str, stale: re.Pattern[str]) -> None:
    old = [name for name in os.listdir(target) if stale.fullmatch(name)]
    for name in names:
        if (target / name).is_dir():
            raise OutputError(f"{target / name} is a directory where a file of the checkpoint goes.")
        if (target / name).is_file():
            with (temporary / name).open("r+b") as file:
                temporaries.keep(target / name, file.fileno())
    (target / last).unlink(missing_ok=True)
    for name in names:
        os.replace(temporary / name, target / name)
    for name in set(old) - set(names):
        (target / name).unlink(missing_ok=True)
