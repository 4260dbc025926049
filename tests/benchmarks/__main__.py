"""Run each job beside its rivals, print the tables of docs/benchmarks.md: python -m tests.benchmarks [--runs N] [--only TEXT]

Each figure is a whole process, start-up included. The rivals of a job take turns, in an order shuffled anew each round, with
a `sync` before each run, so that a slow moment of the disk hits them alike. Results are checked before they are timed.
"""

from __future__ import annotations

import os
import platform
import random
import tempfile
from importlib.metadata import version
from pathlib import Path

import click

from tests.benchmarks import arithmetic, jobs
from tests.benchmarks.rivals import report, time_job

TITLES = {"60": "{:g} GB in 60 tensors", "20000": "{:g} GB in 20,000 tensors"} | arithmetic.TITLES


@click.command()
@click.option("--runs", default=5, show_default=True, help="Rounds of each job.")
@click.option("--gigabytes", default=2.0, show_default=True, help="Size of the checkpoints.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to work (else the system's temporary folder).")
@click.option("--only", metavar="TEXT", default="", help="Only jobs whose title holds this text.")
@click.option("--input", "chosen", type=click.Choice(list(TITLES)), multiple=True, help="Only these inputs. Repeatable.")
def main(runs: int, gigabytes: float, folder: Path | None, only: str, chosen: tuple[str, ...]) -> None:
    """Time ckpt beside what a user would do instead."""
    random.seed(0)
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{system}, torch {version('torch')}")
    for name in chosen or TITLES:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            print(f"\n### {TITLES[name].format(gigabytes)}\n\n| job | rival | median s | min - max s | peak MB | ratio |")
            print("|---|---|---|---|---|---|", flush=True)
            made = arithmetic.on if name in arithmetic.TITLES else jobs.on
            for job in made(Path(work), name, gigabytes):
                if only in job.title:
                    report(job, time_job(job, runs))


if __name__ == "__main__":
    main()
