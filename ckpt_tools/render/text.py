"""What every page is made of: sizes and counts as text, consoles, errors and findings as they are printed.

rich is imported when something is drawn with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ckpt_tools.errors import CkptError
from ckpt_tools.render.plain import PIPE_WIDTH, Page, Plain
from ckpt_tools.text import printable
from ckpt_tools.tree.findings import Finding

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt_tools.operations.inspect import Description


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

    from ckpt_tools.render.wording import as_options

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
    from ckpt_tools.render.wording import as_options, found_in

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
