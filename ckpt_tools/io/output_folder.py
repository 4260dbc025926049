"""A folder as an output: its files appear all together, or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckpt_tools.errors import OutputError, OutputExistsError, UsageError
from ckpt_tools.io import attributes, temporaries
from ckpt_tools.io.member_paths import Handed
from ckpt_tools.io.output import Output, check_space, no_folder, output_errors, read_only, replacing


class Staging(Protocol):
    """Where the files of a folder go until all are there. Each process of a job has one for the same folder."""

    @property
    def target(self) -> Path:
        """The folder that they will be in."""

    def output(self, name: str) -> AbstractContextManager[Output]:
        """A new file, which is written in the block."""

    def sizes(self) -> dict[str, int]:
        """The files written so far, by any process, and their bytes."""

    def check_space(self, size: int) -> None:
        """Raise OutputError when it is known that there is no room for so many bytes."""

    def check_seen(self, rank: int) -> None:
        """Raise OutputError when this process does not see what the first one made."""


@dataclass(frozen=True, slots=True)
class LocalStaging:
    """The temporary folder of `replacing_folder`: write files into `path`."""

    path: Path
    target: Path
    inputs: tuple[str | os.PathLike[str], ...] = ()

    def output(self, name: str) -> AbstractContextManager[Output]:
        """A new file, written beside its place."""
        return replacing(self.path / name, inputs=self.inputs)

    def sizes(self) -> dict[str, int]:
        """The files written so far, and their bytes."""
        with output_errors(self.target), os.scandir(self.path) as rows:
            return {row.name: row.stat().st_size for row in rows if row.is_file()}

    def check_space(self, size: int) -> None:
        """Raise OutputError when the disk has no room for so many bytes."""
        check_space(self.path, self.target, size)

    def check_seen(self, rank: int) -> None:
        """Raise OutputError when this process does not see the folder that the first one made."""
        if not self.path.is_dir():
            raise OutputError(
                f"Process {rank} of the job does not see {self.path}.",
                why="All processes write into one folder: it must be on a file system that all machines share.",
            )


def check_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Where a local output folder really goes (links followed), after every check that can be made before work starts."""
    if isinstance(path, Handed):
        raise UsageError(f"{path} is an open file, and a folder is to be written.", fix="Name the folder.")
    with output_errors(Path(path)):
        return _checked_folder(path, overwrite=overwrite)


def _checked_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise OutputError(f"{path} is a file.", why="Several files are written here: OUT must be a folder.")
    if not target.parent.is_dir():
        raise no_folder(path, target.parent)
    holder = target if target.is_dir() else target.parent
    if not os.access(holder, os.W_OK):
        raise read_only(path, holder)
    if target.is_dir() and not overwrite and any(target.iterdir()):
        raise OutputExistsError(
            f"{path} already exists and is not empty.",
            fix="Give `overwrite=True` to replace the checkpoint in it; its other files stay.",
        )
    return target


@contextlib.contextmanager
def replacing_folder(
    path: str | os.PathLike[str],
    *,
    last: str,
    stale: re.Pattern[str],
    overwrite: bool = False,
    durable: bool = False,
    inputs: tuple[str | os.PathLike[str], ...] = (),
) -> Iterator[LocalStaging]:
    """A temporary folder whose files take their places when the block ends well, and which vanishes when it does not."""
    target = check_folder(path, overwrite=overwrite)
    existing = target.is_dir() and any(target.iterdir())
    holder, prefix = (target, ".") if existing else (target.parent, temporaries.prefix_of(target))
    temporaries.remove_orphan_folders(holder, prefix)
    temporary, lock = temporaries.name(holder, prefix), -1
    try:
        with output_errors(target):
            lock = temporaries.create_folder(temporary)
        yield LocalStaging(temporary, target, inputs)
        with output_errors(target):
            names = sorted(os.listdir(temporary), key=lambda name: (name == last, name))
            if durable or existing:
                _sync_files(temporary, names)
            if existing:
                _move_in(temporary, target, names, last, stale)
            else:
                _take_place(temporary, target)
            if durable or existing:
                temporaries.sync_folder(target)
                temporaries.sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _sync_files(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        fd = os.open(folder / name, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _take_place(temporary: Path, target: Path) -> None:
    """One rename; an empty folder that is there is replaced, one that has been filled meanwhile refuses."""
    if target.is_dir():
        target.rmdir()
    os.rename(temporary, target)


def _move_in(temporary: Path, target: Path, names: Sequence[str], last: str, stale: re.Pattern[str]) -> None:
    old = [name for name in os.listdir(target) if stale.fullmatch(name)]
    for name in names:
        if (target / name).is_dir():
            raise OutputError(f"{target / name} is a directory where a file of the checkpoint goes.")
        _keep_attributes(target / name, temporary / name)
    with contextlib.suppress(FileNotFoundError):
        (target / last).unlink()
    for name in names:
        os.replace(temporary / name, target / name)
    for name in set(old) - set(names):
        with contextlib.suppress(FileNotFoundError):
            (target / name).unlink()


def _keep_attributes(old: Path, new: Path) -> None:
    if old.is_file():
        fd = os.open(new, os.O_RDWR)
        try:
            attributes.keep(old, fd)
        finally:
            os.close(fd)
