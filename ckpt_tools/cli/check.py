"""`ckpt check`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click

from ckpt_tools.cli.options import (
    LOCATION,
    Expanded,
    Once,
    expand,
    print_others,
    quiet_option,
    show_progress,
)
from ckpt_tools.io.output import is_address

_JOBS = 4


@click.command(short_help="Read every byte once: is it whole, and does it load?")
@click.argument("paths", nargs=-1, required=True, type=LOCATION, metavar="PATH...")
@click.option("--values", is_flag=True, help="Count NaN and infinite values; find zeros, garbage, heads never trained.")
@click.option("--digest", is_flag=True, help="Take a SHA-256 of every tensor, the same in .pth and .safetensors.")
@click.option("--output", "-o", cls=Once, type=LOCATION, metavar="FILE", help="Write the digests to FILE.")
@click.option("--against", cls=Once, metavar="FILE", help="Compare with a digest file or another checkpoint.")
@click.option("--ignore", multiple=True, metavar="CODE", help="Leave out findings with this code. Repeatable.")
@click.option(
    "--device", cls=Once, metavar="DEVICE",
    help="A device that the loading machine has (cpu, cuda:1): tags of others are a problem; else a note.",
)  # fmt: skip
@click.option(
    "--latest-good", is_flag=True,
    help="Print one path: of the newest checkpoint that is whole, finite and loads; by epoch, step, then time.",
)  # fmt: skip
@click.option("--jobs", "-j", type=click.IntRange(1), metavar="N", help="Number of processes; by default up to 4.")
@click.option("--overwrite", is_flag=True, help="Replace the FILE of --output if it exists.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line; see docs/json.md.")
def check(
    paths: tuple[Path, ...], values: bool, digest: bool, output: Path | None, against: str | None, ignore: tuple[str, ...],
    device: str | None, latest_good: bool, jobs: int | None, overwrite: bool, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Read every byte once: is it whole, and what keeps it from loading? A folder stands for the checkpoints in it.

    \b
    ckpt check model.pth
    ckpt check --values --json runs/ | jq -r 'select(.verdict and .verdict != "healthy") | .path'
    ckpt check --digest -o model.digest model.pth
    ckpt check --against model.digest model.safetensors
    python train.py --resume "$(ckpt check --latest-good runs/)"

    Exit code: 0 healthy, 1 findings (warnings or problems), 3 when one cannot be read. With --latest-good 1 when none is good.
    """
    from ckpt_tools.operations.check.run import Wanted, check_many, load_digests
    from ckpt_tools.render.json import print_document

    if latest_good:
        from ckpt_tools.cli.checks.latest import refuse_beside, show_latest_good

        refuse_beside("--latest-good", {"--digest": digest, "--output": output, "--against": against})
        wanted = Wanted(values=True, ignore=frozenset(ignore), device=device)
        show_latest_good(paths, wanted, quiet=quiet, as_json=as_json)
        return
    if output is not None and not digest:
        raise click.UsageError("--output holds digests: give --digest too.")
    expanded = expand(paths) if output is None else _only(paths, output)
    files = expanded.checkpoints
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
    if as_json or not quiet:
        print_others(expanded.others, as_json=as_json)
    sys.exit(code)


def _only(paths: tuple[Path, ...], output: Path) -> Expanded:
    """The one checkpoint whose digests go into a file: a folder that is one counts alone, whatever lies beside its shards.

    Raises:
        UsageError: there are several, or the file is called a checkpoint.
    """
    from ckpt_tools.formats.folders import find_layout
    from ckpt_tools.tree.output_names import check_document_name

    check_document_name(output, "digests", ".digest")
    if len(paths) == 1 and not is_address(paths[0]) and paths[0].is_dir() and find_layout(paths[0]) is not None:
        return Expanded(list(paths), {})
    expanded = expand(paths)
    if len(expanded.checkpoints) != 1:
        raise click.UsageError(f"--output holds the digests of one checkpoint; the paths have {len(expanded.checkpoints)}.")
    return expanded
