"""`ckpt diff`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import click

from ckpt_tools.cli.options import LOCATION, filter_option, print_report, report_options, select_option, show_progress
from ckpt_tools.render.difference import DiffSort, print_difference


@click.command(short_help="Compare two checkpoints.")
@click.argument("left", metavar="A", type=LOCATION)
@click.argument("right", metavar="B", type=LOCATION)
@click.option("--values", is_flag=True, help="Measure the differences (largest, relative, cosine ...).")
@click.option("--contents/--no-contents", default=True, help="Compare the bytes of tensors, or only names, shapes and dtypes.")
@select_option(help="Compare one state dict or subtree; A_PATH=B_PATH for two.")
@filter_option(help="Compare only tensors whose name or path matches, on either side.")
@click.option(
    "--sort", type=click.Choice(["file", "name", "size", "max-abs", "max-rel", "l2", "cosine", "changed"]), default="file",
    show_default=True, help="Order of the tensors that differ, largest difference first. Most need --values.",
)  # fmt: skip
@click.option("--all", is_flag=True, help="Show every line.")
@report_options
def diff(
    left: Path, right: Path, values: bool, contents: bool, select: str | None, filter: str | None, sort: str,
    all: bool, quiet: bool, json: bool,
) -> None:  # fmt: skip
    """Compare two checkpoints of any format.

    \b
    ckpt diff ddp.pth single.pth
    ckpt diff --values epoch_1.pth epoch_2.safetensors
    ckpt diff --select model=. training.pth weights.safetensors
    ckpt diff --values --sort l2 --filter '*.weight' epoch_1.pth epoch_2.pth

    Names may differ by a wrapper or a prefix. --select takes "." for the whole file.

    Exit code: 0 the same, 1 different, 2 usage, 3 a file cannot be read.
    """
    from ckpt_tools.errors import UsageError
    from ckpt_tools.operations.compare.differences import diff as compare

    if values and not contents:
        raise UsageError("--values does not go with --no-contents.")
    if sort not in ("file", "name", "size") and not values:
        raise UsageError(f"--sort {sort} needs --values.")
    with show_progress(quiet=quiet) as progress:
        report = compare(left, right, values=values, contents=contents, select=select, filter=filter, progress=progress)
    print_report(report, print_difference, json=json, quiet=quiet, show_all=all, sort=cast("DiffSort", sort))
    sys.exit(0 if report else 1)
