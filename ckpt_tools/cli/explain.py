"""`ckpt explain`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from ckpt_tools.operations.explain import Explanation
from ckpt_tools.text import printable


@click.command(short_help="Explain an error message.")
@click.argument("words", nargs=-1, metavar="[CODE|MESSAGE]...")
def explain(words: tuple[str, ...]) -> None:
    """Explain an error message of PyTorch or the code of a finding, and show the command that helps.

    \b
    ckpt explain 'size mismatch for fc.weight'
    ckpt explain wrapper-prefix
    python train.py 2>&1 | ckpt explain

    Without a message it lists all topics. It needs no network.

    Exit code: 0 found, 1 unknown message (the two most similar are shown), 2 usage.
    """
    from ckpt_tools.operations import explain as known

    text = " ".join(words)
    if not words and not sys.stdin.isatty():
        while part := sys.stdin.read(known.MOST):
            text = (text + part)[-known.MOST :]
    if not words and not text.strip():
        show_topics(known.topics())
        return
    if found := known.explain(text):
        show_explained(found)
        return
    show_guesses(known.guesses(text))
    sys.exit(1)


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
        _write(["This message is unknown."])
        return
    _write(["This message is unknown. The most similar are:", *map(_named, near)])


def show_topics(topics: Sequence[tuple[str, str]]) -> None:
    """Everything there is to explain, a line each."""
    _write([f"{name}: {title}" for name, title in topics])


def _named(one: Explanation) -> str:
    return f"{one.name}: {one.title}"


def _plain(text: str) -> str:
    return text.replace("`", "'")


def _write(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
