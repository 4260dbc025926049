"""`ckpt inspect`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import cast

import click

from ckpt_tools.cli.options import expand, print_failure
from ckpt_tools.errors import CkptError


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--all", "show_all", is_flag=True, help="Show every tensor, value and object; nothing folded or cut.")
@click.option("--tree/--flat", "tree", default=None, help="Show the tensors as a tree, or one a line.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up below the first N parts of the names.")
@click.option("--filter", "pattern", metavar="GLOB", help="Only tensors whose name or path matches.")
@click.option(
    "--sort", type=click.Choice(["name", "size", "file"]), default="file", show_default=True, help="Order of the tensors."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line; see docs/json.md.")
def inspect(
    paths: tuple[Path, ...], show_all: bool, tree: bool | None, depth: int | None, pattern: str | None, sort: str, as_json: bool
) -> None:
    """Show what checkpoints hold. A folder stands for the checkpoints in it.

    \b
    ckpt inspect model.pth
    ckpt inspect --filter '*.weight' --sort size model.pth
    ckpt inspect --json runs/ | jq .totals.parameters

    Exit code: 0 all shown, 3 when one cannot be read (the others are shown).
    """
    from ckpt_tools.describe import inspect as describe_checkpoint

    files, code = expand(paths), 0
    for number, path in enumerate(files):
        try:
            description = describe_checkpoint(path)
        except CkptError as error:
            code = error.exit_code
            print_failure(path, error, as_json=as_json)
            continue
        if as_json:
            from ckpt_tools.render.json import line

            click.echo(line(description.to_json()))
        else:
            from ckpt_tools.render.description import Sort, View, print_description
            from ckpt_tools.render.text import show

            view = View(show_all, bool(tree), tree is False, depth, pattern, cast("Sort", sort))
            if number:
                click.echo()
            show(partial(print_description, description, view))
    sys.exit(code)
