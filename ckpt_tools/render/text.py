"""What every page is made of: texts, the page itself, errors, findings, labelled rows and tables.

rich is imported when something is drawn with it: that takes longest of all.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from ckpt_tools.errors import CkptError
from ckpt_tools.render.wording import as_options, found_in
from ckpt_tools.text import printable
from ckpt_tools.tree.findings import Finding

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ckpt_tools.operations.inspect import Description

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


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console that follows the terminal; in a pipe lines are not broken."""
    from rich.console import Console

    made = Console(file=file, stderr=stderr, highlight=False, emoji=False, markup=False)
    if not made.is_terminal:
        made = Console(file=file, stderr=stderr, highlight=False, emoji=False, markup=False, width=PIPE_WIDTH)
    made.on_broken_pipe = _gone  # type: ignore[method-assign]
    return made


def _gone() -> NoReturn:
    """The reader of our output has gone: rich would end with 1."""
    raise BrokenPipeError


def show(render: Callable[[Page], None]) -> None:
    """Render to standard output; in a pipe as plain text."""
    if (sys.stdout.isatty() or any(map(os.environ.get, ("FORCE_COLOR", "TTY_COMPATIBLE")))) and (out := console()).is_terminal:
        render(out)
        return
    page = Plain()
    render(page)
    sys.stdout.write(page.text)


def print_parts(out: Page, *parts: tuple[str, str]) -> None:
    """A line of texts, each with its style."""
    if isinstance(out, Plain):
        out.print("".join(text for text, _ in parts), soft_wrap=True)
        return
    from rich.text import Text

    out.print(Text.assemble(*parts), soft_wrap=True)


def loading_row(weights_only: Mapping[str, Any]) -> tuple[str, str]:
    """What torch.load says of a checkpoint, or the call that loads what is not for it."""
    call = weights_only["call"]
    if call.partition(",")[0] != "torch.load" or call.endswith(("unpacked", "one rank's part each")):
        return "loads with", call
    return "weights_only", "loads" if weights_only["loads"] else "refused by torch.load(weights_only=True)"


def path_text(where: Iterable[str | int]) -> str:
    """A path from the root as text that is safe on a terminal; `""` is a tensor whose name is the empty text."""
    keys = list(map(str, where))
    return printable(".".join(keys)) or ('""' if keys else "(root)")


def print_error(error: CkptError) -> None:
    """What, why and what to do, on standard error."""
    from rich.text import Text

    out = console(stderr=True)
    out.print(Text("Error: ", style="bold red") + Text(printable(as_options(error.what))), soft_wrap=True)
    parts = [(as_options(error.why), ""), (as_options(error.fix), "green")]
    for part, style in parts:
        if part:
            out.print(Text(printable(part), style=style), soft_wrap=True)


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


def print_finding(finding: Finding, out: Page, *, with_code: bool = False) -> None:
    """What was found, what was expected, what mends it; with the code that --ignore takes."""
    where = f" in {path_text(finding.where)}" if finding.where else ""
    code = f" [{finding.code}]" if with_code else ""
    head = f"{finding.severity}{code}{where}: "
    print_parts(out, (head, _SEVERITY[finding.severity]), (printable(found_in(finding)), "default"))
    if finding.expected:
        print_parts(out, (f"  expected: {printable(as_options(finding.expected))}", "dim"))
    if finding.fix:
        print_parts(out, (f"  {printable(as_options(finding.fix))}", "green"))


def state_dict_text(row: Mapping[str, Any]) -> str:
    """Where a state dict is, how much it holds, and in which wrappers its names are."""
    wrapped = f", wrapped in {' '.join(map(repr, row['wrappers']))}" if row["wrappers"] else ""
    return f"{path_text(row['where'])}: {counted(row['tensors'], 'tensor')}, {counted(row['parameters'], 'element')}{wrapped}"


def container_text(description: Description) -> str:
    """The container, what it lies in, and the size of the file."""
    packed, size = description.packed, size_text(description.file_bytes)
    if packed is None:
        return f"{description.container}, {size}"
    member = f", {printable(packed['member'])}" if packed["member"] else ""
    return f"{description.container} inside {packed['kind']}{member}, {size}"


# --- rows and tables


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
