"""`ckpt match`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckpt_tools.cli.options import LOCATION, given, options_of, print_report, report_options, show_progress
from ckpt_tools.operations.match import MatchOptions
from ckpt_tools.render.matched import print_matched


@click.command(short_help="Pair the tensors of two models.")
@click.argument("source", metavar="IN", type=LOCATION)
@options_of(
    MatchOptions,
    like={"required": True},
    match={
        "type": click.Choice(["structure", "values", "position"]),
        "help": "How to pair what names do not decide: by shape, names and order of modules; also by values; or just in order.",
    },
    output={"type": LOCATION},
)
@click.option("--all", is_flag=True, help="Show every tensor in full.")
@report_options
def match(source: Path, all: bool, quiet: bool, json: bool, **options: Any) -> None:
    """Show which tensor of IN is which tensor of TARGET, and why; and those that are unmatched or ambiguous.

    \b
    ckpt match ddp.pth --like torchvision.models:resnet18
    ckpt match hf.safetensors --like timm:create_model --like-args '{"model_name": "resnet50"}' --match structure
    ckpt match theirs.pth --like ours:Net --from theirs:Net --input 1x3x64x64
    ckpt match theirs.pth --like ours.pth --match structure -o plan.toml && ckpt convert theirs.pth out.pth --plan plan.toml

    --pair comes first, then names: equal, without wrappers, after --rename, without a common prefix or suffix. Nothing is
    guessed. With --from both models run once, and the order of their layers decides more. For unmatched tensors the options
    that help are listed.

    Exit code: 0 every tensor is matched, 1 some are not, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.match import match as match_checkpoint

    with show_progress(quiet=quiet):
        report = match_checkpoint(source, **given(options))
    print_report(report, print_matched, json=json, quiet=quiet, show_all=all, plan=options["output"])
    sys.exit(0 if report else 1)
