"""`ckpt check`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click

from ckpt_tools.cli.options import (
    LOCATION,
    Once,
    expand,
    quiet_option,
    show_progress,
)

_JOBS = 4


@click.command()
@click.argument("paths", nargs=-1, required=True, type=LOCATION, metavar="PATH...")
@click.option("--values", is_flag=True, help="Count NaN and infinite values; find zeros, garbage, heads never trained.")
@click.option("--digest", is_flag=True, help="A SHA-256 of every tensor, the same in .pth and .safetensors.")
@click.option("--output", "-o", cls=Once, type=LOCATION, metavar="FILE", help="Write the digests to FILE.")
@click.option("--against", cls=Once, metavar="FILE", help="Compare with a digest file or another checkpoint.")
@click.option("--ignore", multiple=True, metavar="CODE", help="Leave out findings with this code. Repeatable.")
@click.option(
    "--device", cls=Once, metavar="DEVICE",
    help="What the machine has that will load it (cpu, cuda:1): tags of other devices are a problem, else a note.",
)  # fmt: skip
@click.option("--jobs", "-j", type=click.IntRange(1), metavar="N", help="Processes for several files; else up to 4.")
@click.option("--overwrite", is_flag=True, help="Replace the FILE of --output if it exists.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line; see docs/json.md.")
def check(
    paths: tuple[Path, ...], values: bool, digest: bool, output: Path | None, against: str | None, ignore: tuple[str, ...],
    device: str | None, jobs: int | None, overwrite: bool, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Read every byte once: is it whole, and what keeps it from loading? A folder stands for the checkpoints in it.

    \b
    ckpt check model.pth
    ckpt check --values --json runs/ | jq -r 'select(.verdict != "healthy") | .path'
    ckpt check --digest -o model.digest model.pth
    ckpt check --against model.digest model.safetensors

    Exit code: 0 healthy, 1 findings (warnings or problems), 3 when one cannot be read.
    """
    from ckpt_tools.operations.check.run import Wanted, check_many, load_digests
    from ckpt_tools.render.json import print_document

    if output is not None and not digest:
        raise click.UsageError("--output holds digests: give --digest too.")
    files = expand(paths)
    if output is not None and len(files) != 1:
        raise click.UsageError(f"--output holds the digests of one checkpoint; here are {len(files)}.")
    wanted = Wanted(values, digest, None if against is None else load_digests(against), frozenset(ignore), device)
    code, reports = 0, []
    with show_progress(quiet=quiet or (as_json and sys.stdout.isatty())) as progress:
        for report in check_many(files, wanted, jobs=jobs or min(_JOBS, os.cpu_count() or 1), progress=progress):
            code = max(code, report.exit_code)
            if as_json:  # as it comes: of thousands of files nothing is kept
                print_document(report.to_json())
            if output is not None or not as_json:
                reports.append(report)
    if output is not None:
        from ckpt_tools.operations.check.run import save_digests

        save_digests(reports[0], output, overwrite=overwrite)
    if quiet and not as_json:
        from ckpt_tools.render.checked import print_unreadable

        print_unreadable(reports)
    elif not as_json:
        from ckpt_tools.render.checked import print_checked
        from ckpt_tools.render.text import show

        show(partial(print_checked, reports, digests=digest and output is None))
    sys.exit(code)
