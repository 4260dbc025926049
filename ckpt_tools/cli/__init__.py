"""The command line: parse, call one operation, render, exit code. Imports no torch, and rich only to print.

A module a command, imported when that command is called.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, TextIO

import click

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import CkptError, exhausted, out_of_memory
from ckpt_tools.values.pytorch import torch_told

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Those of --help, in its order.
COMMANDS = {
    "Most used": ("inspect", "convert", "check", "scan", "repair", "diff", "explain"),
    "More": (
        "show", "stats", "match", "average", "extract-lora", "report", "prove", "sign", "verify", "completion", "help",
    ),
}  # fmt: skip
_NAMES = tuple(name for names in COMMANDS.values() for name in names)
_VERBOSE, _COMMAND = "ckpt.verbose", "ckpt.command"  # in the meta of the contexts
_READ_NO_FILE = ("explain", "completion", "help")
_ELSEWHERE = {"verify": "sign"}  # commands whose module is another one's
_PACKAGES = ("torch", "safetensors", "click", "rich", "isal", "cryptography", "h5py", "gguf")

# A command makes little that refers to itself, and ends soon: looking for cycles among all that it made would only take time.
gc.set_threshold(10_000_000)  # a checkpoint of 200,000 tensors makes four million objects
atexit.register(gc.freeze)


# What torch says when it is imported where NumPy is not installed; nothing here needs it.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)


def _begin(ctx: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> None:
    ctx.meta[_COMMAND] = ctx
    ctx.call_on_close(lambda: _tell_variables(ctx))
    limits.set_limits(given)


_LIMIT = click.Option(
    ["--limit"], multiple=True, metavar="NAME=VALUE", envvar="CKPT_LIMITS", expose_value=False, is_eager=True,
    callback=_begin,
    help="Raise a limit for a file that you trust: --limit records=2000000 (docs/limits.md).",
)  # fmt: skip


def _variable_of(ctx: click.Context, option: click.Parameter) -> str | None:
    """The variable that an option has its value from."""
    if ctx.get_parameter_source(option.name or "") is not click.core.ParameterSource.ENVIRONMENT:
        return None
    names = (option.envvar, f"{ctx.auto_envvar_prefix}_{option.name}".upper())
    return next(name for name in names if isinstance(name, str) and os.environ.get(name))


def _tell_variables(ctx: click.Context) -> None:
    """Say what was not typed and counted all the same."""
    for option in ctx.command.params if not ctx.params.get("quiet") else ():
        if (variable := _variable_of(ctx, option)) is not None:
            _tell(f"{option.opts[0]} is set by {variable}={os.environ[variable]}")


class _Group(click.Group):
    """Turns our errors into a message and an exit code, Ctrl-C and SIGTERM into 130 and 143; under --json a document too."""

    as_json = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_NAMES)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by their groups."""
        for heading, names in COMMANDS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str()) for name, command in commands if command is not None])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _NAMES:
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(import_module(f"ckpt_tools.cli.{_ELSEWHERE.get(name, name)}"), name)
        assert isinstance(command, click.Command)
        if _LIMIT not in command.params and cmd_name not in _READ_NO_FILE:
            command.params.append(_LIMIT)
            command.context_settings = {"auto_envvar_prefix": f"CKPT_{name.upper()}"}  # --ignore of check: CKPT_CHECK_IGNORE
        return command

    def main(self, *args: Any, **extra: Any) -> Any:
        _open_streams()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is escaped
        return super().main(*args, **extra)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        given = list(takewhile(lambda arg: arg != "--", args[1] if len(args) > 1 else extra["args"]))
        # Told before it is parsed: what cannot be parsed is an error in JSON too.
        self.as_json = "--json" in given or "--format=json" in given or ("--format", "json") in pairwise(given)
        with self.failing():  # --help and --version print while the options are read
            return super().make_context(*args, **extra)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and (args[0] == "-" or not args[0].startswith("-")) and args[0] not in _NAMES:
            from ckpt_tools.io.source import is_address, is_there

            if args[0] == "-" or is_there(args[0]) or is_address(args[0]):
                args = ["inspect", *args]
            elif not ctx.resilient_parsing:
                from ckpt_tools.cli.help import about_command

                ctx.fail(f"No command and no file is called {args[0]!r}. {about_command(args[0], _NAMES)}".rstrip())
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # click itself imports it only where a shell asks

        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def invoke(self, ctx: click.Context) -> Any:
        with self.failing(), out_of_memory(), _terminable(), limits.raised():
            try:
                with torch_told():
                    return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # what cannot be printed is told now, not at the exit

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What goes wrong as a message, an exit code, and a document where JSON was asked for."""
        try:
            yield
            return
        except (CkptError, MemoryError, RecursionError) as problem:
            from ckpt_tools.render.text import print_error

            error = problem if isinstance(problem, CkptError) else exhausted(problem, "The command cannot be finished")
            self.print_failure(error)
            if not _rank() or error.rank in (None, _rank()):  # each process says its own, the first one every error
                with _telling():
                    print_error(error)
            code = error.exit_code
        except click.ClickException as wrong:  # click prints it
            usage = _usage(wrong)
            ctx = getattr(usage, "ctx", None)
            fix = f"{ctx.command_path} --help lists the options." if ctx is not None else ""
            self.print_failure("UsageError", usage.format_message(), exit_code=usage.exit_code, fix=fix)
            raise usage from None
        except KeyboardInterrupt:
            code = 130
            self.print_failure("Interrupted", "Interrupted.", exit_code=code)
            _tell("Interrupted.")
        except _Terminated:
            self.print_failure("Terminated", "Terminated.", exit_code=143)
            raise
        except BrokenPipeError:  # the reader of our output (head, less) has gone: as of a program that SIGPIPE ends
            _silence(sys.stdout)
            code = 141
        except OSError as unprinted:  # of files that we read or write it would be a CkptError
            _silence(sys.stdout)
            what = "The report cannot be printed" if unprinted.filename is None else str(unprinted.filename)
            _tell(f"Error: {what}: {unprinted.strerror or unprinted}.")
            code = 3
        raise click.exceptions.Exit(code)

    def print_failure(self, error: CkptError | str, what: str = "", **more: Any) -> None:
        """Why there is no report, as the JSON that was asked for; where it cannot be printed, the exit code has to do."""
        ctx = click.get_current_context(silent=True)
        command = ctx.meta.get(_COMMAND) if ctx is not None else None
        set_so = command is not None and (command.params.get("json") or command.params.get("format") == "json")
        if not (self.as_json or set_so) or _rank():
            return
        from ckpt_tools.render.json import error_document, failure_document, print_document

        try:
            print_document(failure_document(error, what, **more) if isinstance(error, str) else error_document(None, error))
        except OSError:
            _silence(sys.stdout)


def _usage(error: click.ClickException) -> click.ClickException:
    """With the option that is meant, or the variable that is wrong."""
    if isinstance(error, click.NoSuchOption):
        from ckpt_tools.cli.help import about_option

        return about_option(error)
    if isinstance(error, click.BadParameter) and error.ctx is not None and error.param is not None:
        error.param_hint = _variable_of(error.ctx, error.param) or error.param_hint
    return error


def _rank() -> int:
    """Which process of torchrun's this one is; 0 for one that works alone."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and os.environ.get("WORLD_SIZE", "1") != "1" else 0


