"""The page of `ckpt diff`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ckpt_tools.operations.compare.report import Change, Difference, Only, TensorChange, ValueChange
from ckpt_tools.render.text import Page, Row, counted, path_text, print_rows, rows_of, size_text
from ckpt_tools.render.wording import as_options
from ckpt_tools.text import natural, printable, shape_text, shortened

DiffSort = Literal["file", "name", "size", "max-abs", "max-rel", "l2", "cosine", "changed"]
_SHOWN, _SHOWN_TENSORS = 10, 40
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def print_difference(report: Difference, out: Page, *, show_all: bool = False, sort: DiffSort = "file") -> None:
    """The two files, the sentence, then what differs, a block a kind."""
    sides = (("left", report.left), ("right", report.right))
    lines = [(label, f"{side['path']}  {side['container']}, {size_text(side['bytes'])}") for label, side in sides]
    print_rows(lines, out)
    out.print()
    out.print((printable(report.summary), "bold green" if report.same else "bold yellow"))
    if rows := _facts(report, None if show_all else _SHOWN):
        out.print()
        print_rows(rows, out)
    if report.changed:
        out.print()
        report = replace(report, changed=_sorted(report.changed, sort))
        headings, changed = changed_columns(report, None if show_all else _SHOWN_TENSORS)
        columns = {heading: [row[index] for row in changed] for index, heading in enumerate(headings)}
        if len(changed) < len(report.changed):
            columns[headings[0]].append(f"... {len(report.changed) - len(changed)} more (--all)")
        out.table(columns, right=headings[1:] if is_measured(report) else ())


def _sorted(rows: Sequence[TensorChange], sort: DiffSort) -> list[TensorChange]:
    """Those that are furthest apart first; those of which that is not known last."""
    if sort == "name":
        return sorted(rows, key=lambda row: natural(row.where))
    if sort == "size":
        return sorted(rows, key=lambda row: -math.prod(row.shape or ()))
    return list(rows) if sort == "file" else sorted(rows, key=lambda row: _far(row.gap, sort), reverse=True)


def _far(gap: dict[str, Any] | None, sort: DiffSort) -> tuple[bool, float]:
    key = {"max-abs": "max_abs", "max-rel": "max_rel", "l2": "relative_l2", "changed": "changed_fraction"}.get(sort, sort)
    value = None if gap is None else gap[key]
    return value is not None, 0.0 if value is None else -value if sort == "cosine" else value


def _distance(report: Difference) -> list[Row]:
    found = report.distance
    if found is None:
        return []
    odd = f", {counted(found['nonfinite'], 'place')} with NaN or inf left out" if found["nonfinite"] else ""
    numbers = f"relative L2 {_number(found['relative_l2'])}, cosine {_number(found['cosine'], '{:.6f}')}"
    return [("distance", f"{numbers}, over {counted(found['tensors'], 'tensor')}, {counted(found['elements'], 'value')}{odd}")]


def _facts(report: Difference, limit: int | None) -> list[Row]:
    rows = _compared(report)
    for label, lines in kinds(report, every=limit is None):
        rows += rows_of(label, lines, limit and 3 if label == "" else limit, "--all")
    if report.tensors.get("skipped"):
        hint = "; --values compares across dtypes" if report.dtypes and not is_measured(report) else ""
        rows.append(("skipped", f"{counted(report.tensors['skipped'], 'tensor')} of another shape or dtype{hint}"))
    return rows + _distance(report) + rows_of("note", [as_options(note) for note in report.notes])


def _compared(report: Difference) -> list[Row]:
    """The state dicts that were compared, where it is not plain which."""
    rows = []
    for row in report.state_dicts:
        if row["left"] is not None and row["right"] is not None and len(report.state_dicts) + row["moved"] > 1:
            moved = f" -> {path_text(row['right'])}" if row["moved"] else ""
            rows.append(("compared", f"{path_text(row['left'])}{moved}: {counted(row['shared'], 'tensor')}"))
    return rows


def kinds(report: Difference, *, every: bool) -> Iterator[tuple[str, list[str]]]:
    """The kinds of differences, each with its lines; renamed names stand without a label below how many there are.

    Moves of dtypes and devices are counted, or with `every` a line each.
    """
    yield "removed", [f"- {_only(row)}" for row in report.removed]
    yield "added", [f"+ {_only(row)}" for row in report.added]
    reasons = Counter(row.reason for row in report.renamed)
    if reasons:
        yield "renamed", [", ".join(f"{counted(count, 'tensor')} by {reason}" for reason, count in reasons.items())]
        yield "", [f"{row.left} -> {row.right}" for row in report.renamed]
    yield "shape", [f"~ {row.where}: {shape_text(row.left)} -> {shape_text(row.right)}" for row in report.shapes]
    yield "dtype", _moves(report.dtypes, every=every)
    yield "device", _moves(report.devices, every=every)
    yield "value", [_value(row) for row in sorted(report.values, key=lambda row: row.where.count("."))]
    yield "object", [_value(row) for row in report.objects]


def is_measured(report: Difference) -> bool:
    """Whether its tensors were measured, and not their bytes compared alone."""
    return any(row.gap is not None or row.reason for row in report.changed)


def _only(row: Only) -> str:
    return f"{row.where}  {shape_text(row.shape)}  {row.dtype or '?'}"


def _moves(rows: Sequence[Change], *, every: bool) -> list[str]:
    """Each tensor, or how many tensors went from what to what."""
    if every:
        return [f"~ {row.where}: {row.left} -> {row.right}" for row in rows]
    counts = Counter((row.left, row.right) for row in rows)
    return [f"~ {old} -> {new}: {counted(count, 'tensor')}" for (old, new), count in counts.items()]


def _value(row: ValueChange) -> str:
    sign = _SIGNS[row.kind]
    if row.kind == "changed":
        return f"{sign} {row.where}: {shortened(str(row.left), 60)} -> {shortened(str(row.right), 60)}"
    return f"{sign} {row.where} = {shortened(str(row.right if row.kind == 'added' else row.left), 60)}"


def changed_columns(report: Difference, limit: int | None = None) -> tuple[list[str], list[tuple[str, ...]]]:
    """The tensors that differ as a table: what its columns are called, and its lines."""
    measured = is_measured(report)
    headings = ("max abs", "max rel", "rel L2", "cosine", "changed") if measured else ("shape", "dtype")
    cells = _gap if measured else _what
    lines = [(printable(row.where), *cells(row)) for row in report.changed[:limit]]
    return ["tensor with different numbers", *headings], lines


def _what(row: TensorChange) -> tuple[str, ...]:
    return shape_text(row.shape), row.dtype or "?"


def _gap(row: TensorChange) -> tuple[str, ...]:
    if row.gap is None:
        return "-", "-", "-", "-", printable(row.reason)
    gap = row.gap
    changed = f"{gap['changed']:,} ({100 * gap['changed_fraction']:.3g}%)" if gap["changed"] else "bits only"
    changed += f", {gap['nonfinite']} NaN/inf" if gap["nonfinite"] else ""
    apart = map(_number, (gap["max_abs"], gap["max_rel"], gap["relative_l2"]))
    return *apart, _number(gap["cosine"], "{:.6f}"), changed


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "-" if value is None else form.format(value)
