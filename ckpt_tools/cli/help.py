"""`ckpt help`, of commands and of topics; and the help of a command with many options: short, with those that are used most, or
whole, in parts.
"""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.text import did_you_mean
from ckpt_tools.tree.options import Options

WHOLE = "ckpt.help-all"  # in the meta of a context whose help is to have every option
_REST = "Other"


class LongHelp(click.Command):
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


TOPICS = {
    "exit-codes": """\
0    you have what you asked for
1    the answer is no: findings (check), a file that is dangerous or could not be examined (scan), a
     difference (diff, prove), tensors without a partner (match), something that could not be saved (repair),
     another signature, or a file that may run code (verify)
2    the command line is wrong; nothing was done
3    refused: a file cannot be read or written, or the result would not be what you asked for
130  interrupted (Ctrl-C); 143 ended by SIGTERM

Whatever the code, a file is written whole or not at all. `ckpt COMMAND --help` says what 1 means there.
""",
    "formats": """\
Found by content, never by name:

torch-zip, torch-legacy, torch-tar    torch.save, of any age
torchscript, torch-export             torch.jit.save, torch.export.save
safetensors, gguf, onnx, keras, flax  one file, of gguf also several
npz, npy, pickle, zip-bundle          NumPy, pickle.dump, stable-baselines3
sharded, dcp                          folders: an index and shards; torch.distributed.checkpoint
rank-files, consolidated              a file for each rank: FSDP, tensor parallelism, Meta's Llama
megatron, deepspeed                   folders of parts

Each may be packed: gzip, bzip2, xz, zstd, tar. Written are torch-zip, torch-legacy (--format pth-legacy),
safetensors, gguf, sharded (--shard-size) and dcp: by OUT's name, or by --format.
""",
    "globs": """\
*       anything, dots too: --drop 'optimizer*', --keep '*.weight'
?       one character
[ab]    one of these; [!ab] none of these

A glob is for a whole name: 'fc' is not 'fc.weight', 'fc.*' takes all of fc. Names are those in IN, as
ckpt inspect shows them, before --strip-module and --rename; what holds no tensor is named by its dotted path
(--drop optimizer). Of several globs with a value the last that matches counts (--dtype bf16 --dtype
'*.norm.*=fp32'). Quote them, or the shell takes them for files. One that matches nothing is refused.
""",
    "environment": """\
CKPT_COMMAND_OPTION   any option of a command: CKPT_SCAN_JOBS=1, CKPT_CHECK_FORMAT=json; 1 or 0 for one
                      without a value, several values separated by spaces
CKPT_CHECK_IGNORE     "wrapper-prefix device-tags": findings that ckpt check leaves out; also CKPT_IGNORE
CKPT_CONVERT_OBJECTS  what ckpt convert does with Python objects: plain, drop, keep; also CKPT_OBJECTS
CKPT_LIMITS           "records=2000000 nodes=5000000": raised limits, for files that you trust (docs/limits.md)

An option that is given goes before its variable; an empty variable is not set; ckpt --version --verbose
lists those that are. No file sets anything.
NO_COLOR, COLUMNS, PAGER and TMPDIR mean what they mean elsewhere.
""",
    "json": """\
--json prints one document, of inspect, check and scan one a line for each file; errors too,
with "error", "what" and "exit_code". Text is ASCII with \\u escapes. docs/json.md names every field, and
docs/*.schema.json are the contracts, which tests hold.

ckpt inspect --json model.pth | jq '.totals.parameters'
ckpt check --json runs/ | jq -r 'select(.findings | length > 0) | .path'
""",
}
