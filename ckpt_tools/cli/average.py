"""`ckpt average`."""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.cli.options import OUT, OUTPUT, given, options_of, out_option, print_report, report_options, show_progress
from ckpt_tools.operations.average import Averaged, AverageOptions
from ckpt_tools.render.converted import object_rows
from ckpt_tools.render.text import Page, counted, print_rows, print_title, rows_of, size_text
from ckpt_tools.render.wording import as_options


@click.command(short_help="Average several checkpoints.")
@click.argument("paths", nargs=-1, required=True, type=OUTPUT, metavar="IN IN... OUT")
@out_option
@options_of(AverageOptions)
@report_options
def average(paths: tuple[str, ...], output: str | None, quiet: bool, json: bool, **options: Any) -> None:
    """Average several checkpoints of one model into OUT. If it fails or is interrupted, OUT stays as it was.

    \b
    ckpt average epoch_8.pth epoch_9.pth epoch_10.pth mean.pth
    ckpt average a.pth b.pth soup.safetensors --weights 0.7,0.3 --unwrap

    Means are computed in float64 and rounded once; of different float dtypes OUT has the smallest that holds all.
    num_batches_tracked becomes the largest, other integers that differ need --integers. Everything outside the state dict
    (optimizer, epoch) comes from the first IN.

    Exit code: 0 success, 2 usage, 3 refused, 130 interrupted.
    """
    from ckpt_tools.operations.average import average as average_checkpoints

    *sources, target = paths if output is None else (*paths, output)
    target = OUT.convert(target, None, None)
    with show_progress(quiet=quiet) as progress:
        report = average_checkpoints(sources, target, progress=progress, **given(options))
    print_report(report, print_averaged, json=json, quiet=quiet)


def print_averaged(report: Averaged, out: Page) -> None:
    """What was written, from which files with which weights, and what has no mean."""
    output = report.output
    print_title(f"{'would write' if output.dry_run else 'wrote'} {output.target}", out)
    files = [f"{weight:.4g} x {path}" for path, weight in zip(report.sources, report.weights, strict=True)]
    rows = [
        ("container", f"{output.container}, {size_text(output.bytes)}, {counted(output.tensors, 'tensor')}"),
        *rows_of("mean of", files),
        ("averaged", counted(report.averaged, "tensor")),
    ]
    if report.kept:
        rows.append(("kept", f"{counted(report.kept, 'tensor')} equal in all files, not averaged"))
    rows += rows_of("largest", report.largest) + rows_of("first", report.first) + object_rows(output)
    print_rows(rows + rows_of("note", [as_options(note.text) for note in output.notes]), out)
