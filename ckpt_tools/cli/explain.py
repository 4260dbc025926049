"""`ckpt explain`."""

from __future__ import annotations

import sys

import click


@click.command(short_help="Find the page for a message on your screen.")
@click.argument("words", nargs=-1, metavar="[CODE|MESSAGE]...")
def explain(words: tuple[str, ...]) -> None:
    """Find the page for the words on your screen: PyTorch's message, or the code of a finding.

    \b
    ckpt explain 'size mismatch for fc.weight'
    ckpt explain wrapper-prefix
    python train.py 2>&1 | ckpt explain

    Without words and without a pipe it lists what there is. It needs no network.

    Exit code: 0 found, 3 no page is about them.
    """
    from ckpt_tools.operations import explain as known
    from ckpt_tools.render.explained import show_explained, show_topics

    if not words and sys.stdin.isatty():
        show_topics(known.topics())
        return
    text = " ".join(words) if words else sys.stdin.read(known.MOST)
    if not text.strip():
        show_topics(known.topics())
        return
    show_explained(known.explain(text))
