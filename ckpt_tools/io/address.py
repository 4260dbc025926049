"""An address where a path is expected."""

from __future__ import annotations

import queue
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

from ckpt_tools.errors import CkptError, DamagedFileError, MissingFileError, RemoteError


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
        if any(mark in urllib.parse.unquote(name) for mark in ("/", "\\", "\0")) or urllib.parse.unquote(name) in (".", ".."):
            raise DamagedFileError(f"{self} names the file {name!r}, which is not a name inside its folder.")
        web = str(self).startswith(("http://", "https://"))
        return str(self).split("?")[0].rpartition("/")[0] + "/" + (urllib.parse.quote(name) if web else name)


SECONDS = 60
T = TypeVar("T")


class ForeignError(RemoteError):
    """An error of a driver, kept."""

    def __init__(self, url: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"[:300]
        super().__init__(f"{url} cannot be reached.", why=text)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: without what the driver raised, which need not be known there."""
        return RemoteError, (self.what,), {"what": self.what, "why": self.why, "fix": self.fix}


def bounded(url: str, call: Callable[[], T], seconds: float = SECONDS) -> T:
    """What a call of a driver gives, its errors as ours, and not waited for longer than a minute, or than is said."""
    done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((True, call()))
        except Exception as error:  # drivers raise what their libraries do
            done.put((False, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        good, value = done.get(timeout=seconds)
    except queue.Empty:
        raise RemoteError(f"{url} cannot be read.", why=f"No whole answer within {seconds:.0f} seconds.") from None
    if not good and isinstance(value, FileNotFoundError) and not isinstance(value, CkptError):
        raise MissingFileError(f"{url} cannot be reached.", why="There is no such file.") from None
    if not good:
        raise value if isinstance(value, CkptError) else ForeignError(url, value) from None
    return cast("T", value)


def unreachable(url: str, why: str) -> RemoteError:
    return RemoteError(f"{url} cannot be read.", why=why)
