"""`ckpt match`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import click

from ckpt_tools.cli.completion import complete_places
from ckpt_tools.cli.options import (
    LOCATION,
    Once,
    options_of,
    quiet_option,
)
from ckpt_tools.fit.options import TargetOptions


@click.command()
@click.argument("source", metavar="IN", type=LOCATION)
@options_of(
    TargetOptions,
    like={"required": True},
    match={
        "type": click.Choice(["structure", "position"]),
        "help": "What names leave: align modules by shape, names and order, or zip in order.",
    },
)
@click.option(
    "--rename", multiple=True, metavar="REGEX=REPLACEMENT", help="Rename tensors of IN first, as in convert. Repeatable."
)
@click.option(
    "--select",
    cls=Once,
    metavar="WHERE",
    shell_complete=complete_places,
    help="Which state dict of IN, where it holds several.",
)
@click.option("-o", "--output", cls=Once, metavar="PLAN", type=LOCATION, help="Write a plan (TOML) for convert.")
@click.option("--overwrite", is_flag=True, help="Replace PLAN if it exists.")
@click.option("--all", "show_all", is_flag=True, help="Show every tensor; nothing folded or cut.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="The report as JSON; see docs/json.md.")
def match(
    source: Path,
    output: Path | None,
    match: str | None,
    overwrite: bool,
    show_all: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show which tensor of IN is which tensor of TARGET, and why; what is left over, and what is ambiguous.

    \b
    ckpt match ddp.pth --like torchvision.models:resnet18
    ckpt match hf.safetensors --like timm:create_model --like-args '{"model_name": "resnet50"}' --match structure
    ckpt match theirs.pth --like ours.pth --match structure -o plan.toml && ckpt convert theirs.pth out.pth --plan plan.toml

    Names come first: exact, without wrappers, by --rename, by a common prefix or suffix. Nothing is chosen among equals.

    Exit code: 0 every tensor has its partner, 1 something is left over, 2 usage, 3 refused.
    """
    from ckpt_tools.errors import UsageError
    from ckpt_tools.operations.match import match_checkpoint

    if overwrite and output is None:
        raise UsageError("--overwrite is about a plan; -o PLAN is missing.")
    report = match_checkpoint(source, options.pop("like"), stages=cast("Any", match or "names"), **options)
    if output is not None:
        from ckpt_tools.fit.plan_files import write_plan
        from ckpt_tools.fit.plans import plan_of

        write_plan(plan_of(report.matching), output, overwrite=overwrite)
    if as_json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    elif not quiet:
        from ckpt_tools.render.matched import print_matched
        from ckpt_tools.render.text import show

        show(partial(print_matched, report, show_all=show_all, plan=output))
    sys.exit(0 if report.matching.complete_with_offers else 1)
