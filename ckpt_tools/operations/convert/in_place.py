"""Edit a checkpoint in place: `convert` into a file beside it, which takes its name once it is whole and on the disk."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from ckpt_tools.errors import ConvertError, OutputError
from ckpt_tools.io.output import Source, check_space, is_address
from ckpt_tools.operations.convert.conversion import open_input
from ckpt_tools.operations.convert.options import ConvertOptions, InPlaceOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.operations.convert.run import convert_with
from ckpt_tools.operations.in_folders import indexed_files
from ckpt_tools.parts.names import DCP_METADATA
from ckpt_tools.text import printable
from ckpt_tools.tree.options import as_keywords
from ckpt_tools.tree.output_names import Format

_FORMATS: dict[str, Format] = {
    "torch-zip": "pth", "torch-legacy": "pth-legacy", "safetensors": "safetensors",
}  # fmt: skip


@as_keywords(InPlaceOptions)
def edit_in_place(path: str | os.PathLike[str], options: InPlaceOptions) -> Converted:
    """Convert a checkpoint into its own file: at every moment the old file is there or the new one.

    It needs room for a second file on its disk; where the file system shares blocks, tensors that stay take none.

    Args:
        path: a torch-zip, torch-legacy or safetensors file.
        options: those of `InPlaceOptions`, as keywords.

    Returns:
        The report of `convert`.

    Raises:
        ConvertError: another container; or the file is one of several, and another one says where in it things lie,
            or what they are called.
        CkptError: see `ckpt_tools.errors`; the file is as it was then.
    """
    if is_address(path):
        raise OutputError(f"{path} is not on this machine.", why="Only local files are edited in place.", fix="Name an OUT.")
    started, asked = time.perf_counter(), ConvertOptions(**options.asked(), overwrite=True)
    with open_input(path, asked) as checkpoint:
        source, kind = checkpoint.source, _FORMATS.get(checkpoint.container)
        if kind is None or type(source) is not Source:  # a local file, whole
            raise ConvertError(
                f"{path} is a {checkpoint.described} file, which cannot be edited in place.", fix="Convert it to another file."
            )
        _check_alone(Path(path))
        if not options.dry_run:
            check_space(Path(os.path.realpath(path)).parent, Path(path), source.size)
        report = convert_with(path, path, asked.replace(format=kind), opened=checkpoint)
    report.seconds = time.perf_counter() - started
    return report


def _check_alone(path: Path) -> None:
    """Raise ConvertError for a file that another one tells of: .metadata, or an index."""
    for place in (path, Path(os.path.realpath(path))):
        if place.suffix == ".distcp" and (place.parent / DCP_METADATA).exists():
            raise _told_of(path, "a part of a distributed checkpoint", place.parent / DCP_METADATA)
        for index in place.parent.glob("*.index*.json"):
            if place.name in (indexed_files(index) or ()):
                raise _told_of(path, "a shard of a model", index)


def _told_of(path: Path, what: str, by: Path) -> ConvertError:
    why = f"{by.name} describes it, and would no longer be true."
    command = printable(f"ckpt convert {shlex.quote(str(by.parent))} OUT")
    return ConvertError(f"{path} is {what}.", why=why, fix=f"Convert the whole to another place: {command}")
