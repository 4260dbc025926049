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
        _write([f"{name}: {title}" for name, title in known.topics()])
    elif found := known.explain(text):
        _write(_explained(found))
    else:
        near = [_named(one) for one in known.guesses(text)]
        known_near = "This message is unknown. The most similar are (ckpt explain NAME says more):"
        _write([known_near, *near] if near else ["This message is unknown."])
        sys.exit(1)


def _explained(found: Sequence[Explanation]) -> list[str]:
    """The best answer and its command, and the names of others that fit too."""
    best, *others = found
    commands = [f"  {line}" for line in best.command.split("\n")]
    text = best.text.replace("`", "'").split("\n")
    return [*text, *commands, "", _named(best), f"({best.page})", *(f"Also: {_named(other)}" for other in others)]


def _named(one: Explanation) -> str:
    return f"{one.name}: {one.title}"


def _write(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
