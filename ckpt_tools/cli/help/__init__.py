"""`ckpt help`, of commands and of topics; and the help of a command with many options: short, with those that are used most, or
whole, in parts.
"""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.cli.help.topics import TOPICS
from ckpt_tools.cli.options import BareOptions
from ckpt_tools.text import did_you_mean
from ckpt_tools.tree.options import Options

WHOLE = "ckpt.help-all"  # in the meta of a context whose help is to have every option
_REST = "Other"


class LongHelp(BareOptions):
    """A command whose --help has the options that are used most, and whose --help-all has all of them under headings."""

    def __init__(self, *args: Any, record: type[Options], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.record = record
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show all options."
            )
        )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What it does and its examples; what else there is to say stands in the whole help."""
        text, self.help = self.help, self._text(ctx)
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = text

    def _text(self, ctx: click.Context) -> str:
        text = self.help or ""
        return text if _is_whole(ctx) else "\n\n".join(text.split("\n\n")[:2])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, those of one heading together."""
        parts: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row, option = param.get_help_record(ctx), self.record.options.get(param.name or "")
            if row is None or isinstance(param, click.Argument):
                continue
            if _is_whole(ctx):
                parts.setdefault(option.heading if option is not None else _REST, []).append(row)
            elif (option is not None and option.common) or "--help-all" in param.opts:
                parts.setdefault("Used most", []).append(row)
        for heading in [*(heading for heading in parts if heading != _REST), *([_REST] if _REST in parts else [])]:
            with formatter.section(heading):
                formatter.write_dl(parts[heading])


def _is_whole(ctx: click.Context) -> bool:
    return WHOLE in ctx.meta


def _show_all(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        ctx.meta[WHOLE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _complete_commands(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in (*_group(ctx).list_commands(ctx), *TOPICS) if name.startswith(incomplete)]


def _group(ctx: click.Context) -> click.Group:
    assert ctx.parent is not None
    assert isinstance(ctx.parent.command, click.Group)
    return ctx.parent.command


@click.command(short_help="Show the help of a command, or of a topic.")
@click.argument("name", metavar="[COMMAND | TOPIC]", required=False, shell_complete=_complete_commands)
@click.pass_context
def help(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, as COMMAND --help does, or of a topic: formats, globs, environment, json, exit-codes.

    \b
    ckpt help convert
    ckpt help exit-codes
    """
    group, top = _group(ctx), ctx.parent
    assert top is not None
    if name is None:
        click.echo(top.get_help(), color=ctx.color)
        return
    if name in TOPICS:
        click.echo(TOPICS[name], nl=False)
        return
    command = group.get_command(top, name)
    if command is None:
        hint = did_you_mean(name, (*group.list_commands(top), *TOPICS)) or f"Topics are {', '.join(TOPICS)}."
        raise click.UsageError(f"No such command or topic {name!r}. {hint}", ctx)
    with click.Context(command, top, name) as asked:
        click.echo(command.get_help(asked), color=ctx.color)
