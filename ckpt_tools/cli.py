"""The command line: parse, call one operation, render, exit code. Imports no torch, and rich only to print."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

import ckpt_tools
from ckpt_tools.convert import convert as convert_checkpoint
from ckpt_tools.errors import CkptError, NotACheckpointError

if TYPE_CHECKING:
    from ckpt_tools.writer import Progress

_PROGRESS_FROM = 200 << 20
_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns our errors into a message and an exit code, Ctrl-C and SIGTERM into 130 and 143."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _terminable():
                return super().invoke(ctx)
        except CkptError as error:
            from ckpt_tools.render.text import print_error

            print_error(error)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            # The reader of our output (head, less) has gone. Point stdout elsewhere so that the exit does not fail on it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises, so that a half-written output is removed on the way out."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ckpt_tools.__version__, prog_name="ckpt")
def main() -> None:
    """Inspect and convert PyTorch checkpoints. Nothing in a file is ever executed.

    \b
    ckpt inspect model.pth
    ckpt convert in.pth out.pth --strip-module
    """


# --- inspect


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--all", "show_all", is_flag=True, help="Show every tensor, value and object; nothing folded or cut.")
@click.option("--tree/--flat", "tree", default=None, help="Show the tensors as a tree, or one a line.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up below the first N parts of the names.")
@click.option("--filter", "pattern", metavar="GLOB", help="Only tensors whose name or path matches.")
@click.option(
    "--sort", type=click.Choice(["name", "size", "file"]), default="file", show_default=True, help="Order of the tensors."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line; see docs/json.md.")
def inspect(
    paths: tuple[Path, ...], show_all: bool, tree: bool | None, depth: int | None, pattern: str | None, sort: str, as_json: bool
) -> None:
    """Show what checkpoints hold. A folder stands for the checkpoints in it.

    \b
    ckpt inspect model.pth
    ckpt inspect --filter '*.weight' --sort size model.pth
    ckpt inspect --json runs/ | jq .totals.parameters

    Exit code: 0 all shown, 3 when one cannot be read (the others are shown).
    """
    from ckpt_tools.describe import inspect as describe_checkpoint

    files, code = _expand(paths), 0
    for number, path in enumerate(files):
        try:
            description = describe_checkpoint(path)
        except CkptError as error:
            code = error.exit_code
            _print_failure(path, error, as_json)
            continue
        if as_json:
            from ckpt_tools.render.json import line

            click.echo(line(description.to_json()))
        else:
            from ckpt_tools.render import text

            view = text.View(show_all, bool(tree), tree is False, depth, pattern, cast("text.Sort", sort))
            if number:
                click.echo()
            text.show(partial(text.print_description, description, view))
    sys.exit(code)


def _print_failure(path: Path, error: CkptError, as_json: bool) -> None:
    if as_json:
        from ckpt_tools.render.json import error_document, line

        click.echo(line(error_document(str(path), error)))
    from ckpt_tools.render.text import print_error

    print_error(error)


_SUFFIXES = {".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".th", ".t7", ".tar", ".model", ".pkl", ".dat"}


def _expand(paths: tuple[Path, ...]) -> list[Path]:
    """Folders as the files below them that may be checkpoints by their name, sorted; files as they are."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(below for below in path.rglob("*") if below.suffix in _SUFFIXES and below.is_file())
        if not found:
            raise NotACheckpointError(
                f"{path} is a folder without checkpoints.", why=f"Looked for {', '.join(sorted(_SUFFIXES))}."
            )
        files += found
    return files


# --- convert


class _Once(click.Option):
    """An option that may be given once: the last of two would win in silence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "multiple": True})

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        given = super().process_value(ctx, value)
        if given and len(given) > 1:
            raise click.UsageError(f"{self.opts[0]} is given {len(given)} times.", ctx)
        return given[0] if given else None


@main.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--strip-module", is_flag=True, help="Remove leading 'module.', repeated ones too, in every state dict.")
@click.option("--add-module", is_flag=True, help="Put 'module.' before every name.")
@click.option("--unwrap", is_flag=True, help="Remove every known wrapper (module, _orig_mod, FSDP ...) in any order and depth.")
@click.option("--strip-prefix", cls=_Once, metavar="P", help="Remove a leading literal prefix.")
@click.option("--add-prefix", cls=_Once, metavar="P", help="Put a literal prefix before every name.")
@click.option("--rename", multiple=True, metavar="REGEX=REPLACEMENT", help=r"re.sub on names, in order; \1 works. Repeatable.")
@click.option("--keep", multiple=True, metavar="GLOB", help="Keep only tensors whose name matches. Repeatable.")
@click.option("--drop", multiple=True, metavar="GLOB", help="Drop what matches, by name or dotted path. Repeatable.")
@click.option(
    "--select", cls=_Once, metavar="WHERE", help="One state dict or subtree (model, ema, netG) becomes the whole output."
)
@click.option("--map-location", cls=_Once, metavar="SPEC", help="cpu, cuda, cuda:1, or cuda:0=cuda:1,cuda:7=cpu.")
@click.option("--dtype", cls=_Once, type=click.Choice(["bf16", "fp16", "fp32", "fp64"]), help="Cast float tensors.")
@click.option("--dtype-only", multiple=True, metavar="GLOB", help="Cast only tensors whose name matches. Repeatable.")
@click.option(
    "--objects",
    cls=_Once,
    type=click.Choice(["keep", "plain", "drop"]),
    help="What happens to objects that are not plain data.",
)
@click.option(
    "--format", "format_", cls=_Once, type=click.Choice(["pth", "safetensors"]), help="Container of OUT; else by its extension."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Report what would happen, write nothing.")
@click.option("--verify", is_flag=True, help="Check the CRC-32 of every record while copying.")
@click.option("--fsync", is_flag=True, help="Make a new OUT durable before returning (a replaced one always is).")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def convert(source: Path, target: Path, format_: str | None, as_json: bool, **options: Any) -> None:
    """Write IN as OUT with other names, devices, dtypes, container. OUT is the whole new file or is left alone.

    \b
    ckpt convert ddp.pth plain.pth --strip-module
    ckpt convert train.pth weights.safetensors --select model --unwrap
    ckpt convert gpu.pth cpu.pth --map-location cpu --dtype bf16

    The steps come in this order: --select, --objects, --keep and --drop (by the names in IN), --strip-module, --unwrap,
    --strip-prefix, --rename (split at its last =), --add-prefix, --add-module, --map-location, --dtype.

    Exit code: 0 done, 2 usage, 3 refused, 130 interrupted.
    """
    with _progress() as progress:
        report = convert_checkpoint(source, target, format=cast("Any", format_), progress=progress, **options)
    if as_json:
        from ckpt_tools.render.json import line

        click.echo(line(report.to_json()))
    else:
        from ckpt_tools.render import text

        text.show(partial(text.print_converted, report))


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar on a terminal, for work above 200 MB.

    What the report needs is imported at the first call, while the kernel copies: afterwards it would be waited for.
    """
    with contextlib.ExitStack() as stack:
        update: Progress | None = None

        def progress(done: int, size: int) -> None:
            nonlocal update
            import ckpt_tools.render.text  # noqa: F401

            if size < _PROGRESS_FROM or not sys.stderr.isatty():
                return
            if update is None:
                update = stack.enter_context(_bar(size))
            update(done, size)

        yield progress


@contextlib.contextmanager
def _bar(size: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda done, _: bar.update(task, completed=done)
