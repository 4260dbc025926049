"""How time grows with bytes and with names, and the exponents that fit: python -m tests.benchmarks.growth [--runs N]"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import click

from tests.benchmarks import inputs
from tests.benchmarks.rivals import Job, ckpt, cp
from tests.benchmarks.timing import time_job

SIZES = (0.1, 0.25, 0.5, 1, 2, 4, 8)
COUNTS = (10, 100, 1_000, 10_000, 50_000, 100_000, 200_000)


@click.command()
@click.option("--runs", default=3, show_default=True, help="Rounds of each.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to work (else the system's temporary folder).")
def main(runs: int, folder: Path | None) -> None:
    """Print seconds by size and by number of tensors."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        by_bytes = [_seconds(Path(work), 60, size, runs) for size in SIZES]
        print("\n| gigabytes, 60 tensors | inspect | convert --strip-module | cp |\n|---|---|---|---|")
        for size, row in zip(SIZES, by_bytes, strict=True):
            print(f"| {size:g} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.2f} |")
        print(f"\nexponents from 1 GB on: {_exponents(SIZES[3:], by_bytes[3:])}")
        by_names = [_seconds(Path(work), count, 0.1, runs) for count in COUNTS]
        print("\n| tensors, 100 MB | inspect | convert --strip-module | cp |\n|---|---|---|---|")
        for count, row in zip(COUNTS, by_names, strict=True):
            print(f"| {count:,} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.2f} |")
        print(f"\nexponents from 10,000 on: {_exponents(COUNTS[3:], by_names[3:])}")


def _seconds(work: Path, tensors: int, gigabytes: float, runs: int) -> list[float]:
    """Median seconds of inspect, convert and cp."""
    source = inputs.checkpoint(work, tensors, gigabytes)
    out, copy = work / "out.pth", work / "copy.pth"
    rivals = [ckpt("convert", source, out, "--strip-module", output=out), cp(source, copy)]
    inspect = time_job(Job("inspect", [ckpt("inspect", source)]), runs)["ckpt"].median
    timings = time_job(Job("convert", rivals), runs)
    source.unlink()
    return [inspect, timings["ckpt"].median, timings["cp"].median]


def _exponents(sizes: tuple[float, ...], rows: list[list[float]]) -> str:
    """The slopes of log time over log size, by least squares."""
    found = []
    for column, name in enumerate(("inspect", "convert", "cp")):
        x, y = [math.log(size) for size in sizes], [math.log(row[column]) for row in rows]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
        found.append(f"{name} {slope:.2f}")
    return ", ".join(found)


if __name__ == "__main__":
    main()
