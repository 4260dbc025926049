"""A job, its rivals, the code that shows that a rival did the job; and what each takes, run in turns."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

CKPT = [sys.executable, "-m", "ckpt_tools"]


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to do a job: the command that is measured, what it writes, and exit codes that are no failure."""

    name: str
    command: list[str]
    output: Path | None = None
    codes: tuple[int, ...] = (0,)

    def clean(self) -> None:
        """Remove what the command wrote."""
        if self.output is not None:
            self.output.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its rivals, ours first, and code that fails when what a rival wrote is wrong."""

    title: str
    rivals: list[Rival]
    code: str = ""


@dataclass(slots=True)
class Timing:
    """Seconds of every run of one rival, and the largest peak memory in MB."""

    seconds: list[float] = field(default_factory=list)
    megabytes: float = 0.0

    @property
    def median(self) -> float:
        """The median time in seconds."""
        return statistics.median(self.seconds)


def ckpt(*arguments: str | Path, output: Path | None = None) -> Rival:
    """Our own command."""
    return Rival("ckpt", [*CKPT, *map(str, arguments)], output, codes=(0, 1) if arguments[0] == "check" else (0,))


def cp(source: Path, target: Path) -> Rival:
    """A plain copy."""
    return Rival("cp", [str(shutil.which("cp")), str(source), str(target)], target)


def script(name: str, code: str, *paths: Path, more: tuple[str, ...] = ()) -> Rival:
    """What a user would write; the second path is its output."""
    return Rival(name, [sys.executable, "-c", code, *map(str, paths), *more], paths[1] if len(paths) > 1 else None)


def python(code: str, *arguments: str) -> None:
    """Run code in a process of its own: this one stays small, since a child's peak memory counts its parent's."""
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def installed(package: str, rival: Rival) -> list[Rival]:
    """A peer that installs from PyPI, where it is installed."""
    return [rival] if find_spec(package) else []


def time_job(job: Job, runs: int) -> dict[str, Timing]:
    """One unmeasured round, in which results are checked (a plain copy is taken as it is), then `runs` measured ones."""
    for rival in job.rivals:
        run(rival)
        if job.code and rival.output is not None and rival.name != "cp":
            python(job.code, str(rival.output))
        rival.clean()
    timings = {rival.name: Timing() for rival in job.rivals}
    for _ in range(runs):
        for rival in random.sample(job.rivals, len(job.rivals)):
            os.sync()
            seconds, megabytes = run(rival)
            timings[rival.name].seconds.append(seconds)
            timings[rival.name].megabytes = max(timings[rival.name].megabytes, megabytes)
            rival.clean()
    return timings


def run(rival: Rival) -> tuple[float, float]:
    """Seconds and peak megabytes of one process; its output goes nowhere."""
    started = time.perf_counter()
    process = os.posix_spawn(
        rival.command[0], rival.command, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status) not in rival.codes:
        sys.exit(f"{' '.join(rival.command)} failed with status {status}")
    return seconds, usage.ru_maxrss / 1024


def report(job: Job, timings: dict[str, Timing]) -> None:
    """One row a rival; the ratio is against the first, ours."""
    ours = timings[job.rivals[0].name].median
    for rival in job.rivals:
        timing = timings[rival.name]
        span = f"{min(timing.seconds):.2f} - {max(timing.seconds):.2f}"
        ratio = "" if rival is job.rivals[0] else f"ours takes {ours / timing.median:.3g}x"
        print(f"| {job.title} | {rival.name} | {timing.median:.2f} | {span} | {timing.megabytes:.0f} | {ratio} |", flush=True)
