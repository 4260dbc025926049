"""`ckpt show`."""

from __future__ import annotations

from pathlib import Path

import click

from ckpt_tools.cli.completion import complete_names, complete_places
from ckpt_tools.cli.options import LOCATION, OUT_PATH, Once, show_progress


@click.command(short_help="Show the values of one tensor.")
@click.argument("path", metavar="PATH", type=LOCATION)
@click.argument("name", metavar="NAME[INDEX]", shell_complete=complete_names)
@click.option(
    "--select", cls=Once, metavar="WHERE", shell_complete=complete_places, help="Which subtree has it, where several do."
)
@click.option("--all", "whole", is_flag=True, help="Every value, up to a million; else the ends of a large tensor.")
@click.option("--output", "-o", cls=Once, type=OUT_PATH, metavar="FILE", help="Write a .npy in the place of showing them.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON; see docs/json.md.")
def show(path: Path, name: str, select: str | None, whole: bool, output: Path | None, overwrite: bool, as_json: bool) -> None:
    """Show the values of one tensor, or of a box of it, exactly: in the fewest digits that tell them apart in their dtype.

    \b
    ckpt show model.pth fc.weight
    ckpt show model.pth 'fc.weight[0:3, :5]'
    ckpt show training.pth 'optimizer.state.0.exp_avg[..., -1]'
    ckpt show model.safetensors fc.weight -o fc.npy

    Only what is shown is read, of folders, of the parts of many ranks and of addresses too. In a .npy bfloat16 and fp8, for
    which NumPy has no type, become float32 without loss.

    Exit code: 0 done, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.show import show as show_values

    with show_progress() as progress:
        report = show_values(path, name, select=select, whole=whole, output=output, overwrite=overwrite, progress=progress)
    if as_json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    else:
        from ckpt_tools.render.numbers.shown import print_shown

        print_shown(report)
