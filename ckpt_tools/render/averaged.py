"""The page of `ckpt average`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.render.converted import object_rows
from ckpt_tools.render.plain import Page
from ckpt_tools.render.rows import print_rows, print_title, rows_of
from ckpt_tools.render.text import counted, size_text
from ckpt_tools.render.wording import as_options
from ckpt_tools.text import printable

if TYPE_CHECKING:
    from ckpt_tools.operations.average import Averaged


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
    if report.spread is not None and report.spread["relative"]:
        name, relative = report.spread["name"], report.spread["relative"]
        rows.append(("spread", printable(f"largest in {name}: {100 * relative:.3g}% of the mean's length")))
    if report.kept:
        rows.append(("kept", f"{counted(report.kept, 'tensor')} without a mean, equal in all files"))
    rows += rows_of("largest", report.largest) + rows_of("first", report.first) + object_rows(output)
    print_rows(rows + rows_of("note", [as_options(note.text) for note in output.notes]), out)
