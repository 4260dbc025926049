"""What tells that a file is being edited in place, or was when the edit was killed: its first bytes, and the name of a journal.

Every file that is opened is asked, so this is apart from what reads a journal (`rollback`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

MARK = b"\xffCKP"
MARKED = 8  # bytes at the start of a file that are the mark while it is edited
SUFFIX = ".ckpt-journal"
BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_STEP = 4 << 20
Reader = Callable[[int, int], bytes]  # (offset, length) -> the bytes, fewer at the end of the file


def journal_path(path: Path) -> Path:
    """Where the journal of a file is."""
    return path.with_name(f".{path.name}{SUFFIX}")


def is_journal_of(name: str, file: str) -> bool:
    """Whether this is what a file's journal is called: `.FILE.ckpt-journal`, or `.FILE.2.ckpt-journal` where that was taken."""
    return re.fullmatch(rf"\.{re.escape(file)}(\.[0-9]+)?{re.escape(SUFFIX)}", name) is not None


def is_marked(read: Reader) -> bool:
    """Whether a file begins as one that is being edited, or was when the edit was killed."""
    return read(0, len(MARK)) == MARK


def has_traces(path: Path) -> bool:
    """Whether a file begins with a mark, or a file beside it is called as its journals are: most have neither."""
    try:
        beside = any(is_journal_of(name, path.name) for name in os.listdir(path.parent) if name.endswith(SUFFIX))
    except OSError:  # a folder that may be entered and not listed
        beside = os.path.lexists(journal_path(path))
    if beside:
        return True
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0))
        try:
            return is_marked(partial(read_at, fd))
        finally:
            os.close(fd)
    return False


def read_at(fd: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes from `offset`; fewer at the end of the file."""
    parts = []
    while length and (data := _read(fd, offset, min(length, _STEP))):
        parts.append(data)
        offset, length = offset + len(data), length - len(data)
    return b"".join(parts)


def _read(fd: int, offset: int, length: int) -> bytes:
    if hasattr(os, "pread"):  # threads read from one descriptor
        return os.pread(fd, length, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, length)
