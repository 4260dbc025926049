"""What `ckpt explain` found, as plain text: the answer first, then where it is from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_tools.text import printable

if TYPE_CHECKING:
    from ckpt_tools.operations.explain import Explanation


def show_explained(found: Sequence[Explanation]) -> None:
    """The best answer and its command, and the names of others that fit too."""
    best, *others = found
    lines = [
        *_plain(best.text).split("\n"),
        *(f"  {line}" for line in best.command.split("\n")),
        "",
        _named(best),
        f"({best.page})",
    ]
    lines += [f"Also: {_named(other)}" for other in others]
    _write(lines)


def show_guesses(near: Sequence[Explanation]) -> None:
    """That no page has these words, and the nearest, as what they are."""
    if not near:
        _write(["Nothing is known about these words."])
        return
    _write(["No message that is known has these words. By likeness of words alone, it may be:", *map(_named, near)])


def show_topics(topics: Sequence[tuple[str, str]]) -> None:
    """Everything there is to explain, a line each."""
    _write([f"{name}: {title}" for name, title in topics])


def _named(one: Explanation) -> str:
    return f"{one.name}: {one.title}"


def _plain(text: str) -> str:
    return text.replace("`", "'")


def _write(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
