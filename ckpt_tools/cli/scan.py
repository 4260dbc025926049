"""`ckpt scan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from ckpt_tools.cli.options import PIPED, form_options, jobs_option, print_failure, quiet_option, show_progress
from ckpt_tools.io.source import Handed, is_address, is_there, missing
from ckpt_tools.operations.scan import Scanned, counts
from ckpt_tools.render.findings import of_scanned, print_in_form
from ckpt_tools.render.text import Page, counted, show
from ckpt_tools.text import printable


@click.command(short_help="Check that files are safe to load.")
@click.argument("paths", nargs=-1, required=True, type=PIPED, metavar="PATH...")
@click.option("--all", is_flag=True, help="List all files, also those without code.")
@quiet_option
@form_options
@jobs_option
def scan(paths: tuple[Path, ...], all: bool, quiet: bool, format: str, json: bool, jobs: int | None) -> None:
    """Check that files are safe to load: show the code that loading each would run, without running it.

    \b
    ckpt scan downloads/
    curl -L https://example.org/model.pth | ckpt scan -
    ckpt scan --json downloads/ | jq -r 'select(.verdict == "dangerous") | .path'
    ckpt scan --format sarif models/ > scan.sarif
    ckpt scan --format github models/

    Every file below PATH is examined by its content, files inside archives too. docs/scan.md says what is dangerous.

    Exit code: 0 no file is dangerous, 1 a file is dangerous or could not be examined, 2 usage, 3 no such file.
    """
    from ckpt_tools.operations.scan import files_of, scan_files

    gone = [path for path in paths if not (isinstance(path, Handed) or is_address(path) or is_there(path))]
    files = list(files_of(path for path in paths if path not in gone))
    form = "json" if json else format

    def as_text(report: Scanned) -> None:
        if not quiet and (all or len(files) == 1 or report.verdict != "nothing"):
            show(partial(print_scanned, report))

    with show_progress(quiet=quiet or sys.stdout.isatty()) as progress:  # on a terminal the lines show how far it is
        found = scan_files(files, jobs=jobs or min(4, os.cpu_count() or 1), progress=progress)
        reports = print_in_form(form, found, of_scanned, "ckpt scan", as_text)
    if form == "text" and not quiet and len(reports) > 1:
        show(partial(print_counts, reports))
    for path in gone:
        print_failure(path, missing(path), json=form == "json")
    sys.exit(3 if gone else 0 if min(reports, key=bool, default=True) else 1)


_COLOURS = {"dangerous": "red", "unexamined": "yellow", "needs-code": "cyan", "plain": "green", "nothing": "dim"}
_WORDS = {"plain": "safe", "unexamined": "could not be examined", "needs-code": "needs code", "nothing": "nothing to run"}


def print_scanned(report: Scanned, out: Page) -> None:
    """The line of one file."""
    path = f"{printable(report.path)}: "
    word, _, rest = report.line.removeprefix(path).partition(":")
    out.print((path, ""), (word, _COLOURS[report.verdict]), (f":{rest}" if rest else "", ""))


def print_counts(reports: Sequence[Scanned], out: Page) -> None:
    """The line below all."""
    words = _WORDS | {"needs-code": "need code"}
    found = ", ".join(f"{count:,} {(words if count > 1 else _WORDS).get(row, row)}" for row, count in counts(reports).items())
    out.print((f"{counted(len(reports), 'file')}: {found}", "bold"))
