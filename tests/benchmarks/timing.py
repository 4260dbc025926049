"""Run the rivals of a job in turns and print their row of the table."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.rivals import Job, Rival

HEADER = "| job | rival | median s | min - max s | peak MB | ratio |\n|---|---|---|---|---|---|"


@dataclass(slots=True)
class Timing:
    """Seconds of every run of one rival, and the largest peak memory in MB."""

    seconds: list[float] = field(default_factory=list)
    megabytes: float = 0.0

    @property
    def median(self) -> float:
        """The median time in seconds."""
        return statistics.median(self.seconds)


def time_job(job: Job, runs: int) -> dict[str, Timing]:
    """One unmeasured round, in which results are checked, then `runs` measured ones."""
    for rival in job.rivals:
        rival.prepare()
        run(rival)
        job.check(rival)
        rival.clean()
    timings = {rival.name: Timing() for rival in job.rivals}
    for _ in range(runs):
        for rival in random.sample(job.rivals, len(job.rivals)):
            rival.prepare()
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
