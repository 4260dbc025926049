"""`ckpt report`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckpt_tools.cli.completion import complete_places
from ckpt_tools.cli.options import (
    LOCATION,
    Once,
    quiet_option,
    show_progress,
)


@click.command(short_help="Write an HTML page about a checkpoint.")
@click.argument("path", metavar="PATH", type=LOCATION)
@click.argument("other", metavar="[OTHER]", required=False, type=LOCATION)
@click.option("--output", "-o", cls=Once, required=True, type=LOCATION, metavar="FILE", help="The page to write.")
@click.option("--histograms", is_flag=True, help="Read every tensor: mean, spread, extremes and a histogram of each.")
@click.option(
    "--select", cls=Once, metavar="WHERE", shell_complete=complete_places, help="What is compared with OTHER, as in ckpt diff."
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@quiet_option
def report(
    path: Path, other: Path | None, output: Path, histograms: bool, select: str | None, overwrite: bool, quiet: bool
) -> None:
    """Write one self-contained HTML page: overview, bytes by module, tensors to search and sort, findings.

    \b
    ckpt report model.pth -o report.html
    ckpt report --histograms epoch_9.pth epoch_8.pth -o report.html

    With OTHER the page also tells what differs. It loads nothing from the network, and opens in any browser.

    Exit code: 0 written, 2 usage, 3 refused.
    """
    from ckpt_tools.errors import UsageError
    from ckpt_tools.io.output import output_target
    from ckpt_tools.operations.inspect import inspect
    from ckpt_tools.render.html import page, save
    from ckpt_tools.tree.output_names import check_document_name

    if select is not None and other is None:
        raise UsageError("--select says what is compared with OTHER; OTHER is missing.")
    check_document_name(output, "an HTML page", ".html")
    output_target(output, overwrite=overwrite)  # before every tensor is read
    description, stats, difference = inspect(path), None, None
    with show_progress(quiet=quiet) as progress:
        if histograms:
            from ckpt_tools.operations.compare.stats import stats as measure

            stats = measure(path, progress=progress)
    with show_progress(quiet=quiet) as progress:
        if other is not None:
            from ckpt_tools.operations.compare.differences import diff

            difference = diff(path, other, values=True, select=select, progress=progress)
    size = save(
        page(description, stats, difference), output, overwrite=overwrite, inputs=[item for item in (path, other) if item]
    )
    if not quiet:
        from ckpt_tools.render.text import size_text
        from ckpt_tools.text import printable

        sys.stdout.write(f"wrote {printable(str(output))}, {size_text(size)}\n")
