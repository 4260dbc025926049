"""`ckpt report`."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePath

import click

from ckpt_tools.cli.options import LOCATION, OUT_PATH, once, quiet_option, select_option, show_progress


@click.command(short_help="Write an HTML report.")
@click.argument("path", metavar="PATH", type=LOCATION)
@click.argument("other", metavar="[OTHER]", required=False, type=LOCATION)
@once("--output", "-o", type=OUT_PATH, metavar="FILE", help="The page to write [name of PATH with .html, in this folder].")
@click.option("--values", is_flag=True, help="Also show statistics and a histogram of each tensor.")
@select_option(help="What to compare with OTHER, as in ckpt diff.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@quiet_option
def report(
    path: Path, other: Path | None, output: Path | None, values: bool, select: str | None, overwrite: bool, quiet: bool
) -> None:
    """Write an HTML report in one file: overview, bytes by module, tensors to search and sort, findings.

    \b
    ckpt report model.pth
    ckpt report --values epoch_9.pth epoch_8.pth -o report.html

    With OTHER it also shows the differences. The page loads nothing from the network.

    Exit code: 0 success, 2 usage, 3 refused.
    """
    from ckpt_tools.render.html import report as write_report

    if other is not None and output is None and other.suffix in (".html", ".htm"):
        raise click.UsageError(f"To write the page to {other}: -o {other}")
    with show_progress(quiet=quiet) as progress:
        written = write_report(
            path, other, output=output or _page_for(path), values=values, select=select, overwrite=overwrite, progress=progress
        )
    if not quiet:
        from ckpt_tools.render.text import size_text
        from ckpt_tools.text import printable

        sys.stdout.write(f"wrote {printable(written.output)}, {size_text(written.bytes)}\n")


def _page_for(path: Path) -> Path:
    """The page of a checkpoint, in the current folder: `epoch_9.html` for `runs/epoch_9.pth`."""
    from ckpt_tools.tree.findings import stem_and_extension

    stem = stem_and_extension(os.fspath(path).rstrip("/"))[0] if not os.path.isdir(path) else os.path.realpath(path)
    return Path(f"{PurePath(stem).name or 'report'}.html")
