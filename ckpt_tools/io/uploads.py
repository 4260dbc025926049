"""Remote outputs: a file or a folder at an address, which is there whole or not at all as far as its file system can tell.

fsspec and its drivers are imported for such outputs only.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from ckpt_tools.errors import CkptError, OutputError
from ckpt_tools.io import temporaries
from ckpt_tools.io.member_paths import Address
from ckpt_tools.io.output import Output, exists_error, not_empty
from ckpt_tools.io.remote import MOST, SECONDS, ForeignError, bounded, file_system

# Stores where an upload becomes an object when it is completed, and a rename would be a second copy, or two more commits.
_WHOLE_ON_COMMIT = {"s3", "s3a", "gs", "gcs", "hf"}
_HOUR = 3600  # how long a rename may take where it is a second copy


# --- one file


@contextlib.contextmanager
def uploading(url: str, *, overwrite: bool) -> Iterator[Output]:
    """An output whose bytes go to a remote file as they are written; it appears whole when the block ends well."""
    fs, name = check_upload(url, overwrite=overwrite)
    if _whole_on_commit(url):
        with _streaming(url, fs, name) as output:
            yield output
        return
    folder, slash, last = name.rpartition("/")
    place = f"{folder}{slash}{temporaries.new_name(temporaries.prefix_of(last))}"
    with _streaming(url, fs, place) as output:
        yield output
    try:
        bounded(url, lambda: fs.mv(place, name), _HOUR)
    except BaseException:
        _remove(fs, place)
        raise


def check_upload(url: str, *, overwrite: bool) -> tuple[Any, str]:
    """The file system and the path of an output, after what can be checked before work starts."""
    fs, name = _writable(url)
    if bounded(url, lambda: fs.isdir(name)):
        raise OutputError(f"{url} is a directory.", fix="Name a file in it.")
    if not overwrite and bounded(url, lambda: fs.exists(name)):
        raise exists_error(url)
    return fs, name


def _writable(url: str) -> tuple[Any, str]:
    if url.startswith(("http://", "https://")):
        raise OutputError(
            f"{url} cannot be written.", why="HTTP has no upload that all servers share.", fix="Write a local file."
        )
    return file_system(url)


def _whole_on_commit(url: str) -> bool:
    return url.partition("://")[0] in _WHOLE_ON_COMMIT


@contextlib.contextmanager
def _streaming(url: str, fs: Any, place: str) -> Iterator[Output]:
    """An output whose bytes go through a pipe to a thread that hands them to the driver; nothing is left when it fails."""
    direct = _whole_on_commit(url)
    file = bounded(url, lambda: fs.open(place, "wb", **({"autocommit": False} if direct else {})))
    reader, writer = os.pipe()
    failures: list[Exception] = []
    thread = threading.Thread(target=_hand_on, args=(reader, file, direct, failures), daemon=True)
    thread.start()
    try:
        try:
            yield Output(writer, cast("Path", Address(url)))
        finally:
            os.close(writer)
        thread.join()
        if failures:
            raise failures[0]
        if direct:
            file.close()
            file.commit()
    except BaseException:
        thread.join(SECONDS)
        with contextlib.suppress(Exception):
            if direct:
                file.discard()
                file.closed = True  # or else, with some drivers, what is there is uploaded when the file is let go
            else:
                file.close()
        if not direct:
            _remove(fs, place)
        if failures:
            raise ForeignError(url, failures[0]) from None
        raise


def _hand_on(reader: int, file: Any, direct: bool, failures: list[Exception]) -> None:
    """What comes through a pipe to a driver's file; a failure closes the pipe, so that the writer stops."""
    try:
        with os.fdopen(reader, "rb", buffering=0) as stream:
            while data := stream.read(MOST):
                file.write(data)
            if not direct:
                file.close()
    except Exception as error:  # drivers raise what their libraries do
        failures.append(error)


def _remove(fs: Any, name: str) -> None:
    with contextlib.suppress(Exception):
        fs.rm_file(name)


# --- a folder


