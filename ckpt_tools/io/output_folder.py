"""A folder as an output: its files appear all together, or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import OutputError, UsageError
from ckpt_tools.io import temporaries
from ckpt_tools.io.member_paths import Handed
from ckpt_tools.io.output import Output, check_space, check_writable, not_empty, output_errors, replacing


@dataclass(frozen=True, slots=True)
class Staging:
    """A temporary folder until all files are there: write them into `path`. Each process of a job has one for it."""

    path: Path
    target: Path
    inputs: tuple[str | os.PathLike[str], ...] = ()

    def output(self, name: str) -> AbstractContextManager[Output]:
        return replacing(self.path / name, inputs=self.inputs)

    def sizes(self) -> dict[str, int]:
        with output_errors(self.target), os.scandir(self.path) as rows:
            return {row.name: row.stat().st_size for row in rows if row.is_file()}

    def check_space(self, size: int) -> None:
        check_space(self.path, self.target, size)

    def check_seen(self, rank: int) -> None:
        """Raise OutputError when this process does not see the folder that the first one made."""
        if not self.path.is_dir():
            raise OutputError(
                f"Process {rank} of the job does not see {self.path}.", fix="Name a folder that all machines share."
            )


def check_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Where a local output folder really goes (links followed), after every check that can be made before work starts."""
    if isinstance(path, Handed):
        raise UsageError(f"{path} is an open file, and a folder is to be written.", fix="Name the folder.")
    with output_errors(Path(path)):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_dir():
            raise OutputError(f"{path} is a file.", why="Several files are written here: OUT must be a folder.")
        check_writable(path, target if target.is_dir() else target.parent)
        if target.is_dir() and not overwrite and any(target.iterdir()):
            raise not_empty(path)
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
) -> Iterator[Staging]:
    """A temporary folder whose files take their places when the block ends well, and which vanishes when it does not."""
    target = check_folder(path, overwrite=overwrite)
    existing = target.is_dir() and any(target.iterdir())
    holder, prefix = (target, ".") if existing else (target.parent, temporaries.prefix_of(target.name))
    temporaries.remove_orphans(holder, prefix, folders=True)
    with contextlib.ExitStack() as stack:
        with output_errors(target):
            temporary, _ = stack.enter_context(temporaries.temporary(holder, prefix, folder=True))
        yield Staging(temporary, target, inputs)
        with output_errors(target):
            names = sorted(os.listdir(temporary), key=lambda name: (name == last, name))
            if durable or existing:
                for name in names:
                    temporaries.sync(temporary / name, os.O_RDWR)
            if existing:
                _move_in(temporary, target, names, last, stale)
            else:
                if target.is_dir():  # one rename; a folder that has been filled meanwhile refuses
                    target.rmdir()
                os.rename(temporary, target)
            if durable or existing:
                temporaries.sync_folder(target)
                temporaries.sync_folder(target.parent)


def _move_in(temporary: Path, target: Path, names: Sequence[str], last: str, stale: re.Pattern[str]) -> None:
    old = [name for name in os.listdir(target) if stale.fullmatch(name)]
    for name in names:
        if (target / name).is_dir():
            raise OutputError(f"{target / name} is a directory where a file of the checkpoint goes.")
        if (target / name).is_file():
            with (temporary / name).open("r+b") as file:
                temporaries.keep(target / name, file.fileno())
    (target / last).unlink(missing_ok=True)
    for name in names:
        os.replace(temporary / name, target / name)
    for name in set(old) - set(names):
        (target / name).unlink(missing_ok=True)
