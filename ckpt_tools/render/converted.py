"""The page of `ckpt convert`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt_tools.names import printable
from ckpt_tools.plain import WITH_OUTER
from ckpt_tools.render.text import add_lines, counted, label_grid, path_text, size_text

if TYPE_CHECKING:
    from ckpt_tools.conversion import Converted
    from ckpt_tools.retarget import FittedTo

_SPEED_FROM = 100 << 20


def print_converted(report: Converted, out: Console) -> None:
    """The page of `ckpt convert`."""
    verb = "would write" if report.dry_run else "wrote"
    out.print(Text(f"{verb} {printable(report.target)}", style="bold"), soft_wrap=True)
    grid = label_grid()
    files = f", {report.files} files" if report.files > 1 else ""
    grid.add_row("container", f"{report.container}, {size_text(report.bytes)}, {counted(report.tensors, 'tensor')}{files}")
    for row in report.state_dicts:
        if row.renamed:
            grid.add_row("names", f"{path_text(row.where)}: {row.renamed} of {row.tensors} renamed")
        else:
            grid.add_row("state dict", f"{path_text(row.where)}: {counted(row.tensors, 'tensor')}")
        for old, new in row.examples:
            grid.add_row("", printable(f"{old} -> {new}"))
    if report.fitted is not None:
        _add_fitted(grid, report.fitted)
    if report.optimizer_names:
        grid.add_row("optimizer", f"{report.optimizer_names} param_names renamed")
    add_lines(grid, "devices", [f"{move}: {counted(count, 'storage')}" for move, count in report.devices.items()])
    add_lines(grid, "cast", [f"{move}: {counted(count, 'tensor')}" for move, count in report.casts.items()])
    add_lines(
        grid, "overflow", [f"{name}: {counted(count, 'value')} became infinite" for name, count in report.overflowed.items()]
    )
    lost = [f"{name}: {counted(count, 'value')} became zero" for name, count in report.underflowed.items()]
    add_lines(grid, "underflow", lost)
    add_lines(grid, "tied", [f"{name} = {other}" for name, other in report.aliases.items()])
    add_lines(grid, "dropped", [f"{path} ({why})" for path, why in report.dropped])
    outer = [row for row in report.objects if row.became != WITH_OUTER]
    add_lines(grid, "object", [f"{path_text(row.where)}: {row.name} -> {row.became}" for row in outer])
    if len(outer) < len(report.objects):
        grid.add_row("object", f"{len(report.objects) - len(outer)} more went with these (--json shows them)")
    add_lines(grid, "note", [note.text for note in report.notes])
    if not report.dry_run:
        speed = f", {size_text(int(report.bytes / report.seconds))}/s" if report.bytes >= _SPEED_FROM else ""
        grid.add_row("time", f"{report.seconds:.2f} s{speed}")
    out.print(grid)


def _add_fitted(grid: Table, fitted: FittedTo) -> None:
    """What was done to fit a target."""
    reasons = ", ".join(f"{count} by {reason}" for reason, count in fitted.reasons.items())
    grid.add_row("fitted to", printable(f"{fitted.target}: {reasons or 'nothing matched'}"))
    for old, new, reason in fitted.renamed[:3]:
        grid.add_row("", printable(f"{old} -> {new} ({reason})"))
    add_lines(grid, "initialised", [f"{row.name}: {row.scheme} (seed {row.seed})" for row in fitted.initialised])
    add_lines(grid, "adapted", [f"{name}: {what}" for name, what in fitted.adapted.items()])
