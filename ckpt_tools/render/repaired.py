"""The page of `ckpt repair`."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ckpt_tools.operations.repair.report import Repaired
from ckpt_tools.render.text import (
    add_lines,
    label_grid,
    path_text,
    size_text,
)
from ckpt_tools.text import printable


def print_repaired(report: Repaired, out: Console) -> None:
    """The page of `ckpt repair`."""
    verb = "would write" if report.dry_run else "wrote"
    out.print(Text(f"{verb} {printable(report.target)}", style="bold"), soft_wrap=True)
    grid = label_grid()
    if report.was:
        grid.add_row("was", printable(report.was))
    grid.add_row("container", f"{report.container}, {size_text(report.bytes)}")
    share = f"{report.saved_bytes / report.tensor_bytes:.1%} of the bytes" if report.tensor_bytes else "no bytes"
    sizes = f"{size_text(report.saved_bytes)} of {size_text(report.tensor_bytes)}"
    grid.add_row("saved", f"{report.saved} of {report.tensors} tensors, {sizes}, {share}")
    add_lines(grid, "kept", [f"{path_text(row.where)}: {row.why}" for row in report.missing if row.kept])
    add_lines(grid, "missing", [f"{path_text(row.where)}: {row.why}" for row in report.missing if not row.kept])
    add_lines(grid, "filled", [f"{name}: {scheme}" for name, scheme in report.filled.items()])
    add_lines(grid, "mended", [_line(row.where, row.text) for row in report.mended if not row.left])
    add_lines(grid, "left", [_line(row.where, row.text) for row in report.mended if row.left])
    add_lines(grid, "note", [text for _, text in report.notes])
    if not (report.missing or report.mended or report.notes or report.was):
        grid.add_row("note", "Nothing had to be repaired.")
    out.print(grid)


def _line(where: list[str | int], text: str) -> str:
    return f"{path_text(where)}: {text}" if where else text
