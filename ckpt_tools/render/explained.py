"""What `ckpt explain` found, as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.render.plain import Page
from ckpt_tools.render.text import show
from ckpt_tools.text import printable

if TYPE_CHECKING:
    from ckpt_tools.operations.explain import Explanation

_WIDTH = 100  # columns, in a pipe too


def show_explained(found: Sequence[Explanation]) -> None:
    """The best page whole, and the titles of others that fit as well."""
    best, *others = found
    text = f"{best.text}\n\n({best.page})\n"
    if others:
        text += "\nOr is it one of these? `ckpt explain` with its words shows it:\n\n"
        text += "".join(f"* {other.title} ({other.page})\n" for other in others)
    show(partial(_draw, best.title, text))


def _draw(title: str, text: str, out: Page) -> None:
    from rich.constrain import Constrain
    from rich.markdown import Markdown

    from ckpt_tools.operations.explain import without_links

    out.print(f"{title}\n", style="bold")
    out.print(Constrain(Markdown(without_links(text)), _WIDTH))


def show_topics(topics: Sequence[tuple[str, str]]) -> None:
    """Everything there is to explain, a line each."""
    sys.stdout.write("".join(f"{printable(title)} ({page})\n" for title, page in topics))
