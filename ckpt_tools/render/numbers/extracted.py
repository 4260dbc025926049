"""The page of `ckpt extract-lora`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.render.plain import Page
from ckpt_tools.render.rows import print_rows, print_title, rows_of
from ckpt_tools.render.text import counted, size_text
from ckpt_tools.text import printable, shape_text

if TYPE_CHECKING:
    from ckpt_tools.operations.extract_lora import Extracted


def print_extracted(report: Extracted, out: Page) -> None:
    """What was written, what it leaves of the change, and where most of that is."""
    print_title(f"{'would write' if report.dry_run else 'wrote'} {report.target}", out)
    biases = f", {counted(report.biases, 'bias', 'biases')}" if report.biases else ""
    rows = [
        ("adapter", f"rank {report.rank}, {counted(len(report.modules), 'module')}{biases}, {size_text(report.bytes)}"),
        ("error", f"{report.error:.3g} of the change (relative Frobenius norm)"),
    ]
    worst = sorted(report.modules, key=lambda row: -row.error)
    rows += rows_of(
        "module", [printable(f"{row.name}: {shape_text(row.shape)}, rank {row.rank}, error {row.error:.3g}") for row in worst]
    )
    rows += rows_of("held whole", report.saved)
    rows += rows_of("left", [f"{name}: differs, and the adapter has no place for it" for name in report.left])
    print_rows([*rows, ("unchanged", counted(report.unchanged, "tensor"))], out)
