"""What a guard costs beside the load that it watches: python -m tests.benchmarks.guarding [--runs N] [--only TEXT]

The guard's own time (remembering the model, finding the files' tensors, the verdict) and the load's are taken apart in the same
runs, as processor time, so that other processes change neither. The least of the runs counts; files are in the page cache.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_tools.torch import guard

Load = Callable[[nn.Module, Path], object]


def _layers(count: int, size: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(count)))


def _blocks() -> nn.Module:
    """A residual network's proportions: three convolutions with their norms in each of 18 blocks."""

    def block() -> list[nn.Module]:
        sizes = ((256, 64, 1), (64, 64, 3), (64, 256, 1))
        return [layer for old, new, kernel in sizes for layer in (nn.Conv2d(old, new, kernel, bias=False), nn.BatchNorm2d(new))]

    return nn.Sequential(*(nn.Sequential(*block()) for _ in range(18)))


def _small() -> nn.Module:
    """20,000 parameters of 64 numbers in 5,000 modules."""

    def module() -> nn.Module:
        return nn.ParameterDict({name: nn.Parameter(torch.randn(64)) for name in "abcd"})

    return nn.Sequential(
        *(nn.Sequential(*(nn.Sequential(*(module() for _ in range(10))) for _ in range(10))) for _ in range(50))
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "1 GB, 128 tensors": lambda: _layers(64, 2000),
    "a transformer's 400 MB, 600 tensors": lambda: _layers(300, 577),
    "a CNN, 324 tensors": _blocks,
    "20,000 of 64 numbers": _small,
}
LOADS: dict[str, tuple[str, Load]] = {
    "torch.load, load_state_dict": ("pth", lambda model, path: model.load_state_dict(torch.load(path))),
    "torch.load(mmap), assign": ("pth", lambda model, path: model.load_state_dict(torch.load(path, mmap=True), assign=True)),
    "safetensors, load_state_dict": ("safetensors", lambda model, path: model.load_state_dict(load_file(path))),
}


@click.command()
@click.option("--runs", default=5, show_default=True, help="Loads of each kind.")
@click.option("--only", metavar="TEXT", default="", help="Only models whose title holds this text.")
def main(runs: int, only: str) -> None:
    """Print the seconds of each load, and of its guard."""
    print("| model | load | load ms | guard ms | of the load | us a tensor | MB more |\n|---|---|---|---|---|---|---|")
    for title in [title for title in MODELS if only in title]:
        with tempfile.TemporaryDirectory() as folder:
            state = MODELS[title]().state_dict()
            torch.save(state, Path(folder, "model.pth"))
            save_file(state, Path(folder, "model.safetensors"))
            for kind, (ending, load) in LOADS.items():
                taken = [_run(MODELS[title](), load, Path(folder, f"model.{ending}")) for _ in range(runs)]
                loading, guarding, more = (
                    min(row[0] for row in taken),
                    min(row[1] for row in taken),
                    max(row[2] for row in taken),
                )
                print(f"| {title} | {kind} | {loading * 1e3:.1f} | {guarding * 1e3:.1f} | {guarding / loading:.1%} "
                      f"| {guarding / len(state) * 1e6:.0f} | {more:.1f} |", flush=True)  # fmt: skip


def _run(model: nn.Module, load: Load, path: Path) -> tuple[float, float, float]:
    """Seconds of the load and of its guard, and the peak megabytes that the verdict added."""
    seen = guard(model)
    times = [time.process_time()]
    with seen:
        times.append(time.process_time())
        load(model, path)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times.append(time.process_time())
    seen.check()
    times.append(time.process_time())
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    return times[2] - times[1], times[1] - times[0] + times[3] - times[2], more


if __name__ == "__main__":
    main()
