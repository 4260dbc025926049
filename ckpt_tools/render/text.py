"""What every page is made of: texts, the page itself, errors, findings, labelled rows and tables.

rich is imported when something is drawn with it: that takes longest of all.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from ckpt_tools.errors import CkptError
from ckpt_tools.render.wording import as_options, found_in
from ckpt_tools.text import printable
from ckpt_tools.tree.findings import Finding

if TYPE_CHECKING:
    from rich.console import Console

_LEAST_WIDTH = 12  # of a column of texts, however narrow the terminal is
PIPE_WIDTH = 1000  # in a pipe no line is broken: grep and copy-paste need whole names
Part: TypeAlias = str | tuple[str, str]  # a text, or a text and its style


class Page:
    """What pages are printed on: with a console that, else plain text for a pipe, which `text` has."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self.width = PIPE_WIDTH if console is None else console.width
        self._lines: list[str] = []

    @property
    def encoding(self) -> str:
        """The encoding of the output."""
        return self.console.encoding if self.console is not None else sys.stdout.encoding or "utf-8"  # none: kept as text

    @property
    def text(self) -> str:
        """What was printed, without the blanks that fill up table cells."""
        return "".join(f"{line.rstrip()}\n" for lines in self._lines for line in lines.split("\n"))

    def print(self, *parts: Part) -> None:
        """Print texts one after another, those with a style in it; nothing is broken into lines."""
        if self.console is None:
            self._lines.append("".join(part if isinstance(part, str) else part[0] for part in parts))
            return
        from rich.text import Text

        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def table(self, columns: Mapping[str, Sequence[str]], *, right: Collection[str] = (), styles: Sequence[str] = ()) -> None:
        """Print columns below their names; numbers, in `right`, end in one line. A style a row; a last row may have one cell.

        Where the width is less than all need, wide columns of texts share what the others leave.
        """
        count = max(map(len, columns.values()))
        cells = [[name, *texts, *[""] * (count - len(texts))] for name, texts in columns.items()]
        needed = [max(_width(line) for cell in column for line in cell.split("\n")) for column in cells]
        at_right, left = [name in right for name in columns], self.width - 2 * (len(columns) - 1)
        pads = [str.rjust if is_right else str.ljust for is_right in at_right]
        order = sorted(range(len(columns)), key=lambda place: (not at_right[place], needed[place]))
        for number, place in enumerate(order):
            room = max(left // (len(order) - number), _LEAST_WIDTH)
            if not at_right[place] and needed[place] > room:
                cells[place] = ["\n".join(wrapped(line, room) for line in cell.split("\n")) for cell in cells[place]]
                needed[place] = max(_width(line) for cell in cells[place] for line in cell.split("\n"))
            left -= needed[place]
        for row, style in zip_longest(zip(*cells, strict=True), ["dim", *styles], fillvalue=""):
            for lines in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
                texts = [pad(line, width + len(line) - _width(line))
                         for pad, line, width in zip(pads, lines, needed, strict=True)]  # fmt: skip
                self.print(("  ".join(texts).rstrip(), style))


def _width(text: str) -> int:
    """How many columns a terminal needs for a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def size_text(count: int) -> str:
    """Bytes in binary units: `1.5 MiB`."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1024 or unit == "PiB":
            break
    return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def console(*, stderr: bool = False) -> Console:
    """A console that follows the terminal; in a pipe lines are not broken."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, emoji=False, markup=False, width=PIPE_WIDTH)
    made.on_broken_pipe = _gone  # type: ignore[method-assign]
    return made


def _gone() -> NoReturn:
    """The reader of our output has gone: rich would end with 1."""
    raise BrokenPipeError


def show(render: Callable[[Page], None]) -> None:
    """Render to standard output; in a pipe as plain text."""
    if (sys.stdout.isatty() or any(map(os.environ.get, ("FORCE_COLOR", "TTY_COMPATIBLE")))) and (out := console()).is_terminal:
        render(Page(out))
        return
    page = Page()
    render(page)
    sys.stdout.write(page.text)


def path_text(where: Iterable[str | int]) -> str:
    """A path from the root as text that is safe on a terminal; `""` is a tensor whose name is the empty text."""
    keys = list(map(str, where))
    return printable(".".join(keys)) or ('""' if keys else "(root)")


def print_error(error: CkptError) -> None:
    """What, why and what to do, on standard error."""
    out = Page(console(stderr=True))
    out.print(("Error: ", "bold red"), printable(as_options(error.what)))
    for text, style in ((as_options(error.why), ""), (as_options(error.fix), "green")):
        if text:
            out.print((printable(text), style))


def can_print(text: str, out: Page) -> bool:
    """Whether the output's encoding has these characters."""
    try:
        text.encode(out.encoding)
    except UnicodeEncodeError:
        return False
    return True


def counted(count: int, noun: str, several: str = "") -> str:
    """`1 tensor`, `2 tensors`; `several` is a plural that is not the noun with an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {several or f'{noun}s'}"


def counts_text(counts: Mapping[str | None, int]) -> str:
    """How many there are of each: `float32 x 62, int64 x 20`."""
    return ", ".join(f"{printable(str(name))} x {count:,}" for name, count in counts.items()) or "none"


def by_reason(counts: Mapping[str, int]) -> list[str]:
    """How many have found their partner by which reason: `3 exact`, `8 by wrapper`."""
    return [f"{count:,} exact" if reason == "exact" else f"{count:,} by {reason}" for reason, count in counts.items()]


_SEVERITY = {"info": "cyan", "warning": "yellow", "problem": "red"}


def print_finding(finding: Finding, out: Page) -> None:
    """What was found, what was expected, what mends it; with the code that --ignore takes."""
    where = f" in {path_text(finding.where)}" if finding.where else ""
    out.print((f"{finding.severity} [{finding.code}]{where}: ", _SEVERITY[finding.severity]), printable(found_in(finding)))
    if finding.expected:
        out.print((f"  expected: {printable(as_options(finding.expected))}", "dim"))
    if finding.fix:
        out.print((f"  {printable(as_options(finding.fix))}", "green"))


# --- rows and tables


Row: TypeAlias = tuple[str, str]


def rows_of(label: str, lines: Sequence[str], limit: int | None = 10, rest: str = "--json shows all") -> list[Row]:
    """Up to `limit` rows under one label, and how many more there are."""
    rows = [(label, printable(line)) for line in lines[:limit]]
    more = 0 if limit is None else len(lines) - limit
    return [*rows, (label, f"... {more} more ({rest})")] if more > 0 else rows


def print_rows(rows: Sequence[Row], out: Page) -> None:
    """Two columns, a dim label and what there is to say."""
    width = max((len(label) for label, _ in rows), default=0) + 2
    for label, text in rows:
        lines = "\n".join(map(printable, text.split("\n")))
        if out.console is not None:
            from textwrap import fill

            room = max(out.width - width, 1)
            lines = "\n".join(fill(line, room, break_long_words=False, break_on_hyphens=False) for line in lines.split("\n"))
        out.print((f"{label:{width}}", "dim"), lines.replace("\n", "\n" + " " * width))


def print_title(title: str, out: Page) -> None:
    """The first line of a page."""
    out.print((printable(title), "bold"))


def wrapped(text: str, width: int) -> str:
    """Text broken into lines behind dots, commas and blanks, not in the middle of a word; further lines are indented."""
    if len(text) <= width:
        return text
    lines, line = [], ""
    for part in re.findall(r"[^., ]*[., ]+|[^., ]+", text):
        if line.strip() and len(line) + len(part.rstrip()) > width:
            lines.append(line.rstrip())
            line = "  "
        line += part
    return "\n".join([*lines, line.rstrip()])
