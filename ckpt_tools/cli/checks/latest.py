"""`ckpt check --latest-good`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_tools.cli.options import show_progress
from ckpt_tools.text import listed, printable

if TYPE_CHECKING:
    from ckpt_tools.operations.check.latest import LatestGood
    from ckpt_tools.operations.check.run import Wanted


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """An option that is given beside one that it has no use for is a mistake.

    Raises:
        UsageError: one is given.
    """
    if given := [name for name, value in others.items() if value]:
        raise click.UsageError(f"{option} does not go with {' and '.join(given)}.")


def show_latest_good(paths: tuple[Path, ...], wanted: Wanted, *, quiet: bool, as_json: bool) -> None:
    """Print the path of the last good checkpoint, and nothing else; what is newer and not good goes to standard error.

    Raises:
        NotACheckpointError: none is good; the exit code is 1.
    """
    from ckpt_tools.operations.check.latest import find_latest_good

    with show_progress(quiet=quiet or as_json) as progress:
        found = find_latest_good(paths, wanted, progress)
    if not quiet:
        _tell_newer(found)
    if found.report is None:
        raise _none_good(paths, found)
    if as_json:
        from ckpt_tools.render.json import print_document

        print_document(found.report.to_json())
    elif sys.stdout.isatty():
        click.echo(printable(found.report.path))
    else:  # exactly as the system has it: `$(...)` is opened
        click.echo(os.fsencode(found.report.path))


def _tell_newer(found: LatestGood) -> None:
    """A line for each newer checkpoint that is not good."""
    from ckpt_tools.operations.check.latest import failures
    from ckpt_tools.render.wording import found_in

    for report in found.passed_over:
        told = (found_in(finding).removeprefix(f"{report.path}: ").rstrip(".") for finding in failures(report))
        reasons = "; ".join(dict.fromkeys(told))
        click.echo(printable(f"not good: {report.path}: {reasons}"), err=True)
    for path in found.unfinished:
        click.echo(printable(f"still being written: {path}"), err=True)


def _none_good(paths: tuple[Path, ...], found: LatestGood) -> Exception:
    from ckpt_tools.errors import NotACheckpointError

    seen = len(found.passed_over) + len(found.unfinished)
    why = "There is none with weights." if not seen else ""
    error = NotACheckpointError(f"No checkpoint below {listed(paths)} is good.", why=why)
    error.exit_code = 1
    return error
