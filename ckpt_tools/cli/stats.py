"""`ckpt stats`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import click

from ckpt_tools.cli.completion import complete_names, complete_places
from ckpt_tools.cli.options import LOCATION, Once, show_progress


@click.command(short_help="Show what the numbers look like.")
@click.argument("path", metavar="PATH", type=LOCATION)
@click.option(
    "--select",
    cls=Once,
    metavar="WHERE",
    shell_complete=complete_places,
    help="Only one state dict or subtree (model, ema, optimizer).",
)
@click.option(
    "--filter",
    "pattern",
    cls=Once,
    metavar="GLOB",
    shell_complete=complete_names,
    help="Only tensors whose name or path matches.",
)
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up below the first N parts of the names.")
@click.option(
    "--sort", type=click.Choice(["file", "name", "size", "mean", "std", "min", "max", "zeros", "nan"]), default="file",
    show_default=True,
    help="Order of the rows; numbers from the largest magnitude down, nan by how many are NaN or infinite.",
)  # fmt: skip
@click.option("--all", "show_all", is_flag=True, help="Show every tensor.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON; see docs/json.md.")
def stats(
    path: Path, select: str | None, pattern: str | None, depth: int | None, sort: str, show_all: bool, as_json: bool
) -> None:
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
        report = measure(path, select=select, filter=pattern, depth=depth, progress=progress)
    if as_json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    else:
        from ckpt_tools.render.stats import StatsSort, StatsView, print_stats
        from ckpt_tools.render.text import show

        view = StatsView(show_all, depth is not None, cast("StatsSort", sort))
        show(partial(print_stats, report, view))
