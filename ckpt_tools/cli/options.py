"""What several commands share: paths, options that may be given once, progress."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckpt_tools.errors import CkptError, NotACheckpointError, UsageError
from ckpt_tools.io.member_paths import Handed
from ckpt_tools.io.output import is_address
from ckpt_tools.tree.options import Option, Options

if TYPE_CHECKING:
    from ckpt_tools.io.ranks import Ranks
    from ckpt_tools.io.writer import Progress
    from ckpt_tools.operations.safety import Safety

    _OneOf = click.Choice[str]
else:
    _OneOf = click.Choice  # no generic before click 8.2

_PROGRESS_AFTER = 1.0  # seconds


@dataclass(slots=True, unsafe_hash=True)
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


def print_others(others: dict[Path, list[Path]], *, as_json: bool) -> None:
    """The files of folders that are not checkpoints: how many and which; all of them as a JSON line."""
    for folder, paths in others.items():
        if as_json:
            from ckpt_tools.render.json import folder_document, print_document

            print_document(folder_document(folder, paths))
        else:
            from ckpt_tools.text import listed, printable

            names = listed([str(path.relative_to(folder)) for path in paths])
            count = "1 file is not a checkpoint" if len(paths) == 1 else f"{len(paths)} files are not checkpoints"
            sys.stdout.write("\n" + printable(f"{folder}: {count}: {names}") + "\n")


def print_failure(path: Path, error: CkptError, *, as_json: bool, safety: Safety | None = None) -> None:
    """One file of several cannot be read: say so, and as a JSON line too; and what it would run nevertheless."""
    if as_json:
        from ckpt_tools.render.json import error_document, print_document

        known = {"safety": safety.to_json()} if safety is not None else {}
        print_document(error_document(str(path), error) | known)
    from ckpt_tools.render.text import console, print_error, print_finding

    print_error(error)
    for finding in safety.findings(str(path), opens=False) if safety is not None and safety.calls else ():
        print_finding(finding, console(stderr=True))


class Location(click.Path):
    """The type of an argument: a path, or an address (s3://..., https://...), which stays as it is given."""

    def __init__(self, path_type: type[Path] | type[str]) -> None:
        super().__init__(path_type=path_type, readable=False)  # why one of several cannot be read is said of that one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the address in a path's place."""
        if value == "":
            raise click.UsageError("A path is empty: it may come from a variable that is not set.", ctx)
        if value == "-":
            raise click.UsageError("Standard input is read by inspect, check and scan: save it as a file first.", ctx)
        if not is_address(value):
            return super().convert(value, param, ctx)
        from ckpt_tools.io.address import Address

        return Address(os.fspath(value))


class Output(Location):
    """The type of OUT: a path or an address. `-` would be a file of that name, and is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path or the address."""
        if value == "-":
            raise click.UsageError("OUT is a file, written whole or not at all, and never standard output: name a file.", ctx)
        return super().convert(value, param, ctx)


LOCATION = Location(path_type=Path)
OUT = Output(path_type=str)
OUT_PATH = Output(path_type=Path)
OUTPUT = Location(path_type=str)  # as it was typed: `out/` is a folder's name, which a Path forgets


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


out_option = click.option("--output", "-o", "out", cls=Once, type=OUT, metavar="OUT", help="Write to OUT, named as an option.")


def one_out(target: str | None, out: str | None) -> str | None:
    """OUT, which is named by its place or by -o."""
    if target is not None and out is not None:
        raise click.UsageError(f"OUT is given twice: {target}, and {out} with -o.")
    return out if target is None else target


quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors: the exit code tells.")


def options_of(record: type[Options], **changed: Mapping[str, Any]) -> Callable[..., Any]:
    """The options of a record, in its order, on a command; `changed` says by name what this command has otherwise."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, option in reversed(record.options.items()):
            if not option.type.startswith("Progress"):
                names = [f"--{name.rstrip('_').replace('_', '-')}", *([option.alias] if option.alias else []), name]
                command = click.option(*names, **{**_as_click(option), **changed.get(name, {})})(command)
        return command

    return decorate


def _as_click(option: Option) -> dict[str, Any]:
    """What click calls an option of this kind."""
    said: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "shell_complete": _completion(option)}
    if option.type == "bool":
        return {**said, "is_flag": True}
    if option.many:
        return {**said, "help": f"{option.help} Repeatable.", "multiple": True}
    if option.type.startswith("int"):
        return {**said, "cls": Once, "type": int}
    bare = {"is_flag": False, "flag_value": option.bare} if option.bare else {}
    return {**said, **bare, "cls": Once, "type": _Choice(option) if option.choices else str}


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


def _completion(option: Option) -> Callable[..., Any] | None:
    if not option.completes:
        return None
    from ckpt_tools.cli.completion import complete_names, complete_places

    return complete_names if option.completes == "names" else complete_places


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of what click hands over, what was on the command line."""
    return {name: value for name, value in options.items() if value not in (None, (), False)}


@contextlib.contextmanager
def work_shared(*, folder: bool) -> Iterator[Ranks | None]:
    """The processes that torchrun started for a command whose output is a folder; None where one works alone."""
    if not folder or os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    from ckpt_tools.io.ranks import launched

    with launched() as ranks:
        yield ranks


def end_process() -> NoReturn:
    """End a process of a job whose work is done, now: threads of gloo that still run abort an interpreter that winds down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def show_progress(*, quiet: bool = False, preload: str | None = None) -> Iterator[Progress]:
    """A progress bar on a terminal, for work that takes over a second; nothing in a pipe, or where quiet was asked for."""
    with waiting(quiet=quiet) as word, contextlib.ExitStack() as stack:
        update: Progress | None = None
        started: float | None = None
        before = 0

        def progress(done: int, size: int) -> None:
            nonlocal update, started, before
            if word is not None:
                word.stop()
            if done < before:  # the next work of several: a bar and a time of its own
                stack.close()
                update, started = None, None
            before = done
            if preload is not None and preload not in sys.modules:
                import_module(preload)
            now = time.monotonic()
            started = now if started is None else started  # the work's own time: imports do not count
            if update is None and not quiet and done < size and now - started > _PROGRESS_AFTER and sys.stderr.isatty():
                update = stack.enter_context(_bar(size, started))
            if update is not None:
                update(done, size)

        yield progress


@contextlib.contextmanager
def _bar(size: int, started: float) -> Iterator[Progress]:
    """A bar with bytes done and in all, speed, and time left, in binary units."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ckpt_tools.render.text import console, size_text

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size)

        def update(done: int, _: int) -> None:
            speed = done / max(time.monotonic() - started, 1e-3)
            bar.update(task, completed=done, description=f"{size_text(done)} of {size_text(size)}  {size_text(int(speed))}/s")

        yield update


AFTER = 1.0  # seconds
_WORD, _ERASE = "working ...", "\r\x1b[K"


class Waiting:
    """Shows the word after a second, until it is stopped."""

    def __init__(self) -> None:
        import threading

        self._lock, self._over, self._shown = threading.Lock(), False, False
        self._timer = threading.Timer(AFTER, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._over:
                self._shown = True
                _write(_WORD)

    def stop(self) -> None:
        """Take the word away, for good; twice does no harm."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown:
                self._shown = False
                _write(_ERASE)


@contextlib.contextmanager
def waiting(*, quiet: bool = False) -> Iterator[Waiting | None]:
    """The word around work that is not counted; none in a pipe, or where quiet was asked for."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    shown = Waiting()
    try:
        yield shown
    finally:
        shown.stop()


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
