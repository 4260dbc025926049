"""`ckpt stats`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from ckpt_tools.cli.options import LOCATION, filter_option, json_option, print_report, select_option
from ckpt_tools.cli.progress import show_progress
from ckpt_tools.render.stats import StatsSort, StatsView, print_stats


@click.command(short_help="Show what the numbers look like.")
@click.argument("path", metavar="PATH", type=LOCATION)
@select_option(help="Only one state dict or subtree (model, ema, optimizer).")
@filter_option(help="Only tensors whose name or path matches.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up below the first N parts of the names.")
@click.option(
    "--sort", type=click.Choice(["file", "name", "size", "mean", "std", "min", "max", "zeros", "nan"]), default="file",
    show_default=True,
    help="Order of the rows; numbers from the largest magnitude down, nan by how many are NaN or infinite.",
)  # fmt: skip
@click.option("--all", is_flag=True, help="Show every tensor.")
@json_option
def stats(path: Path, select: str | None, filter: str | None, depth: int | None, sort: str, all: bool, json: bool) -> None:
    """Show what the numbers look like: mean, std, min, max, zeros, NaN, inf and a histogram of every tensor.

    \b
    ckpt stats model.pth
    ckpt stats --select model --depth 2 training.pth
    ckpt stats --sort std --filter '*.weight' model.safetensors

    Values are read as float64, std divides by n - 1 as torch.std does. NaN and infinite values are counted, and left out of
    the rest.

    Exit code: 0 done, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.compare.stats import stats as measure

    with show_progress() as progress:
        report = measure(path, select=select, filter=filter, depth=depth, progress=progress)
    view = StatsView(all, depth is not None, cast("StatsSort", sort))
    print_report(report, print_stats, json=json, view=view)