@dataclass(frozen=True, slots=True)
class RemoteStaging:
    """Where the files of a remote folder go until the block of `uploading_folder` ends. Known to all processes of a job."""

    target: Path
    inner: str
    last: str
    hidden: str

    def place(self, name: str) -> str:
        """The address that a file is written to."""
        inside = (self.inner, name) if self.inner else (self.hidden if name == self.last else name,)
        return "/".join((str(self.target), *inside))

    @contextlib.contextmanager
    def output(self, name: str) -> Iterator[Output]:
        """A new file of the folder, written as a stream; nothing is left of it when the block fails."""
        url = self.place(name)
        fs, place = file_system(url)
        with _streaming(url, fs, place) as output:
            yield output

    def check_space(self, size: int) -> None:
        """Nothing: such file systems do not tell."""

    def check_seen(self, rank: int) -> None:
        """Nothing: `sizes` will tell the first process what it sees."""

    def sizes(self) -> dict[str, int]:
        """The files written so far, and their bytes."""
        folder = f"{self.target}/{self.inner}" if self.inner else str(self.target)
        found = _listed(folder)
        return {self.last if name == self.hidden else name: size for name, size in found.items()}


@contextlib.contextmanager
def uploading_folder(url: str, *, last: str, stale: re.Pattern[str], overwrite: bool) -> Iterator[RemoteStaging]:
    """A remote folder whose index appears when the block ends well, and of which nothing is left when it does not."""
    url = url.rstrip("/")
    before = check_folder(url, overwrite=overwrite)
    fs, folder = file_system(url)
    inner = temporaries.new_name(".") if before else ""
    staging = RemoteStaging(cast("Path", Address(url)), inner, last, temporaries.new_name(temporaries.prefix_of(last)))
    made = _make(url, fs, f"{folder}/{inner}" if inner else folder)
    committed = False
    try:
        yield staging
        if inner:
            _move_in(staging, fs, folder, stale)
        else:
            bounded(url, lambda: fs.mv(f"{folder}/{staging.hidden}", f"{folder}/{last}"), _HOUR)
        committed = True
    finally:
        with contextlib.suppress(Exception):
            _clean(staging, fs, folder, stale, committed=committed, made=made)


def check_folder(url: str, *, overwrite: bool) -> list[str]:
    """The names in a remote folder, none where there is none yet, after what can be checked before work starts."""
    fs, name = _writable(url)
    if bounded(url, lambda: fs.isfile(name)):
        raise OutputError(f"{url} is a file.", why="Several files are written here: OUT must be a folder.")
    names = sorted(_listed(url.rstrip("/")))
    if names and not overwrite:
        raise not_empty(url)
    return names


def _listed(url: str) -> dict[str, int]:
    """The names in a folder and their sizes; none where there is no such folder."""
    fs, folder = file_system(url)

    def names() -> dict[str, int]:
        fs.invalidate_cache()
        try:
            rows = fs.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        found = {str(row["name"]).rstrip("/"): int(row.get("size") or 0) for row in rows}
        found.pop(folder.rstrip("/"), None)  # an empty object that marks the folder, on a store without folders
        return {name.rpartition("/")[2]: size for name, size in found.items()}

    return bounded(url, names)


def _make(url: str, fs: Any, folder: str) -> bool:
    """Make a folder, where the file system has folders; whether it was not there."""
    if _whole_on_commit(url) or bounded(url, lambda: fs.isdir(folder)):
        return False
    bounded(url, lambda: fs.makedirs(folder, exist_ok=True))
    return True


def _move_in(staging: RemoteStaging, fs: Any, folder: str, stale: re.Pattern[str]) -> None:
    """The new files take their places, between the end of the old index and the new one."""
    url, names = str(staging.target), sorted(staging.sizes(), key=lambda name: (name == staging.last, name))
    old = [name for name in _listed(url) if stale.fullmatch(name)]
    try:
        if staging.last in old:
            bounded(url, lambda: fs.rm_file(f"{folder}/{staging.last}"))
        for name in names:
            bounded(url, partial(fs.mv, f"{folder}/{staging.inner}/{name}", f"{folder}/{name}"), _HOUR)
    except CkptError as error:
        error.fix = error.fix or "Run it again: the checkpoint that was there has lost its index, and the new one has none yet."
        raise
    for name in set(old) - set(names):
        _remove(fs, f"{folder}/{name}")


def _clean(staging: RemoteStaging, fs: Any, folder: str, stale: re.Pattern[str], *, committed: bool, made: bool) -> None:
    """Remove what is left of a temporary folder, or of a new folder that did not become whole."""
    if staging.inner:
        fs.invalidate_cache()
        fs.rm(f"{folder}/{staging.inner}", recursive=True)
    elif not committed:
        for name in _listed(str(staging.target)):
            if name == staging.hidden or stale.fullmatch(name):
                _remove(fs, f"{folder}/{name}")
        if made:
            fs.rmdir(folder)
