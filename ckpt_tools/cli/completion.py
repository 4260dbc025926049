"""What a shell offers behind --select, --filter, --keep, --drop: paths and names from the file on the command line.

Only names of plain characters are offered: a shell puts a completion on the command line as it is, and a name from a file
could hold a command. Whatever goes wrong, nothing is offered; a shell is not the place for messages.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import click

_MOST = 1000
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def _offered(ctx: click.Context, _param: click.Parameter, incomplete: str, *, names: bool) -> list[str]:
    with contextlib.suppress(Exception):  # a damaged file, a missing one, no memory: a shell wants silence
        found = (text for text in _found(ctx, names=names) if text.startswith(incomplete) and _PLAIN.fullmatch(text))
        return list(islice(dict.fromkeys(found), _MOST))
    return []


# Dotted paths of dicts and lists that hold tensors, state dicts first; with `names` those of tensors before them.
complete_places, complete_names = partial(_offered, names=False), partial(_offered, names=True)


def _found(ctx: click.Context, *, names: bool) -> Iterator[str]:
    from ckpt_tools.parts.open import open_checkpoint

    arguments = [ctx.params.get(param.name or "") for param in ctx.command.params if isinstance(param, click.Argument)]
    given = [one for value in arguments for one in (value if isinstance(value, tuple) else (value,)) if one is not None]
    # Click leaves arguments in `args` when an option at the end lacks its value.
    path = next(path for path in map(Path, [*given, *ctx.args]) if path.exists())
    with open_checkpoint(path) as checkpoint:
        if names:
            for state_dict in checkpoint.state_dicts:
                yield from state_dict.names
        for state_dict in checkpoint.state_dicts:
            yield ".".join(map(str, state_dict.where))
        for tensor in checkpoint.tensors:
            for length in range(1, len(tensor.where) + names):
                yield ".".join(map(str, tensor.where[:length]))


@click.command(short_help="Print the shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the shell completion script: it completes commands, options and names in files.

    \b
    eval "$(ckpt completion bash)"        # ~/.bashrc
    eval "$(ckpt completion zsh)"         # ~/.zshrc
    ckpt completion fish | source         # ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(ctx.find_root().command, {}, "ckpt", "_CKPT_COMPLETE")
    click.echo(made.source_template % made.source_vars())  # not `source()`, which starts a bash to learn its version
