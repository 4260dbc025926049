"""An address where a path is expected."""

from __future__ import annotations

import urllib.parse
from pathlib import PurePosixPath

from ckpt_tools.errors import DamagedFileError


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
        """The address of another file in its folder, whose name is not an address: `%` and `?` are letters of it.

        Raises:
            DamagedFileError: a name that would be a path once the server has decoded it.
        """
        if any(mark in urllib.parse.unquote(name) for mark in ("/", "\\", "\0")) or urllib.parse.unquote(name) in (".", ".."):
            raise DamagedFileError(f"{self} names the file {name!r}, which is not a name inside its folder.")
        web = str(self).startswith(("http://", "https://"))
        return str(self).split("?")[0].rpartition("/")[0] + "/" + (urllib.parse.quote(name) if web else name)
