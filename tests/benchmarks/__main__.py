"""Run each job beside its rivals, print the tables of docs/benchmarks.md: python -m tests.benchmarks [--runs N] [--only TEXT]

Each figure is a whole process, start-up included. The rivals of a job take turns, in an order shuffled anew each round, with
a `sync` before each run, so that a slow moment of the disk hits them alike. Results are checked before they are timed.
"""

from __future__ import annotations

import os
import platform
import random
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click

from tests.benchmarks import arithmetic, inputs, jobs, training
from tests.benchmarks.rivals import Job
from tests.benchmarks.timing import HEADER, report, time_job

_TITLES = inputs.TITLES | arithmetic.TITLES
_OF_CHECKPOINTS = (
    "inspect", "convert --strip-module", "pth to safetensors", "safetensors to pth", "convert --dtype bf16", "average of two",
    "average of two safetensors", "check", "load_into", "load_state_dict", "convert --in-place",
)  # fmt: skip
_JOBS = {  # the titles of the jobs on each input: it is made only where one of them is asked for
    "sparse": ("inspect", "convert --in-place"), "sharded": ("8 shards to 3", "check"),
    "ranks": ("inspect", "ZeRO-3 to safetensors", "ZeRO-3 with its optimizer to pth"),
    "sparse-ranks": ("inspect", "convert one tensor"), "files": ("inspect --json", "check"), "lora": ("convert --lora",),
}  # fmt: skip


@click.command()
@click.option("--runs", default=5, show_default=True, help="Rounds of each job.")
@click.option("--gigabytes", default=2.0, show_default=True, help="Size of the checkpoints.")
@click.option("--ranks", default=8, show_default=True, help="Ranks of the checkpoint in parts.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to work (else the system's temporary folder).")
@click.option("--only", metavar="TEXT", default="", help="Only jobs whose title holds this text.")
@click.option("--input", "chosen", type=click.Choice(list(_TITLES)), multiple=True, help="Only these inputs. Repeatable.")
def main(runs: int, gigabytes: float, ranks: int, folder: Path | None, only: str, chosen: tuple[str, ...]) -> None:
    """Time ckpt beside what a user would do instead."""
    random.seed(0)
    print(machine())
    for name in chosen or _TITLES:
        if not any(only in title for title in _titles(name)):
            continue
        with tempfile.TemporaryDirectory(dir=folder) as work:
            print(f"\n### {_TITLES[name].format(gigabytes=gigabytes, ranks=ranks)}\n\n{HEADER}", flush=True)
            for job in _jobs(name, Path(work), gigabytes, ranks):
                assert job.title in _titles(name), job.title
                if only in job.title:
                    report(job, time_job(job, runs))
    if not chosen and only in training.TITLE:
        print(f"\n### {training.TITLE}\n")
        training.compare(4 * runs)


def _titles(name: str) -> tuple[str, ...]:
    return _JOBS.get(name, ("convert --dequantize",) if name in arithmetic.TITLES else _OF_CHECKPOINTS)


def _jobs(name: str, work: Path, gigabytes: float, ranks: int) -> Iterator[Job]:
    if name == "sparse":
        yield from jobs.on_sparse(inputs.sparse(work))
    elif name == "sharded":
        yield from jobs.on_shards(inputs.shards(work, gigabytes * 4))
    elif name == "ranks":
        yield from jobs.on_ranks(inputs.ranks(work, ranks, gigabytes))
    elif name == "sparse-ranks":
        yield from jobs.on_sparse_ranks(inputs.ranks(work, 64, 100, holes=True))
    elif name in arithmetic.TITLES:
        yield from arithmetic.on(arithmetic.made(work, name, gigabytes), name)
    elif name == "files":
        yield from jobs.on_many_files(inputs.many_files(work))
    elif name == "cnn":
        yield from jobs.on_checkpoint(inputs.cnn(work))
    else:
        yield from jobs.on_checkpoint(inputs.checkpoint(work, int(name), gigabytes))


def machine() -> str:
    """What the figures were measured on."""
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{system}, torch {version('torch')}"


if __name__ == "__main__":
    main()
