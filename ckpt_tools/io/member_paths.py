"""What may stand where a path is expected: a member of an archive (`model.tar.gz!run/model.pth`), an open file."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeAlias

MARK = "!"
AnyPath: TypeAlias = str | os.PathLike[str]
File: TypeAlias = str | os.PathLike[str] | BinaryIO


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
