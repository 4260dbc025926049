"""`ckpt extract-lora`."""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.cli.options import (
    OUT,
    OUTPUT,
    given,
    one_out,
    options_of,
    out_option,
    print_report,
    report_options,
    show_progress,
)
from ckpt_tools.operations.extract_lora import Extracted, ExtractOptions
from ckpt_tools.render.text import Page, counted, print_rows, print_title, rows_of, size_text
from ckpt_tools.text import printable, shape_text


@click.command("extract-lora", short_help="Extract a LoRA adapter from a fine-tune.")
@click.argument("base", type=OUTPUT, metavar="BASE")
@click.argument("tuned", type=OUTPUT, metavar="TUNED")
@click.argument("target", type=OUT, metavar="[OUT]", required=False)
@out_option
@options_of(ExtractOptions, rank={"required": True})
@report_options
def extract_lora(
    base: str, tuned: str, target: str | None, output: str | None, quiet: bool, json: bool, **options: Any
) -> None:
    """Write the difference between BASE and TUNED as a LoRA adapter, and show how much of it the adapter misses.

    \b
    ckpt extract-lora base.safetensors tuned.safetensors adapter --rank 16
    ckpt extract-lora base tuned adapter --rank 64 --only '*_proj.weight' --dtype bf16

    OUT is a folder that PEFT reads: low-rank matrices for linear layers, embeddings and convolutions that differ, whole
    modules of other kinds, such as norms. ckpt convert BASE MERGED --lora OUT applies it.

    Exit code: 0 success, 2 usage, 3 refused, 130 interrupted.
    """
    from ckpt_tools.operations.extract_lora import extract_lora as extract

    if (target := one_out(target, output)) is None:
        raise click.UsageError("Missing OUT.")
    with show_progress(quiet=quiet) as progress:
        report = extract([base, tuned], target, progress=progress, **given(options))
    print_report(report, print_extracted, json=json, quiet=quiet)


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
    rows += rows_of("saved whole", [printable(f"{name}: {why}") for name, why in report.why.items()])
    rows += rows_of("left", [f"{name}: differs, but is not in the adapter" for name in report.left])
    print_rows([*rows, ("unchanged", counted(report.unchanged, "tensor"))], out)
