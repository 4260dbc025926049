"""`ckpt help`; the help of a command with many options; what somebody means who types another word."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import click

from ckpt_tools.text import did_you_mean, did_you_mean_file, meant
from ckpt_tools.tree.options import Options

WHOLE = "ckpt.help-all"  # in the meta of a context whose help is to have every option
_ALL = "Show all options."


class LongHelp(click.Command):
    """A command whose --help has the options that are used most, and whose --help-all has all of them under headings."""

    def __init__(self, *args: Any, record: type[Options], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.record = record
        self.params.append(
            click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help=_ALL)
        )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What it does and its examples; what else there is to say stands in the whole help."""
        text = self.help or ""
        self.help = text if WHOLE in ctx.meta else "\n\n".join(text.split("\n\n")[:2])
        super().format_help_text(ctx, formatter)
        self.help = text

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, those of one heading together."""
        parts: dict[str, list[tuple[str, str]]] = {}
        rest: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            name = param.name or ""
            option = self.record.options.get(name) or self.record.options.get(f"{name}_")
            if isinstance(param, click.Argument) or (row := param.get_help_record(ctx)) is None:
                continue
            if WHOLE in ctx.meta:
                (rest if option is None else parts.setdefault(option.heading, [])).append(row)
            elif "--help-all" in param.opts or (option is not None and option.common):
                parts.setdefault("Most used", []).append(row)
        for heading, rows in [*parts.items(), *([("Other", rest)] if rest else [])]:
            with formatter.section(heading):
                formatter.write_dl(rows)


def _show_all(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        ctx.meta[WHOLE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _complete_commands(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in (*_group(ctx).list_commands(ctx), *TOPICS) if name.startswith(incomplete)]


def _group(ctx: click.Context) -> click.Group:
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    return group


@click.command(short_help="Show help for a command or topic.")
@click.argument("name", metavar="[COMMAND | TOPIC]", required=False, shell_complete=_complete_commands)
@click.pass_context
def help(ctx: click.Context, name: str | None) -> None:
    """Show help for a command, or for a topic: formats, globs, environment, json, exit-codes.

    \b
    ckpt help convert
    ckpt help exit-codes
    """
    group, top = _group(ctx), ctx.find_root()
    if name is None:
        click.echo(top.get_help(), color=ctx.color)
    elif name in TOPICS:
        click.echo(TOPICS[name], nl=False)
    elif (command := group.get_command(top, name)) is not None:
        with click.Context(command, top, name) as asked:
            click.echo(command.get_help(asked), color=ctx.color)
    else:
        hint = did_you_mean(name, (*group.list_commands(top), *TOPICS)) or f"Topics are {', '.join(TOPICS)}."
        raise click.UsageError(f"No such command or topic {name!r}. {hint}", ctx)


# What other programs call it.
_OTHER_COMMANDS = {
    "merge": "ckpt convert BASE OUT --lora ADAPTER, or ckpt convert FOLDER OUT",
    "merge-lora": "ckpt convert BASE OUT --lora ADAPTER",
    "strip": "ckpt convert IN OUT --unwrap",
    "rename": "ckpt convert IN OUT --rename '^old=new'",
    "prune": "ckpt convert IN OUT --drop 'GLOB', or --slim",
    "quantize": "ckpt convert IN OUT.gguf --dtype q8_0, or --dtype fp8_e4m3",
    "dequantize": "ckpt convert IN OUT --dequantize",
    "split": "ckpt convert IN FOLDER --shard-size 5GB",
    "shard": "ckpt convert IN FOLDER --shard-size 5GB",
    "extract": "ckpt convert IN OUT --select WHERE",
    "list": "ckpt inspect PATH", "ls": "ckpt inspect PATH", "info": "ckpt inspect PATH",
    "print": "ckpt inspect PATH", "keys": "ckpt inspect --all PATH",
    "validate": "ckpt check PATH", "test": "ckpt check PATH",
    "compare": "ckpt diff A B", "fix": "ckpt repair IN OUT", "recover": "ckpt repair IN OUT",
    "version": "ckpt --version",
}  # fmt: skip


def about_command(word: str, commands: Iterable[str]) -> str:
    """What somebody means who gives a word that is neither a command nor a file."""
    if word in _OTHER_COMMANDS:
        return f"Here it is {_OTHER_COMMANDS[word]}."
    try:
        others = sorted(os.listdir(os.path.dirname(word) or "."))
    except OSError:
        others = []
    return did_you_mean(word, commands) or did_you_mean_file(word, others)


def about_option(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with the option of this command that is meant: by its meaning, else by its letters."""
    from ckpt_tools.render.wording import as_options

    known = [param.name or "" for param in error.ctx.command.params] if error.ctx is not None else []
    hint = as_options(meant(error.option_name.lstrip("-").replace("-", "_"), known))
    if not hint and error.possibilities:
        hint = f"Did you mean {', '.join(map(repr, error.possibilities))}?"
    return click.NoSuchOption(error.option_name, f"No such option {error.option_name!r}. {hint}".rstrip(), ctx=error.ctx)


