"""`ckpt average`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ckpt_tools.cli.completion import complete_places
from ckpt_tools.cli.options import (
    OUTPUT,
    Once,
    quiet_option,
    show_progress,
)
from ckpt_tools.errors import UsageError


@click.command(short_help="Write the mean of several checkpoints.")
@click.argument("paths", nargs=-1, required=True, type=OUTPUT, metavar="IN IN... OUT")
@click.option("--weights", cls=Once, metavar="W,W,...", help="The weight of each IN, divided by their sum; else all equal.")
@click.option("--unwrap", is_flag=True, help="Compare names without their wrappers, and write them so.")
@click.option("--integers", cls=Once, type=click.Choice(["first", "max"]), help="Which value is taken where integers differ.")
@click.option(
    "--select",
    cls=Once,
    metavar="WHERE",
    shell_complete=complete_places,
    help="One state dict or subtree, in every IN, becomes the whole output.",
)
@click.option(
    "--objects", cls=Once, type=click.Choice(["keep", "plain", "drop"]), help="What happens to objects that are not plain data."
)
@click.option(
    "--format",
    cls=Once,
    type=click.Choice(["pth", "pth-legacy", "safetensors", "dcp"]),
    help="Container of OUT; else by its name.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Report what would happen, write nothing.")
@click.option("--fsync", is_flag=True, help="Make a new OUT durable before returning (a replaced one always is).")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="The report as JSON; see docs/json.md.")
def average(paths: tuple[str, ...], weights: str | None, quiet: bool, as_json: bool, **options: Any) -> None:
    """Write the mean of several checkpoints of one model. OUT is the whole new file or is left alone.

    \b
    ckpt average epoch_8.pth epoch_9.pth epoch_10.pth mean.pth
    ckpt average a.pth b.pth soup.safetensors --weights 0.7,0.3 --unwrap

    Sums are float64, rounded once to the dtype in the first IN. Equal integers stay, num_batches_tracked becomes the largest,
    other integers that differ need --integers. What is not a state dict (optimizer, epoch) comes from the first IN.

    Exit code: 0 done, 2 usage, 3 refused, 130 interrupted.
    """
    from ckpt_tools.operations.average import average as average_checkpoints

    *sources, target = paths
    with show_progress(quiet=quiet) as progress:
        report = average_checkpoints(sources, target, weights=_numbers(weights), progress=progress, **options)
    if as_json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    elif not quiet:
        from ckpt_tools.render.averaged import print_averaged
        from ckpt_tools.render.text import show

        show(partial(print_averaged, report))


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--weights {text!r} is not a list of numbers.", fix="For example: --weights 0.5,0.3,0.2") from None
