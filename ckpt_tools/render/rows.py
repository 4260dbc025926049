"""A page of labelled rows: with rich on a terminal, as plain text in a pipe, where importing rich would take longest of all."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ckpt_tools.render.text import label_grid, show
from ckpt_tools.text import printable

if TYPE_CHECKING:
    from rich.console import Console

Row: TypeAlias = tuple[str, str]


def show_rows(title: str, rows: Sequence[Row]) -> None:
    """A title, and rows of a label and what there is to say, to standard output; texts from files must be printable."""
    if sys.stdout.isatty() or os.environ.get("FORCE_COLOR"):
        show(partial(_print_rows, title, rows))
        return
    width = max((len(label) for label, _ in rows), default=0)
    sys.stdout.write("".join([f"{title}\n", *(f"{label:{width}}  {text}".rstrip() + "\n" for label, text in rows)]))


def _print_rows(title: str, rows: Sequence[Row], out: Console) -> None:
    from rich.text import Text

    out.print(Text(title, style="bold"), soft_wrap=True)
    grid = label_grid()
    for row in rows:
        grid.add_row(*row)
    out.print(grid)


def up_to_ten(label: str, lines: Sequence[str]) -> list[Row]:
    """Up to ten rows under one label; how many more there are."""
    rows = [(label, printable(line)) for line in lines[:10]]
    return [*rows, (label, f"... {len(lines) - 10} more (--json shows all)")] if len(lines) > 10 else rows
