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
from ckpt_tools.render.findings import AT_ONCE, WHOLE, print_at_once, print_whole
from ckpt_tools.render.text import Page, counted
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
    from ckpt_tools.render.findings import of_scanned

    gone = [path for path in paths if not (isinstance(path, Handed) or is_address(path) or is_there(path))]
    files = list(files_of(path for path in paths if path not in gone))
    jobs = 1 if any(isinstance(path, Handed) for path in files) else jobs  # a pipe is read here
    form = "json" if json else format
    reports, done, total = list[Scanned](), 0, sum(map(_size, files))
    unmoved = quiet or (sys.stdout.isatty() and form not in WHOLE)  # where the lines themselves show how far it is
    with show_progress(quiet=unmoved) as progress:
        for report in scan_files(files, jobs=jobs or min(4, os.cpu_count() or 1)):
            reports.append(report)
            done += report.file_bytes
            progress(min(done, total), total)
            if form in AT_ONCE:
                print_at_once(form, report, of_scanned)
            elif form == "text" and not quiet and (all or len(files) == 1 or report.verdict != "nothing"):
                from ckpt_tools.render.text import show

                show(partial(print_scanned, report))
    if form in WHOLE:
        print_whole(form, [of_scanned(report) for report in reports], "ckpt scan")
    elif form == "text" and not quiet and len(reports) > 1:
        from ckpt_tools.render.text import show

        show(partial(print_counts, reports))
    for path in gone:
        print_failure(path, missing(path), json=form == "json")
    sys.exit(3 if gone else 0 if min(reports, key=bool, default=True) else 1)


def _size(path: str | os.PathLike[str]) -> int:
    """The bytes of a file; 0 of an address, and of what is not there, which is told when it is opened."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


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
