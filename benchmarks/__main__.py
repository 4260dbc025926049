"""Run every job beside its alternatives and print the table of docs/benchmarks.md: python -m benchmarks [--runs N] [--dir D]

Each figure is a whole process, start-up included. The rivals of a job take turns, in an order shuffled anew each round, with
a `sync` before each run, so that a slow moment of the disk hits them alike. Results are checked before they are timed.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import click

from benchmarks.jobs import Job, Rival, make_checkpoint, make_jobs


@dataclass(slots=True)
class Timing:
    """Seconds of every run of one rival, and the largest peak memory in MB."""

    seconds: list[float] = field(default_factory=list)
    megabytes: float = 0.0

    @property
    def median(self) -> float:
        """The median time in seconds."""
        return statistics.median(self.seconds)


@click.command()
@click.option("--runs", default=5, show_default=True, help="Rounds of each job.")
@click.option("--gigabytes", default=2.0, show_default=True, help="Size of the checkpoints.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to work (else the system's temporary folder).")
@click.option("--only", metavar="TEXT", default="", help="Only jobs whose title holds this text.")
def main(runs: int, gigabytes: float, folder: Path | None, only: str) -> None:
    """Time ckpt beside what a user would do instead."""
    random.seed(0)
    print(machine())
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for tensors in (60, 20_000):
            source = make_checkpoint(Path(work) / f"{tensors}.pth", tensors, gigabytes)
            print(f"\n### {gigabytes:g} GB in {tensors:,} tensors\n\n{HEADER}")
            for job in make_jobs(source):
                if only in job.title:
                    report(job, time_job(job, runs))
            source.unlink()


HEADER = "| job | rival | median s | min - max s | peak MB | ratio |\n|---|---|---|---|---|---|"


def time_job(job: Job, runs: int) -> dict[str, Timing]:
    """One unmeasured round, in which results are checked, then `runs` measured ones."""
    for rival in job.rivals:
        run(rival)
        job.check(rival)
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
        rival.command[0], rival.command, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(rival.command)} failed with status {status}")
    return seconds, usage.ru_maxrss / 1024


def report(job: Job, timings: dict[str, Timing]) -> None:
    """One row a rival; the ratio is against the first, ours."""
    ours = timings[job.rivals[0].name].median
    for rival in job.rivals:
        timing = timings[rival.name]
        span = f"{min(timing.seconds):.2f} - {max(timing.seconds):.2f}"
        ratio = "" if rival is job.rivals[0] else f"ours takes {ours / timing.median:.2f}x"
        print(f"| {job.title} | {rival.name} | {timing.median:.2f} | {span} | {timing.megabytes:.0f} | {ratio} |", flush=True)


def machine() -> str:
    """What the figures were measured on."""
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{system}, torch {version('torch')}"


if __name__ == "__main__":
    main()
