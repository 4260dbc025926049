"""How time grows with bytes and with names, and the exponents that fit: python -m tests.benchmarks.growth [--runs N]"""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path

import click

from tests.benchmarks.jobs import checkpoint
from tests.benchmarks.rivals import Job, ckpt, cp, time_job

SIZES = (0.1, 0.25, 0.5, 1, 2, 4, 8)
COUNTS = (10, 100, 1_000, 10_000, 50_000, 100_000, 200_000)


@click.command()
@click.option("--runs", default=3, show_default=True, help="Rounds of each.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to work (else the system's temporary folder).")
def main(runs: int, folder: Path | None) -> None:
    """Print seconds by size and by number of tensors."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        _table("gigabytes, 60 tensors", SIZES, [_seconds(Path(work), 60, size, runs) for size in SIZES])
        _table("tensors, 100 MB", COUNTS, [_seconds(Path(work), count, 0.1, runs) for count in COUNTS])


def _seconds(work: Path, tensors: int, gigabytes: float, runs: int) -> list[float]:
    """Median seconds of inspect, convert and cp."""
    source = checkpoint(work, tensors, gigabytes)
    out, copy = work / "out.pth", work / "copy.pth"
    rivals = [ckpt("convert", source, out, "--strip-module", output=out), cp(source, copy)]
    inspect = time_job(Job("inspect", [ckpt("inspect", source)]), runs)["ckpt"].median
    timings = time_job(Job("convert", rivals), runs)
    source.unlink()
    return [inspect, timings["ckpt"].median, timings["cp"].median]


def _table(title: str, sizes: tuple[float, ...], rows: list[list[float]]) -> None:
    """The seconds, and of the larger sizes the slopes of log time over log size, by least squares."""
    print(f"\n| {title} | inspect | convert --strip-module | cp |\n|---|---|---|---|")
    for size, row in zip(sizes, rows, strict=True):
        print(f"| {size:,g} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.2f} |")
    logs = [math.log(size) for size in sizes[3:]]
    slopes = [statistics.linear_regression(logs, [math.log(row[column]) for row in rows[3:]]).slope for column in range(3)]
    print(f"\nexponents from {sizes[3]:,g} on: inspect {slopes[0]:.2f}, convert {slopes[1]:.2f}, cp {slopes[2]:.2f}")


if __name__ == "__main__":
    main()
