"""A pager for what is longer than the terminal, as git has it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from ckpt_tools.render.plain import Page
from ckpt_tools.render.text import console, show


def show_paged(render: Callable[[Page], None], *, allowed: bool) -> None:
    """Render to standard output; through a pager where that is a terminal with fewer lines, and a pager is not unwanted."""
    command = _pager() if allowed and sys.stdout.isatty() else []
    if not command:
        show(render)
        return
    out = console()
    with out.capture() as captured:
        render(out)
    text = captured.get()
    if text.count("\n") < out.height or not _paged(command, text):
        sys.stdout.write(text)


def _pager() -> list[str]:
    """The pager's command: $PAGER, or less (on Windows none); none where NO_PAGER is set, or PAGER is empty or `cat`."""
    import shlex  # only a terminal needs it

    if os.environ.get("NO_PAGER"):
        return []
    try:
        told = shlex.split(os.environ.get("PAGER", "" if os.name == "nt" else "less"))
    except ValueError:  # a quotation mark without its partner
        return []
    return [] if told == ["cat"] else told


def _paged(command: list[str], text: str) -> bool:
    """Whether the pager could be started, and has been read to its end. Of less: colours stay, and so does the page."""
    import subprocess

    if os.name == "nt":  # which looks for a program in the current folder first
        os.environ["NODEFAULTCURRENTDIRECTORYINEXEPATH"] = "1"
    try:
        pager = subprocess.Popen(  # noqa: S603  what the user calls the pager
            command, stdin=subprocess.PIPE, env={"LESS": "FRX", **os.environ}
        )
    except OSError:
        return False
    assert pager.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # whoever reads has read enough
        pager.stdin.write(text.encode(sys.stdout.encoding, "backslashreplace"))
    with contextlib.suppress(BrokenPipeError):
        pager.stdin.close()
    while True:
        try:
            pager.wait()
            return True
        except KeyboardInterrupt:  # the pager's own affair
            continue
