"""The page of `ckpt convert`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_tools.edit.objects.known import WITH_OUTER
from ckpt_tools.errors import CkptError
from ckpt_tools.operations.convert.report import Converted, RenamedNames
from ckpt_tools.render.text import Page, Row, by_reason, counted, path_text, print_rows, print_title, rows_of, size_text
from ckpt_tools.render.wording import as_options
from ckpt_tools.text import listed, printable

if TYPE_CHECKING:
    from ckpt_tools.edit.lora.planning import Merged
    from ckpt_tools.fit.retarget import FittedTo


def print_converted(report: Converted, out: Page) -> None:
    """What was written, and how it differs from IN."""
    print_title(f"{'would write' if report.dry_run else 'wrote'} {report.target}", out)
    print_rows(_rows(report), out)


def print_several(
    sources: Sequence[object], targets: Sequence[object], results: Sequence[Converted | CkptError], out: Page,
    *, passed: int = 0, every: int = 0,
) -> None:  # fmt: skip
    """A line for each of several conversions, and how many were done; `passed` were done before, `every` is all of all jobs."""
    done = [result for result in results if not isinstance(result, CkptError)]
    verb = "would write" if any(report.dry_run for report in done) else "wrote"
    size = size_text(sum(report.bytes for report in done))
    refused = f"; {len(results) - len(done)} refused" if len(done) < len(results) else ""
    reports = [None if isinstance(result, CkptError) else result for result in results]
    columns = {
        "IN": [printable(str(source)) for source in sources],
        verb: ["refused" if made is None else printable(str(target)) for target, made in zip(targets, reports, strict=True)],
        "tensors": ["" if report is None else f"{report.tensors:,}" for report in reports],
        "renamed": ["" if report is None else f"{sum(row.renamed for row in report.state_dicts):,}" for report in reports],
        "notes": ["" if report is None else f"{len(report.notes):,}" for report in reports],
        "bytes": ["" if report is None else size_text(report.bytes) for report in reports],
    }
    if sources:
        out.table(columns, right=("tensors", "renamed", "notes", "bytes"))
        for note in (note for report in done for note in report.notes if note.code.startswith("dangerous")):
            out.print(f"\n{note.text}")
        notes = "; --json shows the notes" if any(report.notes for report in done) else ""
        out.print(f"\n{verb} {len(done)} of {counted(len(results), 'file')}, {size}{refused}{notes}")
    if others := every - len(results) - passed:
        out.print(f"{counted(others, 'file')} {'is' if others == 1 else 'are'} for the other jobs")
    if passed:
        out.print(f"{counted(passed, 'file')} {'was' if passed == 1 else 'were'} done before")


def _rows(report: Converted) -> list[Row]:
    files = f", {report.files} files" if report.files > 1 else ""
    rows = [("container", f"{report.container}, {size_text(report.bytes)}, {counted(report.tensors, 'tensor')}{files}")]
    for state_dict in report.state_dicts:
        rows += _names(state_dict)
    for adapter in report.merged:
        rows += _merged(adapter)
    rows += rows_of("filled", [f"{name}: {where}" for name, where in report.filled.items()])
    if report.fitted is not None:
        rows += _fitted(report.fitted)
    if report.optimizer_names:
        rows.append(("optimizer", f"{report.optimizer_names} param_names renamed"))
    if report.compacted:
        rows.append(("compacted", f"{counted(report.compacted, 'storage')}, {size_text(report.saved)} saved"))
    counts = (
        ("devices", report.devices, "storage", ""), ("dequantised", report.dequantised, "tensor", ""),
        ("cast", report.casts, "tensor", ""), ("overflow", report.overflowed, "value", " became infinite"),
        ("underflow", report.underflowed, "value", " became zero"),
        ("saturated", report.saturated, "value", " became the largest of the dtype"),
        ("nan", report.nan, "value", " NaN by its code or scale"),
    )  # fmt: skip
    for label, of_names, thing, became in counts:
        rows += rows_of(label, [f"{name}: {counted(count, thing)}{became}" for name, count in of_names.items()])
    rows += rows_of("tied", [f"{name} = {other}" for name, other in report.aliases.items()])
    rows += rows_of("dropped", [f"{path} ({as_options(why)})" for path, why in report.dropped])
    rows += object_rows(report)
    rows += rows_of("copied" if not report.dry_run else "would copy", report.companions)
    rows += rows_of("stayed", [f"{name} ({as_options(why)})" for name, why in report.stayed])
    rows += rows_of("note", [as_options(note.text) for note in report.notes])
    if not report.dry_run:
        rows.append(("time", f"{report.seconds:.2f} s"))
    return rows


def object_rows(report: Converted) -> list[Row]:
    """What became of objects; those inside of others are counted."""
    outer = [fate for fate in report.objects if fate.became != WITH_OUTER]
    rows = rows_of("object", [f"{path_text(fate.where)}: {fate.name} -> {fate.became}" for fate in outer])
    if len(outer) < len(report.objects):
        rows.append(("object", f"{len(report.objects) - len(outer)} more inside these (--json lists them)"))
    return rows


def _names(state_dict: RenamedNames) -> list[Row]:
    where = path_text(state_dict.where)
    if not state_dict.renamed:  # IN's, which says nothing of OUT
        return []
    examples = [("", printable(f"{old} -> {new}")) for old, new in state_dict.examples]
    return [("names", f"{where}: {state_dict.renamed} of {state_dict.tensors} renamed"), *examples]


def _merged(adapter: Merged) -> list[Row]:
    """What was done with an adapter."""
    ranks = ", ".join(map(str, sorted(adapter.ranks)))
    dora = f", {adapter.dora} with magnitudes (DoRA)" if adapter.dora else ""
    biases = f", {counted(adapter.biases, 'bias', 'biases')}" if adapter.biases else ""
    biases += f", {counted(adapter.differences, 'difference')}" if adapter.differences else ""
    weight = "" if adapter.weight == 1 else f", times {adapter.weight:g}"
    scales = listed([f"{scale:g}" for scale in adapter.scales], 3)
    what = f"{counted(adapter.modules, 'module')}{dora}{biases}, rank {ranks}, scale {scales}{weight}"
    rows = [("lora", printable(f"{adapter.adapter}: {what}"))]
    rows += rows_of("", [f"{name}: the adapter's own" for name in adapter.saved])
    return rows + rows_of("", [f"{name}: added, the adapter's own" for name in adapter.added])


def _fitted(fitted: FittedTo) -> list[Row]:
    """What was done to fit a target."""
    reasons = ", ".join(by_reason(fitted.reasons))
    rows = [("fitted to", printable(f"{fitted.target}: {reasons or 'nothing matched'}"))]
    rows += [("", printable(f"{old} -> {new} ({reason})")) for old, new, reason in fitted.renamed[:3]]
    rows += rows_of("sizes", [f"{name} = {size}" for name, size in fitted.values.items()])
    rows += rows_of("initialised", [f"{row.name}: {row.scheme} (seed {row.seed})" for row in fitted.initialised])
    return rows + rows_of("adapted", [f"{name}: {what}" for name, what in fitted.adapted.items()])
