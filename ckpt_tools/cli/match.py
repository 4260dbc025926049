"""`ckpt match`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from ckpt_tools.cli.options import (
    LOCATION,
    given,
    options_of,
    quiet_option,
)
from ckpt_tools.operations.options import MatchOptions


@click.command(short_help="Show which tensor of IN is which tensor of TARGET.")
@click.argument("source", metavar="IN", type=LOCATION)
@options_of(
    MatchOptions,
    like={"required": True},
    match={
        "type": click.Choice(["structure", "position"]),
        "help": "How the rest is paired after names: by shape, names and order of the modules, or in order.",
    },
    output={"type": LOCATION},
)
@click.option("--all", "show_all", is_flag=True, help="Show every tensor; nothing folded or cut.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="The report as JSON; see docs/json.md.")
def match(source: Path, show_all: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Show which tensor of IN is which tensor of TARGET, and why; what is left over, and what is ambiguous.

    \b
    ckpt match ddp.pth --like torchvision.models:resnet18
    ckpt match hf.safetensors --like timm:create_model --like-args '{"model_name": "resnet50"}' --match structure
    ckpt match theirs.pth --like ours:Net --from theirs:Net --input 1x3x64x64
    ckpt match theirs.pth --like ours.pth --match structure -o plan.toml && ckpt convert theirs.pth out.pth --plan plan.toml

    Names come first: exact, without wrappers, by --rename, by a common prefix or suffix. Nothing is chosen among equals.
    With --from both models run once, without numbers where they can, and which layer feeds which is evidence too.

    Exit code: 0 every tensor has its partner, 1 something is left over, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.match import match as match_checkpoint

    report = match_checkpoint(source, **given(options))
    if as_json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    elif not quiet:
        from ckpt_tools.render.matched import print_matched
        from ckpt_tools.render.text import show

        show(partial(print_matched, report, show_all=show_all, plan=options["output"]))
    sys.exit(0 if report.matching.complete_with_offers else 1)
