"""`ckpt stats`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from ckpt_tools.cli.options import LOCATION, filter_option, json_option, print_report, select_option, show_progress
from ckpt_tools.render.stats import StatsSort, print_stats


@click.command(short_help="Show statistics of each tensor.")
@click.argument("path", metavar="PATH", type=LOCATION)
@select_option(help="Only one state dict or subtree (model, ema, optimizer).")
@filter_option(help="Only tensors whose name or path matches.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up tensors below the first N parts of their names.")
@click.option(
    "--sort", type=click.Choice(["file", "name", "size", "mean", "std", "min", "max", "zeros", "nan"]), default="file",
    show_default=True,
    help="Order of the rows, largest magnitude first; nan: most NaN or infinite values first.",
)  # fmt: skip
@click.option("--all", is_flag=True, help="Show every tensor.")
@json_option
def stats(path: Path, select: str | None, filter: str | None, depth: int | None, sort: str, all: bool, json: bool) -> None:
    """Show statistics of each tensor: mean, std, min, max, zeros, NaN, inf and a histogram.

    \b
    ckpt stats model.pth
    ckpt stats --select model --depth 2 training.pth
    ckpt stats --sort std --filter '*.weight' model.safetensors

    Computed in float64; std divides by n - 1, as torch.std does. NaN and infinite values are counted and otherwise left out.

    Exit code: 0 success, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.compare.stats import stats as measure

    with show_progress() as progress:
        report = measure(path, select=select, filter=filter, depth=depth, progress=progress)
    print_report(report, print_stats, json=json, show_all=all, modules=depth is not None, sort=cast("StatsSort", sort))
