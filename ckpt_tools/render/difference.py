"""The page of `ckpt diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt_tools.render.text import (
    add_lines,
    counted,
    label_grid,
    name_table,
    path_text,
    size_text,
)
from ckpt_tools.render.wording import as_options
from ckpt_tools.text import printable, shortened

if TYPE_CHECKING:
    from ckpt_tools.operations.compare.report import (
        Change,
        Difference,
        Only,
        TensorChange,
        ValueChange,
    )

_SHOWN, _SHOWN_TENSORS = 10, 40
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def print_difference(report: Difference, out: Console, *, show_all: bool = False) -> None:
    """The two files, the sentence, then what differs, a block a kind."""
    grid = label_grid()
    for label, side in (("left", report.left), ("right", report.right)):
        grid.add_row(label, printable(f"{side['path']}  {side['container']}, {size_text(side['bytes'])}"))
    out.print(grid)
    out.print()
    out.print(Text(printable(report.summary), style="bold green" if report.same else "bold yellow"), soft_wrap=True)
    grid = _facts(report, None if show_all else _SHOWN)
    if grid.row_count:
        out.print()
        out.print(grid)
    if report.changed:
        out.print()
        out.print(_changed_table(report.changed, None if show_all else _SHOWN_TENSORS, out, measured=_is_measured(report)))


def _facts(report: Difference, limit: int | None) -> Table:
    grid, rest = label_grid(), "--all"
    for row in report.state_dicts:
        if row["left"] is not None and row["right"] is not None and len(report.state_dicts) + row["moved"] > 1:
            moved = f" -> {path_text(row['right'])}" if row["moved"] else ""
            grid.add_row("compared", f"{path_text(row['left'])}{moved}: {counted(row['shared'], 'tensor')}")
    add_lines(grid, "removed", [f"- {_only(row)}" for row in report.removed], limit, rest)
    add_lines(grid, "added", [f"+ {_only(row)}" for row in report.added], limit, rest)
    reasons = Counter(row.reason for row in report.renamed)
    if reasons:
        grid.add_row("renamed", ", ".join(f"{counted(count, 'tensor')} by {reason}" for reason, count in reasons.items()))
        add_lines(grid, "", [f"{row.left} -> {row.right}" for row in report.renamed], limit and 3, rest)
    add_lines(
        grid, "shape", [f"~ {row.where}: {_shape(row.left)} -> {_shape(row.right)}" for row in report.shapes], limit, rest
    )
    add_lines(grid, "dtype", _moves(report.dtypes, all_=limit is None), limit, rest)
    add_lines(grid, "device", _moves(report.devices, all_=limit is None), limit, rest)
    add_lines(grid, "value", [_value(row) for row in sorted(report.values, key=lambda row: row.where.count("."))], limit, rest)
    add_lines(grid, "object", [_value(row) for row in report.objects], limit, rest)
    if report.tensors.get("skipped"):
        grid.add_row("skipped", f"{counted(report.tensors['skipped'], 'tensor')} of another shape or dtype{_hint(report)}")
    add_lines(grid, "note", [as_options(note) for note in report.notes])
    return grid


def _hint(report: Difference) -> str:
    return "; --values compares across dtypes" if report.dtypes and not _is_measured(report) else ""


def _is_measured(report: Difference) -> bool:
    return any(row.gap is not None or row.reason for row in report.changed)


def _only(row: Only) -> str:
    return f"{row.where}  {_shape(row.shape)}  {row.dtype or '?'}"


def _shape(shape: Sequence[int] | None) -> str:
    return "?" if shape is None else "x".join(map(str, shape)) or "scalar"


def _moves(rows: Sequence[Change], *, all_: bool) -> list[str]:
    """Each tensor, or how many tensors went from what to what."""
    if all_:
        return [f"~ {row.where}: {row.left} -> {row.right}" for row in rows]
    counts = Counter((row.left, row.right) for row in rows)
    return [f"~ {old} -> {new}: {counted(count, 'tensor')}" for (old, new), count in counts.items()]


def _value(row: ValueChange) -> str:
    sign = _SIGNS[row.kind]
    if row.kind == "changed":
        return f"{sign} {row.where}: {shortened(str(row.left), 60)} -> {shortened(str(row.right), 60)}"
    return f"{sign} {row.where} = {shortened(str(row.right if row.kind == 'added' else row.left), 60)}"


def _changed_table(rows: Sequence[TensorChange], limit: int | None, out: Console, *, measured: bool) -> Table:
    shown = rows[:limit]
    names = [printable(row.where) for row in shown]
    headings = ("max abs", "max rel", "cosine", "changed") if measured else ("shape", "dtype")
    lines = [_gap(row) if measured else (_shape(row.shape), row.dtype or "?") for row in shown]
    if len(shown) < len(rows):
        names.append(f"... {len(rows) - len(shown)} more (--all)")
    columns = {heading: [line[index] for line in lines] for index, heading in enumerate(headings)}
    return name_table("tensor with different numbers", names, columns, out, right=headings if measured else ())


def _gap(row: TensorChange) -> tuple[str, ...]:
    if row.gap is None:
        return "-", "-", "-", printable(row.reason)
    gap = row.gap
    changed = f"{gap['changed']:,} ({100 * gap['changed_fraction']:.3g}%)" if gap["changed"] else "bits only"
    changed += f", {gap['nonfinite']} NaN/inf" if gap["nonfinite"] else ""
    return _number(gap["max_abs"]), _number(gap["max_rel"]), _number(gap["cosine"], "{:.6f}"), changed


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "-" if value is None else form.format(value)
