"""What may stand where a path is expected: a member of an archive (`model.tar.gz!run/model.pth`), an open file, an address."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeAlias

from ckpt_tools.errors import DamagedFileError

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
