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
from collections.abc import Callable, Iterator, Sequence
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

# In the order of --help.
COMMANDS = (
    "inspect", "show", "convert", "match", "check", "scan", "repair", "diff", "stats", "average", "extract-lora", "report",
    "prove", "sign", "verify", "explain", "completion", "help",
)  # fmt: skip
_VERBOSE, _COMMAND = "ckpt.verbose", "ckpt.command"  # in the meta of the contexts
_READ_NO_FILE = ("explain", "completion", "help")
_ELSEWHERE = {"verify": "sign"}  # commands whose module is another one's

# A command makes little that refers to itself, and ends soon: looking for cycles among all that it made would only take time.
gc.set_threshold(10_000_000)  # a checkpoint of 200,000 tensors makes four million objects
atexit.register(gc.freeze)


# What torch says when it is imported where NumPy is not installed; nothing here needs it.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)


def _begin(ctx: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> None:
    ctx.meta[_COMMAND] = ctx
    ctx.call_on_close(lambda: _tell_variables(ctx))
    limits.set_limits(map(limits.parse, given))


_LIMIT = click.Option(
    ["--limit"], multiple=True, metavar="NAME=VALUE", envvar="CKPT_LIMITS", expose_value=False, is_eager=True,
    callback=_begin,
    help="Raise a limit, for a file that you trust: --limit records=2000000 (docs/limits.md).",
)  # fmt: skip


def _name_variables(command: click.Command, name: str) -> None:
    """Each option takes its value from a variable too, where it is not given: --ignore of check from CKPT_CHECK_IGNORE."""
    for option in command.params:
        if isinstance(option, click.Option) and option.expose_value:
            spelled = next(text for text in option.opts if text.startswith("--"))
            variable = f"CKPT_{name}{spelled[1:]}".replace("-", "_").upper()
            option.envvar = [variable, *([option.envvar] if isinstance(option.envvar, str) else [])]


def _variable_of(ctx: click.Context, option: click.Parameter) -> str | None:
    """The variable that an option has its value from."""
    if ctx.get_parameter_source(option.name or "") is not click.core.ParameterSource.ENVIRONMENT:
        return None
    named = option.envvar or ()
    return next((name for name in ([named] if isinstance(named, str) else named) if os.environ.get(name)), None)


def _tell_variables(ctx: click.Context) -> None:
    """Say what was not typed and counted all the same."""
    for option in ctx.command.params if not ctx.params.get("quiet") else ():
        if (variable := _variable_of(ctx, option)) is not None:
            from ckpt_tools.text import printable

            with _telling():
                click.echo(printable(f"{option.opts[0]} is set by {variable}={os.environ[variable]}"), err=True)


def _wants_json(args: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, told before it is parsed: what cannot be parsed is an error in JSON too."""
    given = list(takewhile(lambda arg: arg != "--", args))
    return "--json" in given or "--format=json" in given or ("--format", "json") in pairwise(given)


class _Group(click.Group):
    """Turns our errors into a message and an exit code, Ctrl-C and SIGTERM into 130 and 143; under --json a document too."""

    as_json = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(import_module(f"ckpt_tools.cli.{_ELSEWHERE.get(name, name)}"), name)
        assert isinstance(command, click.Command)
        if _LIMIT not in command.params and cmd_name not in _READ_NO_FILE:
            _name_variables(command, cmd_name)
            command.params.append(_LIMIT)
        return command

    def main(self, *args: Any, **extra: Any) -> Any:
        _open_streams()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is escaped
        return super().main(*args, **extra)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        self.as_json = _wants_json(args[1] if len(args) > 1 else extra["args"])
        try:
            return super().make_context(*args, **extra)
        except KeyboardInterrupt:  # while the options are read; click by itself would exit with 1
            self.tell_interrupted()
            raise click.exceptions.Exit(130) from None
        except click.ClickException as error:
            self.print_failure(_usage_document, error)
            raise
        except BrokenPipeError:
            raise
        except OSError as error:  # --help and --version print while the options are read
            _tell_unprinted(error)
            raise click.exceptions.Exit(3) from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and (args[0] == "-" or not args[0].startswith("-")) and args[0] not in COMMANDS:
            if args[0] == "-" or _is_there(args[0]):
                args = ["inspect", *args]
            elif not ctx.resilient_parsing:
                from ckpt_tools.cli.other_words import about_command

                ctx.fail(f"No command and no file is called {args[0]!r}. {about_command(args[0], COMMANDS)}".rstrip())
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # click itself imports it only where a shell asks

        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with out_of_memory(), _terminable(), limits.raised():
                try:
                    with torch_told():
                        return super().invoke(ctx)
                finally:
                    sys.stdout.flush()  # what cannot be printed is told now, not at the exit
        except (CkptError, MemoryError, RecursionError) as problem:
            from ckpt_tools.render.text import print_error

            error = problem if isinstance(problem, CkptError) else exhausted(problem, "The command cannot be finished")
            self.print_failure(_error_document, error)
            if not _is_told_elsewhere(error):
                with _telling():
                    print_error(error)
            ctx.exit(error.exit_code)
        except click.NoSuchOption as unknown:
            from ckpt_tools.cli.other_words import correct

            wrong = correct(unknown)
            self.print_failure(_usage_document, wrong)
            raise wrong from None
        except click.ClickException as error:  # options of a command; click prints it
            if isinstance(error, click.BadParameter) and error.ctx is not None and error.param is not None:
                variable = _variable_of(error.ctx, error.param)
                error.param_hint = variable if variable is not None else error.param_hint
            self.print_failure(_usage_document, error)
            raise
        except KeyboardInterrupt:
            self.tell_interrupted()
            ctx.exit(130)
        except _Terminated as stopped:
            self.print_failure(_terminated_document, stopped)
            raise
        except BrokenPipeError:
            # The reader of our output (head, less) has gone.
            _silence(sys.stdout)
            ctx.exit(141)  # as of a program that SIGPIPE ends
        except OSError as error:  # of files that we read or write it would be a CkptError
            _tell_unprinted(error)
            ctx.exit(3)

    def print_failure(self, document: Callable[[Any], dict[str, Any]], error: object) -> None:
        """Why there is no report, as the JSON that was asked for; where it cannot be printed, the exit code has to do."""
        ctx = click.get_current_context(silent=True)
        command = ctx.meta.get(_COMMAND) if ctx is not None else None
        set_so = command is not None and (command.params.get("as_json") or command.params.get("form") == "json")
        if not (self.as_json or set_so) or _rank() > 0:
            return
        from ckpt_tools.render.json import print_document

        try:
            print_document(document(error))
        except OSError:
            _silence(sys.stdout)

    def tell_interrupted(self) -> None:
        """Ctrl-C, in words and in JSON."""
        self.print_failure(_interrupted_document, None)
        with _telling():
            click.echo("Interrupted.", err=True)


def _tell_unprinted(error: OSError) -> None:
    """Say that standard output takes nothing."""
    _silence(sys.stdout)
    what = "The report cannot be printed" if error.filename is None else str(error.filename)
    with _telling():
        click.echo(f"Error: {what}: {error.strerror or error}.", err=True)


def _open_streams() -> None:
    """Put something in the place of standard streams that were closed (`>&-`): the next file that is opened would take it."""
    for name, flag in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:  # os.open takes the lowest number that is free: that of the stream
            setattr(sys, name, open(os.open(os.devnull, flag), "r" if name == "stdin" else "w"))  # noqa: SIM115


def _is_there(text: str) -> bool:
    """Whether something is called so that `inspect` can be asked about: a file, a folder, an address."""
    from ckpt_tools.io.output import is_address, is_there

    return is_there(text) or is_address(text)


def _error_document(error: CkptError) -> dict[str, Any]:
    from ckpt_tools.render.json import error_document

    return error_document(None, error)


def _usage_document(error: click.ClickException) -> dict[str, Any]:
    from ckpt_tools.render.json import failure_document

    ctx = getattr(error, "ctx", None)
    fix = f"{ctx.command_path} --help lists the options." if ctx is not None else ""
    return failure_document("UsageError", error.format_message(), exit_code=error.exit_code, fix=fix)


def _rank() -> int:
    """Which process of torchrun's this one is; 0 for one that works alone."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and os.environ.get("WORLD_SIZE", "1") != "1" else 0


def _is_told_elsewhere(error: CkptError) -> bool:
    """Whether the error is another process's, which says so itself; the first process says every error."""
    return _rank() > 0 and error.rank not in (None, _rank())


def _terminated_document(stopped: SystemExit) -> dict[str, Any]:
    from ckpt_tools.render.json import failure_document

    assert isinstance(stopped.code, int)
    return failure_document("Terminated", "Terminated.", exit_code=stopped.code)


def _interrupted_document(_: object) -> dict[str, Any]:
    from ckpt_tools.render.json import failure_document

    return failure_document("Interrupted", "Interrupted.", exit_code=130)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """A message on standard error; where that cannot be written either, the exit code has to do."""
    try:
        yield
    except OSError:
        _silence(sys.stderr)


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
    verbose = ctx.meta[_VERBOSE]
    if verbose and not asked:
        raise click.UsageError("--verbose here is for --version.")
    if asked:
        click.echo(f"ckpt, version {ckpt_tools.__version__} (ckpt_tools)")
        if verbose:
            from ckpt_tools.cli.version import print_surroundings

            print_surroundings()
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--verbose", "-v", is_flag=True, is_eager=True, expose_value=False, callback=_note_verbose,
    help="With --version: what it runs on, and the settings.",
)  # fmt: skip
@click.option("--version", is_flag=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
def main() -> None:
    """Inspect, convert, fit, check, repair and compare PyTorch checkpoints. Nothing in a file is ever executed.

    \b
    ckpt inspect model.pth
    ckpt convert in.pth out.pth --strip-module

    `ckpt FILE` is `ckpt inspect FILE`, and `ckpt help COMMAND` is `ckpt COMMAND --help`.
    """
