"""`ckpt check`."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
)
from ckpt_tools.cli.progress import show_progress
from ckpt_tools.io.member_paths import Handed
from ckpt_tools.io.output import is_address
from ckpt_tools.operations.check.report import Checked
from ckpt_tools.operations.check.run import Wanted
from ckpt_tools.render.findings import AT_ONCE, PAGES, WHOLE, Logged, print_at_once, print_whole
from ckpt_tools.text import listed, printable

if TYPE_CHECKING:
    from ckpt_tools.operations.check.latest import LatestGood


_JOBS = 4
_SEVERITIES = {"problem": ("problem",), "warning": ("problem", "warning"), "note": ("problem", "warning", "info")}


@click.command(short_help="Read every byte once: is it whole, and does it load?")
@click.argument("paths", nargs=-1, required=True, type=PIPED, metavar="PATH...")
@click.option("--values", is_flag=True, help="Count NaN and infinite values; find zeros, garbage, heads never trained.")
@click.option("--digest", is_flag=True, help="Take a SHA-256 of every tensor, the same in .pth and .safetensors.")
@once("--output", "-o", type=OUT_PATH, metavar="FILE", help="Write the digests to FILE.")
@once("--against", metavar="FILE", help="Compare with a digest file or another checkpoint.")
@click.option(
    "--ignore", multiple=True, metavar="CODE", envvar="CKPT_IGNORE", help="Leave out findings with this code. Repeatable."
)
@once(
    "--fail-on", type=click.Choice([*_SEVERITIES]),
    help="The least finding that makes the exit code 1 [warning].",
)  # fmt: skip
@once(
    "--device", metavar="DEVICE",
    help="A device that the loading machine has (cpu, cuda:1): tags of others are a problem; else a note.",
)  # fmt: skip
@click.option(
    "--latest-good", is_flag=True,
    help="Print one path: of the newest checkpoint that is whole, finite and loads; by epoch, step, then time.",
)  # fmt: skip
@jobs_option
@click.option("--overwrite", is_flag=True, help="Replace the FILE of --output if it exists.")
@quiet_option
@form_options
def check(
    paths: tuple[Path, ...], values: bool, digest: bool, output: Path | None, against: str | None, ignore: tuple[str, ...],
    fail_on: str | None, device: str | None, latest_good: bool, jobs: int | None, overwrite: bool, quiet: bool, format: str,
    json: bool,
) -> None:  # fmt: skip
    """Read every byte once: is it whole, and what keeps it from loading? A folder stands for the checkpoints in it.

    \b
    ckpt check model.pth
    ckpt check --values --json runs/ | jq -r 'select(.verdict and .verdict != "healthy") | .path'
    aws s3 cp s3://bucket/model.pth - | ckpt check -
    ckpt check --digest -o model.digest model.pth
    ckpt check --against model.digest model.safetensors
    ckpt check --format junit runs/ > checkpoints.xml
    python train.py --resume "$(ckpt check --latest-good runs/)"

    Exit code: 0 healthy, 1 findings (--fail-on and worse), 3 when one cannot be read. With --latest-good 1 when none is good.
    """
    from ckpt_tools.operations.check.run import Wanted, load_digests

    form = "json" if json else format
    jobs = 1 if any(isinstance(path, Handed) for path in paths) else jobs  # a pipe is read here
    if latest_good:
        others = {"--digest": digest, "--output": output, "--against": against, f"--format {form}": form not in PAGES}
        refuse_beside("--latest-good", others)
        wanted = Wanted(values=True, ignore=frozenset(ignore), device=device)
        show_latest_good(paths, wanted, quiet=quiet, json=form == "json")
        return
    if output is not None and not digest:
        raise click.UsageError("--output holds digests: give --digest too.")
    expanded = expand(paths) if output is None else _only(paths, output)
    wanted = Wanted(values, digest, None if against is None else load_digests(against), frozenset(ignore), device)
    checking = _Checking(form, quiet, _SEVERITIES[fail_on or "warning"], keep=output is not None)
    checking.run(expanded.checkpoints, wanted, jobs or min(_JOBS, os.cpu_count() or 1))
    if output is not None:
        from ckpt_tools.operations.check.run import save_digests

        save_digests(checking.reports[0], output, overwrite=overwrite)
    checking.print_rest(digests=digest and output is None)
    if form == "json" or (form == "text" and not quiet):
        print_others(expanded.others, json=form == "json")
    sys.exit(checking.code)


class _Checking:
    """Checks, and prints what was found in one form: as it comes where the form allows, so that nothing has to be kept."""

    def __init__(self, form: str, quiet: bool, failing: Collection[str], *, keep: bool) -> None:
        self.form, self.quiet, self.failing, self.keep = form, quiet, failing, keep or form == "text"
        self.code = 0
        self.reports: list[Checked] = []
        self.logged: list[Logged] = []

    def run(self, files: Sequence[Path], wanted: Wanted, jobs: int) -> None:
        """Check the files, in their order."""
        from ckpt_tools.operations.check.run import check_many

        quiet = self.quiet or (self.form != "text" and sys.stdout.isatty())
        with show_progress(quiet=quiet) as progress:
            for report in check_many(files, wanted, jobs=jobs, progress=progress):
                found = any(finding.severity in self.failing for finding in report.findings)
                self.code = max(self.code, 3 if report.exit_code == 3 else int(found))
                self._take(report)

    def _take(self, report: Checked) -> None:
        if self.keep:
            self.reports.append(report)
        if self.form == "text":
            return
        from ckpt_tools.render.findings import of_checked

        if self.form in AT_ONCE:
            print_at_once(self.form, report, of_checked)
        else:
            self.logged.append(of_checked(report))

    def print_rest(self, *, digests: bool) -> None:
        """What is printed when all is known."""
        if self.form in WHOLE:
            print_whole(self.form, self.logged, "ckpt check")
        elif self.form == "text" and self.quiet:
            from ckpt_tools.render.checked import print_unreadable

            print_unreadable(self.reports)
        elif self.form == "text":
            from ckpt_tools.render.checked import print_checked
            from ckpt_tools.render.text import show

            show(partial(print_checked, self.reports, digests=digests))


def _only(paths: tuple[Path, ...], output: Path) -> Expanded:
    """The one checkpoint whose digests go into a file: a folder that is one counts alone, whatever lies beside its shards."""
    from ckpt_tools.formats.folders import find_layout
    from ckpt_tools.tree.output_names import check_document_name

    check_document_name(output, "digests", ".digest")
    local = [path for path in paths if not isinstance(path, Handed) and not is_address(path)]
    if len(paths) == len(local) == 1 and os.path.isdir(paths[0]) and find_layout(paths[0]) is not None:
        return Expanded(list(paths), {})
    expanded = expand(paths)
    if len(expanded.checkpoints) != 1:
        raise click.UsageError(f"--output holds the digests of one checkpoint; the paths have {len(expanded.checkpoints)}.")
    return expanded


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """An option that is given beside one that it has no use for is a mistake."""
    if given := [name for name, value in others.items() if value]:
        raise click.UsageError(f"{option} does not go with {' and '.join(given)}.")


def show_latest_good(paths: tuple[Path, ...], wanted: Wanted, *, quiet: bool, json: bool) -> None:
    """Print the path of the last good checkpoint, and nothing else; what is newer and not good goes to standard error."""
    from ckpt_tools.operations.check.latest import find_latest_good

    with show_progress(quiet=quiet or json) as progress:
        found = find_latest_good(paths, wanted, progress)
    if not quiet:
        _tell_newer(found)
    if found.report is None:
        raise _none_good(paths, found)
    if json:
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
