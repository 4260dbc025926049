"""`ckpt prove`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckpt_tools.cli.options import LOCATION, OUT_PATH, once, print_report, report_options, select_option, show_progress
from ckpt_tools.render.proved import print_proved
from ckpt_tools.text import printable
from ckpt_tools.values.pytorch import need_torch


@click.command(short_help="Check that two models compute the same.")
@click.argument("old", metavar="OLD", type=LOCATION)
@click.argument("new", metavar="NEW", type=LOCATION)
@click.option(
    "--model", multiple=True, required=True, metavar="PACKAGE.MODULE:CALLABLE",
    help="The model class or function; twice: first for OLD, then for NEW.",
)  # fmt: skip
@click.option(
    "--model-args", multiple=True, metavar="JSON", help="""Arguments for the model: '{"num_classes": 200}'. Once or twice."""
)
@click.option(
    "--input", multiple=True, required=True, metavar="[NAME=]SHAPE[:N]",
    help="1x3x224x224: random normal numbers; 1x16:30522: integers below 30522; input_ids=1x16:30522: by name. Repeatable.",
)  # fmt: skip
@select_option(help="Which state dict of OLD, if it has several; OLD_PATH=NEW_PATH for both.")
@click.option("--seed", type=int, default=0, metavar="N", help="Random seed [0].")
@click.option("--runs", type=click.IntRange(1, 1000), default=2, metavar="N", help="Number of random inputs to try [2].")
@click.option(
    "--tolerance", type=click.FloatRange(0), metavar="X",
    help="Largest relative difference that counts as equal [1e-9; more for a model that runs only in float32].",
)  # fmt: skip
@once("--certificate", type=OUT_PATH, metavar="FILE.json", help="Write the report with digests of both files.")
@click.option("--overwrite", is_flag=True, help="Replace FILE of --certificate if it exists.")
@report_options
def prove(old: Path, new: Path, quiet: bool, json: bool, **options: Any) -> None:
    """Check that OLD and NEW compute the same: run both on the same inputs, and show the first difference.

    \b
    ckpt prove old.pth new.safetensors --model models:Net --input 1x3x32x32
    ckpt prove old.pth --model theirs:ResNet new.safetensors --model timm:resnet50 --input 1x3x224x224
    ckpt prove old.bin new.pth --model hf:bert --model ours:Bert --input input_ids=1x16:30522

    This runs the code of the models that you name, in float64 if possible. Nothing in a file is executed.

    Exit code: 0 equal, 1 different or not fully checked, 2 usage, 3 refused.
    """
    for name in ("model", "model_args"):
        if len(options[name]) > 2:
            raise click.UsageError(f"--{name.replace('_', '-')} is given once for both, or twice: for OLD and for NEW.")
    options["model_args"] = options["model_args"] or None
    need_torch("Models are run with it.")
    from ckpt_tools.torch.proving.prove import prove as prove_models

    with show_progress(quiet=quiet):
        report = prove_models(old, new, inputs=options.pop("input"), **options)
    print_report(report, print_proved, json=json, quiet=quiet)
    if options["certificate"] is not None and not (json or quiet):
        click.echo(printable(f"wrote {options['certificate']}"))
    sys.exit(0 if report else 1)
