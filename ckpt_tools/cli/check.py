"""`ckpt check`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click

from ckpt_tools.cli.options import (
    OUT_PATH,
    PIPED,
    Expanded,
    expand,
    form_options,
    jobs_option,
    once,
    print_others,
    quiet_option,
    show_progress,
)
from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.io.source import Handed, is_address
from ckpt_tools.operations.check.run import Wanted, check_many, load_digests, save_digests
from ckpt_tools.render.checked import print_checked, print_unreadable
from ckpt_tools.render.findings import of_checked, print_in_form
from ckpt_tools.render.text import show
from ckpt_tools.render.wording import found_in
from ckpt_tools.text import listed, printable
from ckpt_tools.tree.output_names import check_document

_JOBS = 4
_SEVERITIES = {"problem": ("problem",), "warning": ("problem", "warning"), "note": ("problem", "warning", "info")}


@click.command(short_help="Check that files are intact.")
@click.argument("paths", nargs=-1, required=True, type=PIPED, metavar="PATH...")
@click.option("--values", is_flag=True, help="Also look at the values: NaN, infinity, all zeros, garbage, untrained heads.")
@click.option("--digest", is_flag=True, help="Print a SHA-256 of every tensor, the same for .pth and .safetensors.")
@once("--output", "-o", type=OUT_PATH, metavar="FILE", help="Write the digests to FILE.")
@once("--against", metavar="FILE", help="Compare with a file of digests or another checkpoint.")
@click.option(
    "--ignore", multiple=True, metavar="CODE", envvar="CKPT_IGNORE", help="Ignore findings with this code. Repeatable."
)
@once(
    "--fail-on", type=click.Choice([*_SEVERITIES]),
    help="Exit with 1 for findings of this severity or worse [warning].",
)  # fmt: skip
@once(
    "--device", metavar="DEVICE",
    help="A device of the machine that loads it (cpu, cuda:1): report tensors on other devices as problems.",
)  # fmt: skip
@click.option(
    "--latest-good", is_flag=True,
    help="Print only the path of the newest good checkpoint (intact, finite, loads) by epoch, step, then time.",
)  # fmt: skip
@jobs_option
@click.option("--overwrite", is_flag=True, help="Replace FILE of --output if it exists.")
@quiet_option
@form_options
def check(
    paths: tuple[Path, ...], values: bool, digest: bool, output: Path | None, against: str | None, ignore: tuple[str, ...],
    fail_on: str | None, device: str | None, latest_good: bool, jobs: int | None, overwrite: bool, quiet: bool, format: str,
    json: bool,
) -> None:  # fmt: skip
    """Check that files are intact and load: every byte is read once. A folder means all checkpoints in it.

    \b
    ckpt check model.pth
    ckpt check --values --json runs/ | jq -r 'select(.verdict and .verdict != "healthy") | .path'
    aws s3 cp s3://bucket/model.pth - | ckpt check -
    ckpt check --digest -o model.digest model.pth
    ckpt check --against model.digest model.safetensors
    ckpt check --format junit runs/ > checkpoints.xml
    python train.py --resume "$(ckpt check --latest-good runs/)"

    Exit code: 0 healthy, 1 findings (--fail-on), 2 usage, 3 a file cannot be read. With --latest-good: 1 none is good.
    """
    form = "json" if json else format
    if latest_good:
        others = {
            "--digest": digest,
            "--output": output,
            "--against": against,
            f"--format {form}": form not in ("text", "json"),
        }
        if beside := [name for name, value in others.items() if value]:
            raise click.UsageError(f"--latest-good does not go with {' and '.join(beside)}.")
        wanted = Wanted(values=True, ignore=frozenset(ignore), device=device)
        show_latest_good(paths, wanted, quiet=quiet, json=form == "json")
        return
    if output is not None and not digest:
        raise click.UsageError("--output needs --digest.")
    expanded = expand(paths) if output is None else _only(paths)
    if output is not None:
        check_document(output, "digests", ".digest", expanded.checkpoints)
    wanted = Wanted(values, digest, None if against is None else load_digests(against), frozenset(ignore), device)
    jobs = jobs or min(_JOBS, os.cpu_count() or 1)
    with show_progress(quiet=quiet or (form != "text" and sys.stdout.isatty())) as progress:
        found = check_many(expanded.checkpoints, wanted, jobs=jobs, progress=progress)
        reports = print_in_form(form, found, of_checked, "ckpt check")
    if output is not None:
        save_digests(reports[0], output, overwrite=overwrite)
    if form == "text" and quiet:
        print_unreadable(reports)
    elif form == "text":
        show(partial(print_checked, reports, digests=digest and output is None))
    if form == "json" or (form == "text" and not quiet):
        print_others(expanded.others, json=form == "json")
    if output is not None and form == "text" and not quiet:
        click.echo(printable(f"wrote {output}"))
    failing = _SEVERITIES[fail_on or "warning"]
    fails = any(finding.severity in failing for report in reports for finding in report.findings)
    sys.exit(3 if any(report.container is None for report in reports) else int(fails))


def _only(paths: tuple[Path, ...]) -> Expanded:
    """The one checkpoint whose digests go into a file: a folder that is one counts alone, whatever lies beside its shards."""
    from ckpt_tools.parts.families import find_layout

    local = [path for path in paths if not isinstance(path, Handed) and not is_address(path)]
    if len(paths) == len(local) == 1 and os.path.isdir(paths[0]) and find_layout(paths[0]) is not None:
        return Expanded(list(paths), {})
    expanded = expand(paths)
    if len(expanded.checkpoints) != 1:
        raise click.UsageError(f"--output is for one checkpoint; here are {len(expanded.checkpoints)}.")
    return expanded


def show_latest_good(paths: tuple[Path, ...], wanted: Wanted, *, quiet: bool, json: bool) -> None:
    """Print the path of the last good checkpoint, and nothing else; what is newer and not good goes to standard error."""
    from ckpt_tools.operations.check.latest import failures, find_latest_good

    with show_progress(quiet=quiet or json) as progress:
        found = find_latest_good(paths, wanted, progress)
    for report in found.passed_over if not quiet else ():
        told = (found_in(finding).removeprefix(f"{report.path}: ").rstrip(".") for finding in failures(report))
        click.echo(printable(f"not good: {report.path}: {'; '.join(dict.fromkeys(told))}"), err=True)
    for path in found.unfinished if not quiet else ():
        click.echo(printable(f"still being written: {path}"), err=True)
    if found.report is None:
        why = "" if found.passed_over or found.unfinished else "There is none with weights."
        error = NotACheckpointError(f"No checkpoint below {listed(paths)} is good.", why=why)
        error.exit_code = 1
        raise error
    if json:
        from ckpt_tools.render.json import print_document

        print_document(found.report.to_json())
    elif sys.stdout.isatty():
        click.echo(printable(found.report.path))
    else:  # exactly as the system has it: `$(...)` is opened
        click.echo(os.fsencode(found.report.path))
