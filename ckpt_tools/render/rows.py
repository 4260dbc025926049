"""Labelled rows and tables, of which every page is made. rich is imported when one is drawn: that takes longest of all."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ckpt_tools.render.plain import Page, Plain, laid_out
from ckpt_tools.render.text import print_parts
from ckpt_tools.text import printable

if TYPE_CHECKING:
    from rich.table import Table

Row: TypeAlias = tuple[str, str]


def rows_of(label: str, lines: Sequence[str], limit: int | None = 10, rest: str = "--json shows all") -> list[Row]:
    """Up to `limit` rows under one label, and how many more there are."""
    rows = [(label, printable(line)) for line in lines[:limit]]
    more = 0 if limit is None else len(lines) - limit
    return [*rows, (label, f"... {more} more ({rest})")] if more > 0 else rows


def print_rows(rows: Sequence[Row], out: Page) -> None:
    """Two columns, a dim label and what there is to say."""
    rows = [(label, "\n".join(map(printable, text.split("\n")))) for label, text in rows]
    if isinstance(out, Plain):
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            out.print(f"{label:{width}}  {text}".replace("\n", "\n" + " " * (width + 2)), soft_wrap=True)
        return
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    out.print(grid)


def print_title(title: str, out: Page) -> None:
    """The first line of a page."""
    print_parts(out, (printable(title), "bold"))


# --- tables


def plain_table() -> Table:
    """A table without lines around its cells."""
    from rich.table import Table

    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)


def wrapped(text: str, width: int) -> str:
    """Text broken into lines behind dots, commas and blanks, not in the middle of a word; further lines are indented."""
    if len(text) <= width:
        return text
    lines, line = [], ""
    for part in re.findall(r"[^., ]*[., ]*", text):
        if line.strip() and len(line) + len(part.rstrip()) > width:
            lines.append(line.rstrip())
            line = "  "
        line += part
    return "\n".join([*lines, line.rstrip()])


_NAME_WIDTH = 30  # what a column of names should have at least, before others are left out for it


def name_table(
    heading: str, names: Sequence[str], columns: dict[str, list[str]], out: Page, *, right: Collection[str] = (),
    whole: Collection[str] = (), optional: Sequence[str] = (), styles: Sequence[str] = (),
) -> Table | str:  # fmt: skip
    """A column of names, and what is said about each; `names` may be longer than the columns by a line for the rest."""
    columns = dict(columns)
    for name in optional:
        if (
            room_for_names(columns, out) < min(_NAME_WIDTH, max(map(len, names), default=0))
            and len(set(columns[name]) - {""}) <= 1
        ):
            del columns[name]
    room = max(room_for_names(columns, out), _NAME_WIDTH // 2)
    rows = [
        (wrapped(text, room), *(texts[index] if index < len(texts) else "" for texts in columns.values()))
        for index, text in enumerate(names)
    ]
    if isinstance(out, Plain):
        places = {place for place, name in enumerate(columns, 1) if name in right}
        if (text := laid_out([(heading, *columns), *rows], places)) is not None:
            return text
    table = plain_table()
    table.add_column(heading, overflow="fold")
    for name in columns:
        unbroken = name in right or name in whole
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=unbroken)
    for index, row in enumerate(rows):
        table.add_row(*row, style=styles[index] if index < len(styles) else None)
    return table


def room_for_names(columns: dict[str, list[str]], out: Page) -> int:
    """What the columns leave of the width, each taking its longest line and two blanks."""
    taken = sum(2 + max(map(len, (name, *"\n".join(cells).split("\n")))) for name, cells in columns.items())
    return out.width - taken - 2
