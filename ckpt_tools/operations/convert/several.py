"""Several checkpoints converted alike into one folder: which becomes which file, then one after another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from ckpt_tools.errors import CkptError, OutputError, UsageError, exhausted
from ckpt_tools.io.output import is_address
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.text import some
from ckpt_tools.tree.findings import stem_and_extension
from ckpt_tools.tree.output_names import writes
from ckpt_tools.values.pytorch import torch_told

Pair: TypeAlias = tuple[Path, Path]
_EXTENSIONS = {"safetensors": ".safetensors", "pth": ".pth", "pth-legacy": ".pth", "gguf": ".gguf", "dcp": ""}


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
        return name + _EXTENSIONS[format]
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
    from ckpt_tools.operations.convert.run import convert

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
