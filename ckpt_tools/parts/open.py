"""Open a checkpoint, whatever its path is: a file, a folder, an index, an archive, an address."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ckpt_tools.errors import CkptError, NotACheckpointError, PartError
from ckpt_tools.formats.base import PART_CONTAINERS, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import (
    HEAD,
    collector_paused,
    container_of,
    decode_file,
    may_be_packed,
    naming,
    reader,
    refuse_polyglot,
)
from ckpt_tools.io.source import File, Handed, Source, archive_and_member, as_path, is_address
from ckpt_tools.io.sources import Files, HandedSource
from ckpt_tools.parts import families, training
from ckpt_tools.parts.families import Found, partition
from ckpt_tools.parts.names import folder_of_files
from ckpt_tools.parts.partition import Partition, names_parts
from ckpt_tools.tree.nodes import Node, Object
from ckpt_tools.tree.options import natural

_Source = TypeVar("_Source", bound=Source)


@natural
def open_checkpoint(path: File) -> Checkpoint:
    """Open a checkpoint and decode its structure. Runs nothing, imports nothing, reads no tensor bytes.

    Args:
        path: a file, open or not, whose container is found by content, not by extension; the index of a sharded checkpoint;
            a folder that is one checkpoint; a tar or a compressed file with one in it, `model.tar!member` where there are
            several.

    Returns:
        The open checkpoint.

    Raises:
        NotACheckpointError: the file is missing, or something else. UnsupportedContainerError: a container that this
        version does not read. DamagedFileError, LimitError: the file breaks a promise of its format.
    """
    place, member = archive_and_member(as_path(path))
    if not member and (steps := families.steps_of(place)):
        return _newest(place, steps)
    return _opened(open_source(place), lambda source: _decode(source, member))


def _newest(run: str | os.PathLike[str], steps: Sequence[Path]) -> Checkpoint:
    """The newest whole checkpoint of a training run; which it is, and what is newer and is not whole, are its warnings."""
    passed = training.unfinished(steps)
    for step in steps:
        if step in passed:
            continue
        try:
            checkpoint = open_checkpoint(step)
        except CkptError as error:
            passed[step] = str(error).partition("\n")[0]
            continue
        told = [Warned("newest", f"the newest whole checkpoint in {run} is read: {step.name}", severity="info")]
        told += [Warned("passed-over", f"{path.name} is passed over. {why.rstrip('.')}") for path, why in passed.items()]
        checkpoint.warnings = [*checkpoint.warnings, *told]
        return checkpoint
    why = " ".join(f"{path.name}: {text}" for path, text in passed.items())
    raise NotACheckpointError(f"{run} has {len(steps)} checkpoints of a training run, and none of them is whole.", why=why)


def open_source(path: str | os.PathLike[str]) -> Source:
    """The source for a path: a file, the files of a folder, or something remote."""
    if isinstance(path, Handed):
        return HandedSource(path)
    if is_address(path):
        from ckpt_tools.io.remote import open_remote

        source = open_remote(os.fspath(path))
    elif os.path.isdir(path):
        source = Files(Path(path), folder_of_files(Path(path)))
    else:
        source = Source(path)
    if isinstance(source, Files) and (name := families.weights_of(source.folder, source.names())) is not None:
        return open_source(f"{source.folder}/{name}")
    return source


def _opened(source: _Source, decode: Callable[[_Source], Checkpoint]) -> Checkpoint:
    try:
        with collector_paused(), naming(source):
            return decode(source)
    except BaseException:
        source.close()
        raise


def _decode(source: Source, member: str) -> Checkpoint:
    """Decode a folder; what an archive holds; a file, with the others that it stands for."""
    if isinstance(source, Files):
        return decode_folder(source)
    head = source.read(0, min(HEAD, source.size))
    if may_be_packed(head):
        refuse_polyglot(source, head)
        from ckpt_tools.parts import packed

        if packed.is_packed(source, head):
            return packed.decode(source, head, member)
    if member:
        raise NotACheckpointError(f"{source.path} is not an archive whose members are read by name.")
    found = families.files_of(source, head, lambda: files_beside(source).names())
    if found is not None:
        with_others: Callable[[Files], Checkpoint] = found.decode
    elif (row := container_of(head)) and (alone := getattr(reader(row), "decode_with_others", None)) is not None:
        with_others = functools.partial(alone, source)
    else:
        return decode_file(source)
    files = files_beside(source)
    files.adopt(source)
    return _opened(files, with_others)


def files_beside(source: Source) -> Files:
    if is_address(str(source.path)):
        from ckpt_tools.io import remote

        return remote.files_beside(source)
    return Files(source.path, source.path.parent)


def decode_folder(files: Files) -> Checkpoint:
    return families.layout(files.folder, files.names()).decode(files)


# --- whole checkpoints


def open_whole(path: File, *, partial: bool = False) -> Checkpoint:
    """Open a checkpoint whose tensors are wanted: a model to write, to load, to measure or to compare.

    `partial`: what is whole of it where files are missing, if its family can tell.
    """
    path = as_path(path)
    found = partial_at(path) if partial else None
    if found is not None:
        checkpoint = _opened(Files(Path(path), found.folder), functools.partial(found.decode, partial=True))
    else:
        checkpoint = open_checkpoint(path)
    try:
        if (part := partition(checkpoint)) is not None:
            found = families.others(checkpoint)
            if found is None:
                raise part_error(checkpoint, part)
            checkpoint.close()
            checkpoint = _opened(Files(checkpoint.path, found.folder), found.decode)
        take_whole(checkpoint)
        if checkpoint.container in PART_CONTAINERS:
            checkpoint.locate()  # compares what several ranks hold, before anything is made of it
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def part_error(checkpoint: Checkpoint, part: Partition) -> PartError:
    return PartError(f"{checkpoint.path} is a part of a model, not a whole one: {part.found}.", fix=part.fix)


def partial_at(path: str | os.PathLike[str]) -> Found | None:
    """The files at a path, if of them that can be told which is whole where others are missing."""
    place = Path(path)
    if is_address(path) or not place.exists():
        return None
    found = families.find_layout(place) if place.is_dir() else families.siblings(place)
    return found if found is not None and families.ROWS[found.family].partial else None


def take_whole(checkpoint: Checkpoint) -> None:
    """Exchange distributed tensors that are whole on this rank for plain ones; the warnings say so."""
    if not names_parts(checkpoint):
        return
    from ckpt_tools.parts.rank_parts import PartReader, forget_globals
    from ckpt_tools.tree import exchange

    reader, taken = PartReader(), list[Object]()

    def swap(node: Node) -> Node:
        part = reader.read(node) if type(node) is Object else None
        if type(node) is not Object or part is None or not part.is_whole:
            return node
        taken.append(node)
        entry = next(box.entry for box in part.held if box.sizes == part.shape)
        return replace(entry, requires_grad=part.requires_grad)

    checkpoint.root = exchange.replace(checkpoint.root, swap)
    if taken:
        forget_globals(checkpoint, taken)
        text = f"{len(taken)} distributed tensors are whole on this rank; they are taken as plain ones"
        checkpoint.warnings = [*checkpoint.warnings, Warned("distributed-tensors", text)]
