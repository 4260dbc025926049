"""Man pages, made from what each command's --help says.

python -m docs.man [FOLDER]      # writes ckpt.1, ckpt-inspect.1 ...; by default to man/, from which `make wheel` takes them
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ckpt_tools import __version__
from ckpt_tools.cli import main
from ckpt_tools.cli.help import WHOLE

FOLDER = Path(__file__).parents[1] / "man"
_EXIT = re.compile(r"^Exit code: (.*)", re.DOTALL)


def pages() -> dict[str, str]:
    """Each page by its file's name: of the group, and of every command."""
    top = click.Context(main, info_name="ckpt", **main.context_settings)
    found = {"ckpt.1": _page("ckpt", main, top)}
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        assert command is not None
        found[f"ckpt-{name}.1"] = _page(f"ckpt-{name}", command, click.Context(command, top, name))
    return found


def _page(title: str, command: click.Command, context: click.Context) -> str:
    context.meta[WHOLE] = True
    text = inspect.cleandoc(command.help or "")
    short = command.get_short_help_str(limit=300).rstrip(".")
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f'.TH {title.upper()} 1 "" "ckpt {__version__}" "User commands"',
        ".SH NAME", f"{_roff(title)} \\- {_roff(short)}",
        ".SH SYNOPSIS", f".B {_roff(context.command_path)}", _roff(usage),
        ".SH DESCRIPTION", *_description(text), *_options(command, context), *_exit_status(text),
        *_commands(command, context), *_see_also(title),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _description(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield from (".PP", ".RS 4", ".nf", *map(_roff, paragraph.split("\n")[1:]), ".fi", ".RE")
        elif not _EXIT.match(paragraph):
            yield from (".PP", _roff(" ".join(paragraph.split())))


def _exit_status(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if found := _EXIT.match(paragraph):
            yield from (".SH EXIT STATUS", _roff(" ".join(found[1].split())))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    yield ".SH OPTIONS"
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None and isinstance(param, click.Option):
            yield from (".TP", f".B {_roff(record[0])}", _roff(record[1]))


def _commands(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from (".TP", f".BR {_roff(f'ckpt-{name}')} (1)", _roff(inner.get_short_help_str(limit=300)))


def _see_also(title: str) -> Iterator[str]:
    if title != "ckpt":
        yield from (".SH SEE ALSO", ".BR ckpt (1)")


def _roff(text: str) -> str:
    """A line of text as roff wants it: no character of it is a request or an escape."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha").replace("`", "\\(ga")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def write(folder: Path) -> None:
    """Write all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
