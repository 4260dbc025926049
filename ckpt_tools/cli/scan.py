"""`ckpt scan`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click

from ckpt_tools.cli.checks.forms import AT_ONCE, WHOLE, form_options, print_at_once, print_whole
from ckpt_tools.cli.streams.stdin import PIPED, with_pipes_read
from ckpt_tools.io.member_paths import Handed


@click.command(short_help="Show for every file below PATH whether it is safe to load.")
@click.argument("paths", nargs=-1, required=True, type=PIPED, metavar="PATH...")
@click.option("--all", "show_all", is_flag=True, help="List files that hold nothing to run, too.")
@form_options
@click.option("--jobs", "-j", type=click.IntRange(1), metavar="N", help="Number of processes; by default up to 4.")
def scan(paths: tuple[Path, ...], show_all: bool, form: str, as_json: bool, jobs: int | None) -> None:
    """Is it safe to load? Show for every file below PATH what loading it would run, without running it.

    \b
    ckpt scan downloads/
    curl -L https://example.org/model.pth | ckpt scan -
    ckpt scan --json downloads/ | jq -r 'select(.verdict == "dangerous") | .path'
    ckpt scan --format sarif models/ > scan.sarif
    ckpt scan --format github models/

    Every file is examined by its content, archives in archives too. docs/scan.md says what is dangerous.

    Exit code: 0 none is dangerous, 1 one is, or could not be examined, 3 there is no such file.
    """
    from ckpt_tools.operations.scan import files_of, scan_files
    from ckpt_tools.render.logs.rows import of_scanned

    files = list(files_of(with_pipes_read(paths)))
    jobs = 1 if any(isinstance(path, Handed) for path in files) else jobs  # a pipe is read here
    form = "json" if as_json else form
    reports = []
    for report in scan_files(files, jobs=jobs or min(4, os.cpu_count() or 1)):
        reports.append(report)
        if form in AT_ONCE:
            print_at_once(form, report, of_scanned)
        elif form == "text" and (show_all or len(files) == 1 or report.verdict != "nothing"):
            from ckpt_tools.render.safety.scanned import print_scanned
            from ckpt_tools.render.text import show

            show(partial(print_scanned, report))
    if form in WHOLE:
        print_whole(form, [of_scanned(report) for report in reports], "ckpt scan")
    elif form == "text" and len(reports) > 1:
        from ckpt_tools.render.safety.scanned import print_counts
        from ckpt_tools.render.text import show

        show(partial(print_counts, reports))
    sys.exit(int(any(report.failed for report in reports)))