def _open_streams() -> None:
    """Put something in the place of standard streams that were closed (`>&-`): the next file that is opened would take it."""
    for name, flag in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:  # os.open takes the lowest number that is free: that of the stream
            setattr(sys, name, open(os.open(os.devnull, flag), "r" if name == "stdin" else "w"))  # noqa: SIM115


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """A message on standard error; where that cannot be written either, the exit code has to do."""
    try:
        yield
    except OSError:
        _silence(sys.stderr)


def _tell(message: str) -> None:
    from ckpt_tools.text import printable

    with _telling():
        click.echo(printable(message), err=True)


def _silence(stream: TextIO) -> None:
    """A standard stream goes nowhere from now on, so that the exit does not fail on it."""
    with contextlib.suppress(OSError, ValueError):  # in a test it may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Terminated(SystemExit):
    """SIGTERM came; the exit code is the shell's for it, 143."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises, so that a half-written output is removed on the way out."""

    def stop(number: int, frame: object) -> None:
        raise _Terminated(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    except RuntimeError as error:  # what Python 3.11 makes of a signal that comes while a class is made, as in an import
        if isinstance(error.__cause__, KeyboardInterrupt | _Terminated):
            raise error.__cause__ from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _note_verbose(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    ctx.meta[_VERBOSE] = asked


def _show_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """With --verbose what it runs on, no package imported, and the variables that are set."""
    if ctx.meta[_VERBOSE] and not asked:
        raise click.UsageError("--verbose here is for --version.")
    if not asked:
        return
    click.echo(f"ckpt, version {ckpt_tools.__version__} (ckpt_tools)")
    if ctx.meta[_VERBOSE]:
        from importlib import metadata
        from platform import platform, python_version

        from ckpt_tools.text import printable

        known = {package.metadata["Name"]: package.version for package in metadata.distributions()}
        packages = [f"{name} {known[name]}" if name in known else f"no {name}" for name in _PACKAGES]
        variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CKPT_") and value]
        lines = [f"Python {python_version()}, {sys.executable}", platform(), ", ".join(packages), *map(printable, variables)]
        click.echo("\n".join(lines))
    ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--verbose", "-v", is_flag=True, is_eager=True, expose_value=False, callback=_note_verbose,
    help="With --version: also show Python, packages and settings.",
)  # fmt: skip
@click.option("--version", "-V", is_flag=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
def main() -> None:
    """Inspect, convert, check and repair PyTorch checkpoints. Nothing in a file is ever executed.

    \b
    ckpt inspect model.pth
    ckpt convert in.pth out.pth --strip-module

    `ckpt FILE` is short for `ckpt inspect FILE`. `ckpt COMMAND --help` shows the options of a command.
    """
