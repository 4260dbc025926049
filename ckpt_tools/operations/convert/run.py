"""Convert a checkpoint: the call. What it does is in `conversion`, which is imported while the copying has begun."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpt_tools.errors import CkptError, ConvertError, OutputError, UsageError, exhausted
from ckpt_tools.io.output import Output, check_space, output_target, replacing
from ckpt_tools.io.source import File, Source, as_path, is_address
from ckpt_tools.io.temporaries import Inputs
from ckpt_tools.io.writer import Clone
from ckpt_tools.operations.convert.options import ConvertOptions, InPlaceOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.text import printable, some
from ckpt_tools.tree.findings import stem_and_extension
from ckpt_tools.tree.options import as_keywords
from ckpt_tools.tree.output_names import EXTENSIONS, Format, check_format, check_one_file, names_file, output_format, writes
from ckpt_tools.values.pytorch import torch_told

if TYPE_CHECKING:
    from ckpt_tools.formats.checkpoint import Checkpoint
    from ckpt_tools.io.ranks import Ranks


@as_keywords(ConvertOptions)
def convert(source: File, target: File, options: ConvertOptions) -> Converted:
    """Read `source`, edit it, write `target`: the whole new file, or nothing.

    The steps come in this order: select, objects, ema, slim, keep and drop (by the names in `source`), dequantize, fold, lora,
    names (strip_module, unwrap, strip_prefix, rename, add_prefix, add_module), fill_from, tie, the target (like, plan),
    devices, dtype.

    Args:
        source: the checkpoint to read, IN. target: the file to write, OUT.
        options: those of `ConvertOptions`, as keywords.

    Returns:
        The report.

    Raises:
        CkptError: see `ckpt_tools.errors`; nothing has been written then.
    """
    return convert_with(as_path(source), as_path(target), options)


def convert_with(
    source: str | os.PathLike[str], target: str | os.PathLike[str], options: ConvertOptions, ranks: Ranks | None = None,
    opened: Checkpoint | None = None,
) -> Converted:  # fmt: skip
    """`convert` with its options in their record; `ranks` share the work of a sharded output, `opened` is the source, open."""
    started = time.perf_counter()
    limit = None if options.shard_size is None else shard_limit(target, options.shard_size, options.format)
    kind = options.format or "safetensors" if limit is not None else output_format(target, options.format)
    to_folder = limit is not None or kind == "dcp"
    if not to_folder:
        check_one_file(source, target, options.format)
    filling = () if options.fill_from is None else (options.fill_from,)
    inputs = (source, *(path for path, _ in options.adapters), *filling)
    with ExitStack() as stack:
        output = None if to_folder else open_output(stack, target, inputs, options)  # a folder is opened by who writes it
        clone = None
        if output is not None and kind == "pth" and not options.moves_tensors and not is_address(target):
            clone = stack.enter_context(Clone(source, output))  # the tensors will stay where they lie in the input
        from ckpt_tools.operations.convert.conversion import run
        from ckpt_tools.operations.convert.edits import Edits

        edits = Edits(options, kind)
        if to_folder:
            from ckpt_tools.operations.convert.folder import FolderTarget, run_folder

            report = run_folder(source, FolderTarget(target, kind, options, inputs, ranks), edits, limit or 0)
        else:
            report = run(source, target, edits, output, clone, opened)
    report.seconds = time.perf_counter() - started
    return report


def open_output(stack: ExitStack, target: str | os.PathLike[str], inputs: Inputs, options: ConvertOptions) -> Output | None:
    """The file to write, until the stack ends, which gives it its name; None in a dry run."""
    if not is_address(target):
        if not options.dry_run:
            return stack.enter_context(replacing(target, overwrite=options.overwrite, inputs=inputs))
        output_target(target, overwrite=True)
    else:
        from ckpt_tools.io.remote import check_upload, uploading

        if not options.dry_run:
            return stack.enter_context(uploading(os.fspath(target), overwrite=options.overwrite))
        check_upload(os.fspath(target), overwrite=True)
    return None


def shard_limit(target: str | os.PathLike[str], shard_size: str | int, format: Format | None) -> int:
    """Bytes of tensors in a shard, from what --shard-size says."""
    from ckpt_tools.parts.sharded import parse_size

    check_format(format)
    if format not in (None, "pth", "safetensors"):
        raise UsageError(f"`shard_size` is for safetensors and pth; {format} has no shards of that kind.")
    if names_file(target):
        raise UsageError(f"`shard_size` writes a folder; {target} looks like a file.", fix="Name a folder.")
    try:
        return parse_size(shard_size)
    except ValueError:
        raise UsageError(f"`shard_size={shard_size!r}` is not a size.", fix="For example: 5GB, 500MB, 2GiB.") from None


# --- in place: into a file beside it, which takes its name once it is whole and on the disk

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
    from ckpt_tools.operations.convert.inputs import open_input

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
    from ckpt_tools.operations.in_folders import indexed_files
    from ckpt_tools.parts.names import DCP_METADATA

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


# --- several checkpoints converted alike into one folder

Pair: TypeAlias = tuple[Path, Path]


def each_of(sources: Sequence[Path]) -> list[tuple[Path, PurePath]]:
    """Every input, and of a folder that is not one checkpoint all that are in it, with where in it they are."""
    from ckpt_tools.operations.in_folders import find_checkpoints
    from ckpt_tools.parts.families import is_whole

    found: list[tuple[Path, PurePath]] = []
    for source in sources:
        if is_address(source) or not source.is_dir() or is_whole(source):
            found.append((source, PurePath()))
        else:
            below = find_checkpoints(source)
            paths = [*below.checkpoints, *below.unlisted] or [source]  # which is refused
            found += [(path, PurePath() if path == source else path.relative_to(source).parent) for path in paths]
    return found


def targets(sources: Sequence[tuple[Path, PurePath]], folder: Path, asked: Mapping[str, Any]) -> list[Path]:
    """The output of each input: of its name, with the extension of the format, in a folder called as the one that it is in."""
    made = [folder / inside / _name(source, asked) for source, inside in sources]
    by_target: dict[Path, list[str]] = {}
    for (source, _), target in zip(sources, made, strict=True):
        by_target.setdefault(target, []).append(str(source))
    inputs = {os.path.realpath(source): str(source) for source, _ in sources}
    for target, named in by_target.items():
        if len(named) > 1:
            raise UsageError(
                f"{len(named)} inputs would be written as {target}: {some(named)}.", why="Nothing has been written.",
                fix="Convert those of one name into folders of their own.",
            )  # fmt: skip
        if (same := inputs.get(os.path.realpath(target))) is not None:
            raise UsageError(f"{target} is the input {same}.", why="Nothing has been written.", fix="Name another folder.")
    return made


def share_of(pairs: Sequence[Pair], part: tuple[int, int], *, skip_done: bool) -> tuple[list[Pair], list[Pair]]:
    """Of inputs and their outputs what job K of N is to do, and what of that is done: OUT is there, and is not older."""
    number, count = part
    mine = set(sorted(str(target) for _, target in pairs)[number - 1 :: count])
    own = [pair for pair in pairs if str(pair[1]) in mine]
    left, done = list[Pair](), list[Pair]()
    for source, target in own:  # outputs appear whole or not at all, a folder with its last file
        there = skip_done and not is_address(source) and target.exists()
        is_done = there and target.stat().st_mtime_ns >= source.stat().st_mtime_ns
        (done if is_done else left).append((source, target))
    return left, done


def _name(source: str | os.PathLike[str], asked: Mapping[str, Any]) -> str:
    stem, own = stem_and_extension(os.fspath(source).rstrip("/"))
    if not (name := PurePath(stem).name):
        raise UsageError(f"{source} has no name that its output could have.", fix="Name it otherwise than by dots.")
    if "shard_size" in asked:
        return name
    if (format := asked.get("format")) is not None:
        return name + EXTENSIONS[format]
    return name + (own if own and writes(own) and not os.path.isdir(source) else ".pth")


def convert_several(sources: Sequence[Path], made: Sequence[Path], asked: Mapping[str, Any]) -> Iterator[Converted | CkptError]:
    """The report of each conversion, or why there is none, in the order of the inputs; one that fails stops no other."""
    if not asked.get("dry_run"):
        for folder in dict.fromkeys(target.parent for target in made):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(f"{folder} cannot be made.", why=f"{error.strerror or error}.") from None
    for source, target in zip(sources, made, strict=True):
        yield _converted(source, target, asked)


def _converted(source: Path, target: Path, asked: Mapping[str, Any]) -> Converted | CkptError:
    try:
        with torch_told():
            if not asked.get("dry_run"):
                return convert(source, target, **asked)
            folder = next((place for place in target.parents if place.is_dir()), target.parent)  # it may not be there yet
            report = convert(source, folder / target.name, **asked)
        report.target = str(target)
        return report
    except CkptError as error:
        return error
    except (MemoryError, RecursionError) as error:
        return exhausted(error, f"{source} cannot be converted")
