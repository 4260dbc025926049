"""`ckpt completion`."""

from __future__ import annotations

import click


@click.command(short_help="Print what makes a shell complete commands, options and names in files.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete commands, options, and the names in a file, for its start-up file.

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
