"""What commands share: paths, addresses, pipes, options that may be given once, those of a record, the report, and the bar."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from ckpt_tools.cli.completion import complete_names, complete_places
from ckpt_tools.errors import CkptError, NotACheckpointError, OutputError, UsageError
from ckpt_tools.io.source import Handed, is_address
from ckpt_tools.tree.options import Option, Options

if TYPE_CHECKING:
    from ckpt_tools.io.writer import Progress
    from ckpt_tools.operations.safety import Safety

    _OneOf = click.Choice[str]
else:
    _OneOf = click.Choice  # no generic before click 8.2


@dataclass(slots=True, eq=False, repr=False)
class Expanded:
    """What the paths of a command stand for: the checkpoints, and by folder the files in it that are not."""

    checkpoints: list[Path]
    others: dict[Path, list[Path]]


def expand(paths: tuple[Path, ...]) -> Expanded:
    """Folders as the checkpoints in them and the other files; files and addresses as they are."""
    expanded = Expanded([], {})
    for path in paths:
        if isinstance(path, Handed) or is_address(path) or not os.path.isdir(path):
            expanded.checkpoints.append(path)
            continue
        from ckpt_tools.operations.in_folders import find_checkpoints

        found = find_checkpoints(path)
        found.checkpoints = sorted([*found.checkpoints, *found.unlisted])  # each says why when it is opened
        if not found.checkpoints:
            count = f"None of its {len(found.others)} files is one" if found.others else "It has no files"
            raise NotACheckpointError(f"{path} is a folder without checkpoints.", why=f"{count}.")
        expanded.checkpoints.extend(found.checkpoints)
        if found.others:
            expanded.others[path] = found.others
    return expanded


def print_others(others: dict[Path, list[Path]], *, json: bool) -> None:
    """The files of folders that are not checkpoints: how many and which; all of them as a JSON line."""
    for folder, paths in others.items():
        if json:
            from ckpt_tools.render.json import folder_document, print_document

            print_document(folder_document(folder, paths))
        else:
            from ckpt_tools.text import listed, printable

            names = listed([str(path.relative_to(folder)) for path in paths])
            count = "1 file is not a checkpoint" if len(paths) == 1 else f"{len(paths)} files are not checkpoints"
            sys.stdout.write("\n" + printable(f"{folder}: {count}: {names}") + "\n")


def print_failure(path: Path, error: CkptError, *, json: bool, safety: Safety | None = None) -> None:
    """One file of several cannot be read: say so, and as a JSON line too; and what it would run nevertheless."""
    if json:
        from ckpt_tools.render.json import error_document, print_document

        known = {"safety": safety.to_json()} if safety is not None else {}
        print_document(error_document(str(path), error) | known)
    from ckpt_tools.render.text import Page, console, print_error, print_finding

    error.about(path)
    print_error(error)
    for finding in safety.findings(str(path), opens=False) if safety is not None and safety.calls else ():
        print_finding(finding, Page(console(stderr=True)))


def print_report(report: Any, render: Callable[..., None], *, json: bool, quiet: bool = False, **view: Any) -> None:
    """The report of a command as JSON or as a page, or not at all."""
    if json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    elif not quiet:
        from ckpt_tools.render.text import show

        show(partial(render, report, **view))


# --- paths

_PIPE_NAMES = re.compile(r"/dev/(?:stdin|fd/[0-9]+)|/proc/self/fd/[0-9]+")
_STDIN = ("-", "/dev/stdin")


class Location(click.Path):
    """A path, an address (s3://..., https://...), which stays as it is given, or a pipe (`-`, or `<(...)` of a shell)."""

    def __init__(self, path_type: type[Path] | type[str] = Path, *, minus: str = "") -> None:
        super().__init__(path_type=path_type, readable=False)  # why one of several cannot be read is said of that one
        self.minus = minus

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            raise click.UsageError("A path is empty. Perhaps a variable is not set.", ctx)
        if value == "-" and self.minus:
            raise click.UsageError(self.minus, ctx)
        if not self.minus and ctx is not None and not ctx.resilient_parsing and (value == "-" or _is_pipe(value)):
            return _piped(value, ctx)
        if not is_address(value):
            return super().convert(value, param, ctx)
        from ckpt_tools.io.source import Address

        return Address(os.fspath(value))


_FILES_ONLY = "Standard input is read by inspect, check and scan: save it as a file first."
_NO_STREAM = "OUT is a file, written whole or not at all, and never standard output: name a file."
PIPED = Location()
LOCATION = Location(minus=_FILES_ONLY)
OUTPUT = Location(str, minus=_FILES_ONLY)  # as it was typed: `out/` is a folder's name, which a Path forgets
OUT, OUT_PATH = Location(str, minus=_NO_STREAM), Location(minus=_NO_STREAM)


def _is_pipe(path: Any) -> bool:
    try:
        return isinstance(path, str) and _PIPE_NAMES.fullmatch(path) is not None and stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def _piped(name: str, ctx: click.Context) -> Handed:
    """A pipe, read into a temporary file without a name, which goes with the command."""
    made = Handed("<stdin>" if name in _STDIN else f"<{name}>")
    if name in _STDIN and ctx.meta.setdefault("ckpt.stdin", made) is not made:
        raise click.UsageError("Standard input was given twice; it can be read only once.")
    if name == "-":
        made.file = _standard_input(ctx)
        return made
    try:
        with open(name, "rb", buffering=0) as pipe:
            made.file = _spooled(pipe, ctx)
    except OSError as error:
        raise NotACheckpointError(f"{made} cannot be read.", why=f"{error.strerror or error}.") from None
    return made


def _standard_input(ctx: click.Context) -> Any:
    stream = sys.stdin.buffer if sys.stdin is not None else None
    if stream is None or stream.isatty():
        raise click.UsageError("Standard input is a terminal: pipe a checkpoint into the command.")
    with contextlib.suppress(OSError, ValueError):  # in a test it is no file
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):  # `- < model.pth`: it can be read where it is
            return stream
    return _spooled(stream, ctx)


