"""The temporary beside an output: named after it, locked while its writer lives, removed by the next one when it died.

A process that is killed cannot remove its temporary. The lock tells: the system releases it with the process, so a temporary
whose lock can be had belongs to no process. Where there are no locks (Windows, some network file systems) nothing is removed
but what the system itself says is not open.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ckpt_tools.io.source import archive_and_member

_BINARY: int = getattr(os, "O_BINARY", 0)
_CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
SUFFIX = ".ckpt-tmp"
_ENDING = re.compile(rf"[0-9a-f]{{12}}\{SUFFIX}")


def prefix_of(name: str) -> str:
    """How the temporaries of a target begin. 40 characters are 160 bytes at most: a name may have 255."""
    return f".{name[:40]}."


def new_name(prefix: str) -> str:
    return f"{prefix}{os.urandom(6).hex()}{SUFFIX}"


def create(path: Path, *, folder: bool = False) -> int:
    """Make a temporary, with the mode that a plain `open` gives, and lock it; its descriptor, -1 where folders have none."""
    while True:
        if folder:
            path.mkdir()
            if os.name == "nt":
                return -1
            fd = os.open(path, os.O_RDONLY | _CLOEXEC)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY | _CLOEXEC, 0o666)
        _lock(fd, wait=True)
        if os.path.lexists(path):
            return fd
        os.close(fd)  # in the moment before it was locked, somebody took it for an orphan


@contextlib.contextmanager
def temporary(holder: Path, prefix: str, *, folder: bool = False) -> Iterator[tuple[Path, int]]:
    """An empty file or folder, and its descriptor; it goes at the end of the block."""
    path, fd = holder / new_name(prefix), -1
    try:
        fd = create(path, folder=folder)
        yield path, fd
    finally:
        with contextlib.suppress(OSError):
            _remove(path, folder)
        with contextlib.suppress(OSError):
            if fd >= 0:
                os.close(fd)


def _remove(path: str | Path, is_folder: bool) -> None:
    if not is_folder:
        os.unlink(path)
        return
    import shutil  # with every compression that Python knows; folders are rare

    shutil.rmtree(path, ignore_errors=True)


def remove_orphans(holder: Path, prefix: str, *, folders: bool = False) -> None:
    """Remove the temporaries that begin so and whose writers are dead. Whatever cannot be looked at stays."""
    with contextlib.suppress(OSError), os.scandir(holder) as rows:
        for row in rows:
            named = row.name.startswith(prefix) and _ENDING.fullmatch(row.name, len(prefix))
            if named and (row.is_dir if folders else row.is_file)(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_orphan(row.path, folders)


def _remove_orphan(path: str, is_folder: bool) -> None:
    if os.name == "nt":
        if not is_folder:
            os.unlink(path)  # the system removes no file that is open
        return
    fd = os.open(path, (os.O_RDONLY if is_folder else os.O_RDWR) | os.O_NOFOLLOW | os.O_NONBLOCK | _CLOEXEC)
    try:
        if _lock(fd, wait=False):
            _remove(path, is_folder)
    finally:
        os.close(fd)


def sync(path: Path, flags: int = os.O_RDONLY) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        with contextlib.suppress(OSError):  # it has been synced
            os.close(fd)


def sync_folder(folder: Path) -> None:
    if os.name == "posix":
        sync(folder)


def _lock(fd: int, *, wait: bool) -> bool:
    """Whether this process now holds the lock of a file: False where another does, or where there are no locks."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True


# --- who may read an output: no more than may read what it is made of; and what replaces a file keeps what that one had


Inputs: TypeAlias = Sequence[str | os.PathLike[str]]
_OWNER = 0o600  # whoever makes a file may read and write it
_KEPT = ("user.", "system.posix_acl_access", "security.selinux")  # other extended attributes are about the old bytes


def narrow(fd: int, inputs: Inputs) -> None:
    """Take permissions from a new file that one of its inputs does not give; of a folder, and of the files in it."""
    if not hasattr(os, "fchmod"):
        return
    narrowed = bits = stat.S_IMODE(os.fstat(fd).st_mode)
    for mode in _modes(inputs):
        narrowed &= mode | _OWNER
    if narrowed != bits:
        os.fchmod(fd, narrowed)


def _modes(inputs: Inputs) -> Iterator[int]:
    for given in inputs:
        path, _ = archive_and_member(given)
        if os.fspath(path).endswith(".index.json"):  # which stands for the folder with the shards that it names
            path = os.path.dirname(path) or "."
        with contextlib.suppress(OSError, ValueError):  # an address, a callable's name; whoever reads it says what is wrong
            mode = os.stat(path).st_mode
            if not stat.S_ISDIR(mode):
                yield stat.S_IMODE(mode)
                continue
            yield stat.S_IMODE(mode) | 0o222
            with os.scandir(path) as rows:
                yield from (stat.S_IMODE(row.stat().st_mode) for row in rows if row.is_file())


def keep(old: Path, fd: int) -> None:
    """Give a new file the owner, group, mode and extended attributes of the one that it replaces, as far as the system lets."""
    if not hasattr(os, "fchown"):
        return
    status, now = os.stat(old), os.fstat(fd)
    for owner, group in {(status.st_uid, -1), (-1, status.st_gid)} - {(now.st_uid, -1), (-1, now.st_gid)}:
        with contextlib.suppress(OSError):
            os.fchown(fd, owner, group)
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError, AttributeError):  # not every system has them
        for name in os.listxattr(old):
            if name.startswith(_KEPT):
                with contextlib.suppress(OSError):
                    os.setxattr(fd, name, os.getxattr(old, name))
