"""What `ckpt scan` found, one line a file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ckpt_tools.operations.scan import Scanned, counts
from ckpt_tools.render.plain import Page
from ckpt_tools.render.text import counted
from ckpt_tools.text import printable

_COLOURS = {"dangerous": "red", "unexamined": "yellow", "needs-code": "cyan", "plain": "green", "nothing": "dim"}
_WORDS = {"unexamined": "could not be examined", "needs-code": "needs code", "nothing": "nothing to run"}


def print_scanned(report: Scanned, out: Page) -> None:
    """The line of one file."""
    path = f"{printable(report.path)}: "
    word, _, rest = report.line.removeprefix(path).partition(":")
    line = Text(path) + Text(word, style=_COLOURS[report.verdict])
    out.print(line + Text(f":{rest}" if rest else ""), soft_wrap=True)


def print_counts(reports: Sequence[Scanned], out: Page) -> None:
    """The line below all."""
    found = ", ".join(f"{count:,} {_WORDS.get(verdict, verdict)}" for verdict, count in counts(reports).items())
    out.print(Text(f"{counted(len(reports), 'file')}: {found}", style="bold"), soft_wrap=True)
