"""Who may read an output: no more than may read what it is made of; and what replaces a file keeps what that one had."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ckpt_tools.io.member_paths import archive_and_member

Inputs: TypeAlias = Sequence[str | os.PathLike[str]]
_OWNER = 0o600  # whoever makes a file may read and write it
_KEPT = ("user.", "system.posix_acl_access", "security.selinux")  # other extended attributes are about the old bytes


def narrow(fd: int, inputs: Inputs) -> None:
    """Take permissions from a new file that one of its inputs does not give; of a folder, and of the files in it."""
    if not hasattr(os, "fchmod"):
        return
    bits = stat.S_IMODE(os.fstat(fd).st_mode)
    narrowed = bits
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
    for owner, group in ((status.st_uid, -1), (-1, status.st_gid)):
        if (owner, group) not in ((now.st_uid, -1), (-1, now.st_gid)):
            with contextlib.suppress(OSError):
                os.fchown(fd, owner, group)
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError, AttributeError):  # not every system has them
        for name in os.listxattr(old):
            if name.startswith(_KEPT):
                with contextlib.suppress(OSError):
                    os.setxattr(fd, name, os.getxattr(old, name))
