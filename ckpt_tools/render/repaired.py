"""The page of `ckpt repair`."""

from __future__ import annotations

from ckpt_tools.operations.repair.report import Repaired
from ckpt_tools.render.plain import Page
from ckpt_tools.render.rows import print_rows, print_title, rows_of
from ckpt_tools.render.text import path_text, size_text


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
        *rows_of("filled", [f"{name}: {scheme}" for name, scheme in report.filled.items()]),
        *rows_of("mended", [_line(row.where, row.text) for row in report.mended if not row.left]),
        *rows_of("left", [_line(row.where, row.text) for row in report.mended if row.left]),
        *rows_of("note", [text for _, text in report.notes]),
    ]
    if not (report.missing or report.mended or report.notes or report.was):
        rows.append(("note", "Nothing had to be repaired."))
    print_rows(rows, out)


def _line(where: list[str | int], text: str) -> str:
    return f"{path_text(where)}: {text}" if where else text