TOPICS = {
    "exit-codes": """\
0    success
1    the answer is no: findings (check), a dangerous or unreadable file (scan), a difference (diff, prove),
     unmatched tensors (match), lost tensors (repair), a wrong signature or unsafe file (verify)
2    wrong usage; nothing was done
3    refused: a file cannot be read or written, or the result would not be what you asked for
130  interrupted (Ctrl-C); 143 ended by SIGTERM

A file is always written whole or not at all. `ckpt COMMAND --help` says what 1 means there.
""",
    "formats": """\
The format is detected from the content, never from the name:

torch-zip, torch-legacy, torch-tar    torch.save, of any age
torchscript, torch-export             torch.jit.save, torch.export.save
safetensors, gguf, onnx, keras, flax  one file, of gguf also several
npz, npy, pickle, zip-bundle          NumPy, pickle.dump, stable-baselines3
sharded, dcp                          folders: an index and shards; torch.distributed.checkpoint
rank-files, consolidated              a file for each rank: FSDP, tensor parallelism, Meta's Llama
megatron, deepspeed                   folders of parts

Each may be packed: gzip, bzip2, xz, zstd, tar. ckpt can write torch-zip, torch-legacy (--format pth-legacy),
safetensors, gguf, sharded (--shard-size) and dcp; the name of OUT or --format decides.
""",
    "globs": """\
*       anything, dots too: --drop 'optimizer*', --keep '*.weight'
?       one character
[ab]    one of these; [!ab] none of these

A glob must match the whole name: 'fc' does not match 'fc.weight', 'fc.*' does. Names are those in IN, as
ckpt inspect shows them, before --strip-module and --rename. Anything else has a dotted path (--drop optimizer).
Of several globs with a value the last that matches counts (--dtype bf16 --dtype '*.norm.*=fp32'). Quote globs,
or the shell expands them. A glob that matches nothing is refused; only inspect shows the file all the same.
""",
    "environment": """\
CKPT_COMMAND_OPTION   any option of a command: CKPT_SCAN_JOBS=1, CKPT_CHECK_FORMAT=json; 1 or 0 for a
                      flag; separate several values by spaces
CKPT_CHECK_IGNORE     "wrapper-prefix device-tags": findings that ckpt check leaves out; also CKPT_IGNORE
CKPT_CONVERT_OBJECTS  what ckpt convert does with Python objects: plain, drop, keep; also CKPT_OBJECTS
CKPT_LIMITS           "records=2000000 nodes=5000000": raised limits, for files that you trust (docs/limits.md)

An option on the command line overrides its variable; an empty variable is ignored. ckpt --version --verbose
lists all that are set. There is no configuration file. NO_COLOR, COLUMNS, PAGER and TMPDIR work as usual.
""",
    "json": """\
--json prints one document; inspect, check and scan print one line per file. Errors too, with "error", "what"
and "exit_code". Text is ASCII with \\u escapes. docs/*.schema.json explain every field.

ckpt inspect --json model.pth | jq '.totals.parameters'
ckpt check --json runs/ | jq -r 'select(.findings | length > 0) | .path'
""",
}
