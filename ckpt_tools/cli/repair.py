"""`ckpt repair`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ckpt_tools.cli.options import LOCATION, OUT, one_out, out_option, print_report, report_options, show_progress
from ckpt_tools.operations.repair.mends import Repaired
from ckpt_tools.render.text import Page, path_text, print_rows, print_title, rows_of, size_text
from ckpt_tools.tree.findings import mending


@click.command(short_help="Recover the intact tensors of damaged files.")
@click.argument("source", metavar="IN", type=LOCATION)
@click.argument("target", metavar="[OUT]", type=OUT, required=False)
@out_option
@click.option("--keep-damaged", is_flag=True, help="Keep damaged tensors too, with zeros where bytes are missing.")
@click.option("--tie-equal", is_flag=True, help="Tie matrices that are equal byte by byte.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", "-n", is_flag=True, help="Report what would be recovered; write nothing.")
@report_options
def repair(
    source: Path, target: str | None, output: str | None, keep_damaged: bool, tie_equal: bool,
    overwrite: bool, dry_run: bool, quiet: bool, json: bool,
) -> None:  # fmt: skip
    """Recover the intact tensors of a damaged file, and fix what keeps an intact one from loading. IN is not changed.

    Without OUT it writes the missing index of a folder of shards.

    \b
    ckpt repair cut.pth saved.pth
    ckpt repair --dry-run cut.pth saved.pth
    ckpt repair folder

    Exit code: 0 all recovered, 1 a part is lost (OUT is written without it) or OUT is as dangerous as IN, 2 usage, 3 nothing
    to recover.
    """
    from ckpt_tools.operations.repair.run import repair as repair_checkpoint
    from ckpt_tools.operations.repair.run import write_index

    target = one_out(target, output)
    if target is None:
        if keep_damaged or tie_equal or overwrite:
            raise click.UsageError("These options need an OUT.")
        if not os.path.isdir(source):
            raise click.UsageError(f"Missing OUT: {mending('repair', str(source))}")
        report = write_index(source, dry_run=dry_run)
    else:
        with show_progress(quiet=quiet) as progress:
            report = repair_checkpoint(
                source, target, keep_damaged=keep_damaged, tie_equal=tie_equal,
                overwrite=overwrite, dry_run=dry_run, progress=progress,
            )  # fmt: skip
    print_report(report, print_repaired, json=json, quiet=quiet)
    sys.exit(report.exit_code)


def print_repaired(report: Repaired, out: Page) -> None:
    """The page of `ckpt repair`."""
    print_title(f"{'would write' if report.dry_run else 'wrote'} {report.target}", out)
    share = f"{report.saved_bytes / report.tensor_bytes:.1%} of the bytes" if report.tensor_bytes else "no bytes"
    sizes = f"{size_text(report.saved_bytes)} of {size_text(report.tensor_bytes)}"
    rows = [
        *rows_of("was", [report.was] if report.was else []),
        ("container", f"{report.container}, {size_text(report.bytes)}"),
        ("saved", f"{report.saved} of {report.tensors} tensors, {sizes}, {share}"),
        *rows_of("kept", [f"{path_text(row.where)}: {row.why}" for row in report.missing if row.kept]),
        *rows_of("missing", [f"{path_text(row.where)}: {row.why}" for row in report.missing if not row.kept]),
        *rows_of("mended", [_line(row.where, row.text) for row in report.mended if not row.left]),
        *rows_of("left", [_line(row.where, row.text) for row in report.mended if row.left]),
        *rows_of("note", [text for _, text in report.notes]),
    ]
    if not (report.missing or report.mended or report.notes or report.was):
        rows.append(("note", "Nothing had to be repaired."))
    print_rows(rows, out)


def _line(where: list[str | int], text: str) -> str:
    return f"{path_text(where)}: {text}" if where else text
