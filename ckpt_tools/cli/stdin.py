"""A checkpoint from standard input: `-`, or a pipe that the shell gives a name (`<(...)`)."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import IO, Any, cast

import click

from ckpt_tools.cli.options import Location
from ckpt_tools.errors import NotACheckpointError, OutputError
from ckpt_tools.io.member_paths import Handed

_BLOCK = 1 << 20
_PIPE_NAMES = re.compile(r"/dev/(?:stdin|fd/[0-9]+)|/proc/self/fd/[0-9]+")


class Piped(Location):
    """The type of an argument that may be `-` or the name of a pipe, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A path, or what stands for the pipe until the command reads it."""
        if value != "-" and not (isinstance(value, str) and _is_pipe(value)):
            return super().convert(value, param, ctx)
        waiting = Handed("<stdin>" if value in ("-", "/dev/stdin") else f"<{value}>")
        waiting.called = value
        return waiting


PIPED = Piped(path_type=Path)


def _is_pipe(path: str) -> bool:
    try:
        return _PIPE_NAMES.fullmatch(path) is not None and stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def with_pipes_read(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The paths, each pipe read into a temporary file without a name, which goes with the command."""
    if sum(isinstance(path, Handed) and path.called in ("-", "/dev/stdin") for path in paths) > 1:
        raise click.UsageError("Standard input is given twice; it can be read once.")
    return tuple(cast("Path", _read(path)) if isinstance(path, Handed) else path for path in paths)


def _read(waiting: Handed) -> Handed:
    made = Handed(str(waiting))
    if waiting.called == "-":
        made.file = _standard_input()
        return made
    try:
        with open(waiting.called, "rb", buffering=0) as pipe:
            made.file = _spooled(pipe)
    except OSError as error:
        raise NotACheckpointError(f"{waiting} cannot be read.", why=f"{error.strerror or error}.") from None
    return made


def _standard_input() -> Any:
    stream = sys.stdin.buffer if sys.stdin is not None else None
    if stream is None or stream.isatty():
        raise click.UsageError("Standard input is a terminal: pipe a checkpoint into the command.")
    try:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):  # `- < model.pth`: it can be read where it is
            return stream
    except (OSError, ValueError):  # in a test it is no file
        pass
    return _spooled(stream)


def _spooled(stream: IO[bytes]) -> IO[bytes]:
    import shutil
    import tempfile

    file = tempfile.TemporaryFile()  # noqa: SIM115  closed when the command ends
    click.get_current_context().call_on_close(file.close)
    try:
        shutil.copyfileobj(stream, file, _BLOCK)
        file.flush()
    except OSError as error:
        raise OutputError(
            "What comes from standard input cannot be kept in a temporary file.", why=f"{error.strerror or error}.",
            fix="Write it to a file first, or set TMPDIR to a folder with room.",
        ) from None  # fmt: skip
    file.seek(0)
    return file
