"""Pages in a pipe: plain text, laid out without rich wherever that gives the same. To import rich takes longest of all."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Sequence
from typing import Any, Protocol

PIPE_WIDTH = 1000  # in a pipe no line is broken: grep and copy-paste need whole names


class Page(Protocol):
    """What pages are printed on: rich's Console on a terminal, Plain in a pipe."""

    @property
    def width(self) -> int:
        """How many columns a line has."""

    @property
    def encoding(self) -> str:
        """The encoding of the output."""

    def print(self, what: Any = "", /, *, style: str | None = None, soft_wrap: bool = False) -> None:
        """Print text, or anything that rich draws; text without `soft_wrap` is broken into lines at the width."""


class Plain(Page):
    """A page of plain text. rich draws what is not text yet."""

    width = PIPE_WIDTH

    def __init__(self) -> None:
        self._file = io.StringIO()
        self._console: Any = None

    @property
    def encoding(self) -> str:
        """The encoding of standard output."""
        return sys.stdout.encoding or "utf-8"  # none, where it is kept as text

    @property
    def text(self) -> str:
        """What was printed, without the blanks that fill up table cells."""
        return "".join(f"{line.rstrip()}\n" for line in self._file.getvalue().splitlines())

    def print(self, what: Any = "", /, *, style: str | None = None, soft_wrap: bool = False) -> None:
        """Print text as it is, without its style; what is not text through rich."""
        if type(what) is str and (soft_wrap or (what.isascii() and max(map(len, what.split("\n"))) <= PIPE_WIDTH)):
            self._file.write(f"{what}\n")
            return
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._file, highlight=False, emoji=False, markup=False, width=PIPE_WIDTH)
        self._console.print(what, style=style, soft_wrap=soft_wrap)


def laid_out(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str | None:
    """Cells in columns with two blanks between, some set to the right; None where rich must see to it."""
    cells = [[cell.split("\n") for cell in row] for row in rows]
    columns = [[line for cell in column for line in cell] for column in zip(*cells, strict=True)]
    widths = [max(map(len, lines)) for lines in columns]
    if sum(widths) + 2 * len(widths) > PIPE_WIDTH or not all(map(str.isascii, map("".join, columns))):
        return None
    made = []
    for row in cells:
        for index in range(max(map(len, row))):
            texts = [cell[index] if index < len(cell) else "" for cell in row]
            line = [
                text.rjust(width) if place in right else text.ljust(width)
                for place, (text, width) in enumerate(zip(texts, widths, strict=True))
            ]
            made.append("  ".join(line).rstrip())
    return "\n".join(made)