def _spooled(stream: IO[bytes], ctx: click.Context) -> IO[bytes]:
    import shutil
    import tempfile

    file = tempfile.TemporaryFile()  # noqa: SIM115  closed when the command ends
    ctx.find_root().call_on_close(file.close)  # where what follows is wrong, the command has no context
    try:
        shutil.copyfileobj(stream, file, 1 << 20)
        file.flush()
    except OSError as error:
        raise OutputError(
            "Standard input cannot be copied to a temporary file.", why=f"{error.strerror or error}.",
            fix="Write it to a file first, or set TMPDIR to a folder with room.",
        ) from None  # fmt: skip
    file.seek(0)
    return file


# --- options


class Once(click.Option):
    """An option that may be given once: the last of two would win in silence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "multiple": True})

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """The text of a variable is one value, with the spaces in it."""
        value = self.resolve_envvar_value(ctx)
        return None if value is None else (value,)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        given = super().process_value(ctx, value)
        if given and len(given) > 1:
            raise click.UsageError(f"{self.opts[0]} is given {len(given)} times.", ctx)
        return given[0] if given else None


once = partial(click.option, cls=Once)
select_option = partial(once, "--select", metavar="WHERE", shell_complete=complete_places)
filter_option = partial(once, "--filter", metavar="GLOB", shell_complete=complete_names)
out_option = once("--output", "-o", type=OUT, metavar="OUT", help="The same as OUT.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
json_option = click.option("--json", is_flag=True, help="Print the report as JSON; see docs/json.md.")
jobs_option = click.option("--jobs", "-j", type=click.IntRange(1), metavar="N", help="Number of processes [up to 4].")


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--quiet and --json."""
    return quiet_option(json_option(command))


def form_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format and --json, of commands whose report has other forms too."""
    form = click.option(
        "--format", type=click.Choice(["text", "json", "sarif", "github", "junit"]), default="text", show_default=True,
        help="Format of the report: sarif (SARIF 2.1.0) for code hosts, github for GitHub Actions, junit (XML) for CI servers.",
    )  # fmt: skip
    json = click.option("--json", is_flag=True, help="The same as --format json: one document per line; see docs/json.md.")
    return form(json(command))


def one_out(target: str | None, out: str | None) -> str | None:
    """OUT, which is named by its place or by -o."""
    if target is not None and out is not None:
        raise click.UsageError(f"OUT is given twice: {target}, and {out} with -o.")
    return out if target is None else target


def options_of(record: type[Options], **changed: Mapping[str, Any]) -> Callable[..., Any]:
    """The options of a record, in its order, on a command; `changed` says by name what this command has otherwise."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, option in reversed(record.options.items()):
            if not option.type.startswith("Progress"):
                names = [f"--{name.rstrip('_').replace('_', '-')}", *([option.alias] if option.alias else [])]
                command = click.option(*names, **{**_as_click(option), **changed.get(name, {})})(command)
        return command

    return decorate


def _as_click(option: Option) -> dict[str, Any]:
    """What click calls an option of this kind."""
    complete = {"names": complete_names, "places": complete_places}.get(option.completes)
    said: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "shell_complete": complete}
    if option.type == "bool":
        return {**said, "is_flag": True}
    if option.many:
        return {**said, "help": f"{option.help} Repeatable.", "multiple": True}
    bare = {"is_flag": False, "flag_value": option.bare} if option.bare else {}
    kind = _Choice(option) if option.choices else int if option.type.startswith("int") else str
    return {**said, **bare, "cls": Once, "type": kind}


class _Choice(_OneOf):
    """One of the choices of an option, also by another word that its reader knows."""

    def __init__(self, option: Option) -> None:
        super().__init__(option.choices)
        self.option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(self.option.read("", value))
        except UsageError:
            return super().convert(value, param, ctx)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of what click hands over, what was on the command line, as the library calls it: `from_`."""
    asked = {name: value for name, value in options.items() if value not in (None, (), False)}
    return {f"{name}_" if iskeyword(name) else name: value for name, value in asked.items()}


# --- what a terminal shows of work that takes over a second: rich's bar; nothing in a pipe

_AFTER = 1.0  # seconds


@contextlib.contextmanager
def show_progress(*, quiet: bool = False) -> Iterator[Progress]:
    """A bar for the work inside, which may call it with bytes done and in all; where it does not, the bar only moves."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, size: None
        return
    shown = _Bar()
    timer = threading.Timer(_AFTER, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.update
    finally:
        timer.cancel()
        timer.join()
        shown.stop()


class _Bar:
    """rich's bar, which is imported when it is needed."""

    def __init__(self) -> None:
        self.done, self.size, self.bar = 0, 0, None

    def start(self) -> None:
        """Show it."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from ckpt_tools.render.text import console

        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        bar: Any = Progress(
            *columns, console=console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        bar.add_task("working ...", total=None)
        bar.start()
        self.bar = bar

    def update(self, done: int, size: int) -> None:
        """So many bytes are done of so many."""
        if self.bar is not None:
            from ckpt_tools.render.text import size_text

            speed = size_text(int(self.bar.tasks[0].speed or 0))
            self.bar.update(0, completed=done, total=size, description=f"{size_text(done)} of {size_text(size)}  {speed}/s")

    def stop(self) -> None:
        """Take it away."""
        if self.bar is not None:
            self.bar.stop()
