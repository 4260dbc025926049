"""The page of `ckpt average`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ckpt_tools.render.converted import object_rows
from ckpt_tools.render.text import (
    add_lines,
    counted,
    label_grid,
    size_text,
)
from ckpt_tools.render.wording import as_options
from ckpt_tools.text import printable

if TYPE_CHECKING:
    from ckpt_tools.operations.average import Averaged


def print_averaged(report: Averaged, out: Console) -> None:
    """What was written, from which files with which weights, and what has no mean."""
    output = report.output
    verb = "would write" if output.dry_run else "wrote"
    out.print(Text(f"{verb} {printable(output.target)}", style="bold"), soft_wrap=True)
    grid = label_grid()
    grid.add_row("container", f"{output.container}, {size_text(output.bytes)}, {counted(output.tensors, 'tensor')}")
    files = [f"{weight:.4g} x {path}" for path, weight in zip(report.sources, report.weights, strict=True)]
    add_lines(grid, "mean of", files)
    grid.add_row("averaged", counted(report.averaged, "tensor"))
    if report.kept:
        grid.add_row("kept", f"{counted(report.kept, 'tensor')} without a mean, equal in all files")
    add_lines(grid, "largest", report.largest)
    add_lines(grid, "first", report.first)
    for row in object_rows(output):
        grid.add_row(*row)
    add_lines(grid, "note", [as_options(note.text) for note in output.notes])
    out.print(grid)
