"""What `ckpt explain` found, as text."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.render.plain import Page
from ckpt_tools.render.text import show
from ckpt_tools.text import printable

if TYPE_CHECKING:
    from ckpt_tools.operations.explain import Explanation


def show_explained(found: Sequence[Explanation]) -> None:
    """The best page whole, and the titles of others that fit as well; Markdown as it is in a pipe, drawn on a terminal."""
    best, *others = found
    text = f"# {best.title}\n\n{best.text}\n\n({best.page})\n"
    if others:
        text += "\nOr is it one of these? `ckpt explain` with its words shows it:\n\n"
        text += "".join(f"* {other.title} ({other.page})\n" for other in others)
    if sys.stdout.isatty() or os.environ.get("FORCE_COLOR"):
        show(partial(_draw, text))
    else:
        sys.stdout.write(text)


def _draw(text: str, out: Page) -> None:
    from rich.markdown import Markdown

    out.print(Markdown(text))


def show_topics(topics: Sequence[tuple[str, str]]) -> None:
    """Everything there is to explain, a line each."""
    sys.stdout.write("".join(f"{printable(title)} ({page})\n" for title, page in topics))
