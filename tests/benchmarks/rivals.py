"""A job, its rivals, and the code that shows that a rival did the job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

CKPT = [sys.executable, "-m", "ckpt_tools"]


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to do a job.

    Attributes:
        command: what is measured. output: what it writes. before: a command that sets the stage before each run, unmeasured.
        codes: exit codes that are no failure.
    """

    name: str
    command: list[str]
    output: Path | None = None
    before: list[str] = field(default_factory=list)
    codes: tuple[int, ...] = (0,)

    def prepare(self) -> None:
        """Set the stage."""
        if self.before:
            subprocess.run(self.before, check=True, stdout=subprocess.DEVNULL)

    def clean(self) -> None:
        """Remove what the command wrote."""
        if self.output is not None and self.output.is_dir():
            shutil.rmtree(self.output)
        elif self.output is not None:
            self.output.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its rivals, ours first, and code that fails when what a rival wrote is wrong."""

    title: str
    rivals: list[Rival]
    code: str = ""

    def check(self, rival: Rival) -> None:
        """Check the output of a rival; a plain copy is taken as it is."""
        if self.code and rival.output is not None and rival.name != "cp":
            python(self.code, str(rival.output))


def ckpt(*arguments: str | Path, output: Path | None = None) -> Rival:
    """Our own command."""
    return Rival("ckpt", [*CKPT, *map(str, arguments)], output, codes=(0, 1) if arguments[0] == "check" else (0,))


def cp(source: Path, target: Path) -> Rival:
    """A plain copy, of a folder too."""
    return Rival("cp", [str(shutil.which("cp")), "-r", str(source), str(target)], target)


def script(name: str, code: str, *paths: Path, before: list[str] | None = None) -> Rival:
    """What a user would write; the second path is its output."""
    return Rival(name, [sys.executable, "-c", code, *map(str, paths)], paths[1] if len(paths) > 1 else None, before or [])


def python(code: str, *arguments: str) -> None:
    """Run code in a process of its own: this one stays small, since a child's peak memory counts its parent's."""
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def installed(package: str, rival: Rival) -> list[Rival]:
    """A peer that installs from PyPI, where it is installed."""
    return [rival] if find_spec(package) else []
