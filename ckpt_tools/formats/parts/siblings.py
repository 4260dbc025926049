"""The files that belong to one rank's file: beside it, told by their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.formats.base import Decoded
from ckpt_tools.formats.folders import find_layout
from ckpt_tools.formats.open import (
    Checkpoint,
    collector_paused,
    decode_file,
    decode_folder,
    decode_ranks,
    decode_zero,
    naming,
    open_source,
)
from ckpt_tools.formats.parts.grouping import (
    CONSOLIDATED,
    MEGATRON_FILE,
    MP_RANK,
    consolidated_files,
    group_of,
    megatron_files,
)
from ckpt_tools.formats.parts.zero.names import is_zero_file, zero_files
from ckpt_tools.io.output import Source, is_address
from ckpt_tools.io.sources import Files


@dataclass(frozen=True, slots=True)
class Siblings:
    """The files of all ranks, as far as they are there.

    Attributes:
        folder: where they are. count: how many. decode: makes one checkpoint of them.
    """

    folder: Path
    count: int
    decode: Callable[[Files], Decoded]


def siblings(checkpoint: Checkpoint) -> Siblings | None:
    """The files of the other ranks beside one rank's file; None where there are none."""
    path = checkpoint.path
    if type(checkpoint.decoded.source) is not Source or is_address(str(path)):
        return None
    if path.name == MEGATRON_FILE and MP_RANK.fullmatch(path.parent.name):
        from ckpt_tools.formats.parts import megatron

        ranks = megatron_files(os.listdir(path.parent.parent))
        return _several(path.parent.parent, len(ranks), lambda source: megatron.decode(ranks, source, decode_file))
    names = os.listdir(path.parent)
    if CONSOLIDATED.fullmatch(path.name):
        from ckpt_tools.formats.parts import consolidated

        files = consolidated_files(names)
        return _several(path.parent, len(files), lambda source: consolidated.decode(files, source, decode_file))
    if is_zero_file(path.name) and (zero := zero_files(names)) is not None:
        every = zero.names
        return (
            Siblings(path.parent, len(zero.optimizers), lambda source: decode_zero(source, every)) if len(every) > 1 else None
        )
    group = group_of(path.name, names)
    if group is None:
        return None
    return _several(path.parent, len(group.names), lambda source: decode_ranks(source, path.name, group.every))


def open_partial(path: str | os.PathLike[str]) -> Checkpoint | None:
    """What is whole of the files that are at a path; None for anything but files that are parts of one checkpoint.

    Raises:
        PartError: nothing is whole, or the files do not belong together. CkptError: see `open_checkpoint`.
    """
    decode = _partial_at(path)
    if decode is None:
        return None
    place = Path(path)
    files = open_source(place) if place.is_dir() else Files(place, place.parent)
    assert isinstance(files, Files), "a folder's source has files"
    try:
        with collector_paused(), naming(files):
            return Checkpoint(decode(files))
    except BaseException:
        files.close()
        raise


def has_partial(path: str | os.PathLike[str]) -> bool:
    """Whether `open_partial` knows what is at a path."""
    return _partial_at(path) is not None


# Of whose parts some are whole where others are missing. Megatron-LM's do not say how long a tensor is that was cut.
_PARTIAL = ("rank-files", "deepspeed", "consolidated", "shards", "sharded", "dcp")


def _partial_at(path: str | os.PathLike[str]) -> Callable[[Files], Decoded] | None:
    """How what is whole is read of the files in a folder, or of those that a file is one of."""
    place = Path(path)
    if is_address(path) or not place.exists():
        return None
    if place.is_dir():
        layout = find_layout(place)
        known = layout is not None and layout.container in _PARTIAL
        return (lambda files: decode_folder(files, partial=True)) if known else None
    names = os.listdir(place.parent)
    if is_zero_file(place.name) and (zero := zero_files(names)) is not None:
        every = zero.names
        return lambda files: decode_zero(files, every, partial=True)
    if CONSOLIDATED.fullmatch(place.name):
        from ckpt_tools.formats.parts import consolidated

        return lambda files: consolidated.decode(consolidated_files(names), files, decode_file, partial=True)
    group = group_of(place.name, names)
    return None if group is None else lambda files: decode_ranks(files, place.name, group.every, partial=True)


def _several(folder: Path, count: int, decode: Callable[[Files], Decoded]) -> Siblings | None:
    return Siblings(folder, count, decode) if count > 1 else None


def open_with(path: Path, found: Siblings) -> Checkpoint:
    """A rank's file and its siblings as one checkpoint."""
    files = Files(path, found.folder)
    try:
        with collector_paused(), naming(files):
            return Checkpoint(found.decode(files))
    except BaseException:
        files.close()
        raise
