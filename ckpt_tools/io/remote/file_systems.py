"""A file or folder of any file system that fsspec has a driver for. fsspec and its drivers are imported for such paths only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_tools.errors import RemoteError
from ckpt_tools.io.remote.calls import ForeignError, T, bounded


class FsspecObject:
    """A file or folder of any file system that fsspec has a driver for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.name = file_system(url)
        self.info = self._ask(lambda: self.fs.info(self.name))
        self.size = int(self.info.get("size") or 0)

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return bool(self.info.get("type") == "directory")

    def names(self) -> list[str]:
        """The names of the files in the folder."""
        found = self._ask(lambda: self.fs.ls(self.name, detail=False))
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]

    def fetch(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""
        return bytes(self._ask(lambda: self.fs.cat_file(self.name, start=start, end=end)))

    def version(self) -> object:
        """Size and what the file system calls a version."""
        self.fs.invalidate_cache()
        info = self._ask(lambda: self.fs.info(self.name))
        return info.get("size"), str(info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("created"))

    def _ask(self, call: Callable[[], T]) -> T:
        return bounded(self.url, call)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path in it."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise RemoteError("This needs fsspec: pip install fsspec", why=f"It reads {url}.") from None
    try:
        fs, name = bounded(url, lambda: url_to_fs(url))
    except ForeignError as error:
        if isinstance(error.error, ImportError):
            raise RemoteError(f"{url} needs a driver that is not installed.", why=f"{error.error}") from None
        if isinstance(error.error, ValueError):
            raise RemoteError(f"{url}: {scheme}:// is not a scheme that fsspec knows.", why=f"{error.error}."[:300]) from None
        raise
    return fs, str(name)
