"""`ckpt explain`."""

from __future__ import annotations

import sys

import click


@click.command(short_help="Say what a message means, and the command.")
@click.argument("words", nargs=-1, metavar="[CODE|MESSAGE]...")
def explain(words: tuple[str, ...]) -> None:
    """Say what the message on your screen means and which command helps: PyTorch's words, or the code of a finding.

    \b
    ckpt explain 'size mismatch for fc.weight'
    ckpt explain wrapper-prefix
    python train.py 2>&1 | ckpt explain

    Without words and without a pipe it lists what there is. It needs no network.

    Exit code: 0 found, 1 no message has these words (the two nearest are guesses), 2 usage.
    """
    from ckpt_tools.operations import explain as known
    from ckpt_tools.render.explained import show_explained, show_guesses, show_topics

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
