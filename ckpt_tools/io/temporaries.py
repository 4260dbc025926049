"""The temporary file beside an output: named after it, locked while its writer lives, removed by the next one when it died.

A process that is killed cannot remove its temporary. The lock tells: the system releases it with the process, so a temporary
whose lock can be had belongs to no process. Where there are no locks (Windows, some network file systems) nothing is removed
but what the system itself says is not open.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_BINARY: int = getattr(os, "O_BINARY", 0)
_CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
SUFFIX = ".ckpt-tmp"
_ENDING = re.compile(rf"[0-9a-f]{{12}}\{SUFFIX}")


def name(folder: Path, prefix: str) -> Path:
    """A path for a temporary, which nothing has yet."""
    return folder / new_name(prefix)


def new_name(prefix: str) -> str:
    """A name for a temporary, which nothing has yet."""
    return f"{prefix}{os.urandom(6).hex()}{SUFFIX}"


def prefix_of(target: Path) -> str:
    """How its temporaries begin. 40 characters are 160 bytes at most: the name stays under the 255 that a name may have."""
    return prefix_for(target.name)


def prefix_for(name: str) -> str:
    """How the temporaries of a target of this name begin."""
    return f".{name[:40]}."


def create(path: Path) -> int:
    """Make a temporary and lock it; its descriptor. Its mode is what a plain `open` gives."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY | _CLOEXEC, 0o666)
        try:
            _lock(fd, wait=True)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # in the moment before it was locked, somebody took it for an orphan


@contextlib.contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """An empty file beside a target, removed at the end of the block; when this process is killed, by the next run."""
    path, fd = name(target.parent, prefix_of(target)), -1
    try:
        fd = create(path)
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            if fd >= 0:
                os.close(fd)


def create_folder(path: Path) -> int:
    """Make a temporary folder and lock it; its descriptor, -1 where folders cannot be opened."""
    while True:
        path.mkdir()
        if os.name == "nt":
            return -1
        fd = os.open(path, os.O_RDONLY | _CLOEXEC)
        _lock(fd, wait=True)
        if path.is_dir():
            return fd
        os.close(fd)  # taken for an orphan before it was locked


def remove_orphan_folders(folder: Path, prefix: str) -> None:
    """Remove the temporary folders in `folder` whose names begin so and whose writers are dead; where locks tell."""
    for row in _left_over(folder, prefix, folders=True) if os.name != "nt" else ():
        _remove_orphan_folder(row.path)


def _remove_orphan_folder(path: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | _CLOEXEC)
        try:
            if _lock(fd, wait=False):
                import shutil  # with every compression that Python knows; such a folder is rare

                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def remove_orphans(target: Path) -> None:
    """Remove the temporaries of this target whose writers are dead. Whatever cannot be looked at stays."""
    for row in _left_over(target.parent, prefix_of(target), folders=False):
        _remove_orphan(row.path)


def _left_over(folder: Path, prefix: str, *, folders: bool) -> Iterator[os.DirEntry[str]]:
    """The files, or the folders, that lie in a folder under the name of a temporary."""
    with contextlib.suppress(OSError), os.scandir(folder) as rows:
        for row in rows:
            wanted = row.name.startswith(prefix) and _ENDING.fullmatch(row.name, len(prefix))
            if wanted and (row.is_dir if folders else row.is_file)(follow_symlinks=False):
                yield row


def _remove_orphan(path: str) -> None:
    with contextlib.suppress(OSError):
        if os.name == "nt":  # the system removes no file that is open
            os.unlink(path)
            return
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | _CLOEXEC)
        try:
            if _lock(fd, wait=False):
                os.unlink(path)
        finally:
            os.close(fd)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        with contextlib.suppress(OSError):  # it has been synced
            os.close(fd)


def _lock(fd: int, *, wait: bool) -> bool:
    """Whether this process now holds the lock of a file: False where another does, or where there are no locks."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True
