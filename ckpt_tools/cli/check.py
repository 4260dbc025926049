"""`ckpt check`."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_tools.cli.checks.forms import AT_ONCE, PAGES, WHOLE, form_options, print_at_once, print_whole
from ckpt_tools.cli.options import (
    OUT_PATH,
    Expanded,
    Once,
    expand,
    print_others,
    quiet_option,
    show_progress,
)
from ckpt_tools.cli.streams.stdin import PIPED, with_pipes_read
from ckpt_tools.io.member_paths import Handed
from ckpt_tools.io.output import is_address

if TYPE_CHECKING:
    from ckpt_tools.operations.check.report import Checked
    from ckpt_tools.operations.check.run import Wanted
    from ckpt_tools.render.logs.rows import Logged

_JOBS = 4
_SEVERITIES = {"problem": ("problem",), "warning": ("problem", "warning"), "note": ("problem", "warning", "info")}


@click.command(short_help="Read every byte once: is it whole, and does it load?")
@click.argument("paths", nargs=-1, required=True, type=PIPED, metavar="PATH...")
@click.option("--values", is_flag=True, help="Count NaN and infinite values; find zeros, garbage, heads never trained.")
@click.option("--digest", is_flag=True, help="Take a SHA-256 of every tensor, the same in .pth and .safetensors.")
@click.option("--output", "-o", cls=Once, type=OUT_PATH, metavar="FILE", help="Write the digests to FILE.")
@click.option("--against", cls=Once, metavar="FILE", help="Compare with a digest file or another checkpoint.")
@click.option(
    "--ignore", multiple=True, metavar="CODE", envvar="CKPT_IGNORE", help="Leave out findings with this code. Repeatable."
)
@click.option(
    "--fail-on", cls=Once, type=click.Choice([*_SEVERITIES]),
    help="The least finding that makes the exit code 1 [warning].",
)  # fmt: skip
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
@form_options
def check(
    paths: tuple[Path, ...], values: bool, digest: bool, output: Path | None, against: str | None, ignore: tuple[str, ...],
    fail_on: str | None, device: str | None, latest_good: bool, jobs: int | None, overwrite: bool, quiet: bool, form: str,
    as_json: bool,
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

    form, paths = "json" if as_json else form, with_pipes_read(paths)
    jobs = 1 if any(isinstance(path, Handed) for path in paths) else jobs  # a pipe is read here
    if latest_good:
        from ckpt_tools.cli.checks.latest import refuse_beside, show_latest_good

        others = {"--digest": digest, "--output": output, "--against": against, f"--format {form}": form not in PAGES}
        refuse_beside("--latest-good", others)
        wanted = Wanted(values=True, ignore=frozenset(ignore), device=device)
        show_latest_good(paths, wanted, quiet=quiet, as_json=form == "json")
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
        print_others(expanded.others, as_json=form == "json")
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
        from ckpt_tools.render.logs.rows import of_checked

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
    """The one checkpoint whose digests go into a file: a folder that is one counts alone, whatever lies beside its shards.

    Raises:
        UsageError: there are several, or the file is called a checkpoint.
    """
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
