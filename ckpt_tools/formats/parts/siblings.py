"""The files that belong to one rank's file: beside it, told by their names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.formats.base import Decoded
from ckpt_tools.formats.folders import find_layout
from ckpt_tools.formats.open import (
    HEAD,
    Checkpoint,
    collector_paused,
    decode_file,
    decode_folder,
    decode_ranks,
    decode_zero,
    naming,
    open_source,
)
from ckpt_tools.formats.parts.flat_rows import Names
from ckpt_tools.formats.parts.grouping import (
    CONSOLIDATED,
    ITEM_METADATA,
    MEGATRON_FILE,
    MP_RANK,
    Group,
    consolidated_files,
    describes_items,
    group_of,
    item_groups,
    megatron_files,
    model_group,
)
from ckpt_tools.formats.parts.zero_names import is_zero_file, zero_files
from ckpt_tools.io.output import Source, is_address
from ckpt_tools.io.sources import Files


@dataclass(frozen=True, slots=True)
class Siblings:
    """The files of all ranks, as far as they are there."""

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
        return _of_an_item(checkpoint, names)
    return _several(path.parent, len(group.names), lambda source: decode_ranks(source, path.name, group.every))


def _of_an_item(checkpoint: Checkpoint, names: Sequence[str]) -> Siblings | None:
    """The files of the item of torch_checkpointing that one is a rank's part of; DTensors tell without metadata.pkl."""
    path = checkpoint.path
    item = next((item for item, group in item_groups(names).items() if path.name in group.values()), None)
    if item is None:
        return None
    if ITEM_METADATA not in names:
        return _by_dtensors(checkpoint, item, item_groups(names)[item])
    from ckpt_tools.formats.parts import items

    with contextlib.closing(Files(path, path.parent)) as files:
        about = files.open(ITEM_METADATA)
        if not describes_items(about.read(0, min(HEAD, about.size))):
            return None
        if items.item_of(path.name, files, decode_file) != item:
            return None
    return Siblings(path.parent, len(item_groups(names)[item]), lambda source: items.decode(source, decode_file, item))


def _by_dtensors(checkpoint: Checkpoint, item: str, group: Mapping[int, str]) -> Siblings | None:
    """The files `model_0.pt`, `model_1.pt` ... beside one that holds a rank's DTensors: others are called so too."""
    if not any(str(name) == "torch.distributed.tensor.DTensor" for name in checkpoint.decoded.globals):
        return None
    from ckpt_tools.formats.parts import rank_files

    files = Group(f"{item}_", group, None, tuple(group.values()))
    return _several(checkpoint.path.parent, len(group), lambda source: rank_files.decode(files, source, decode_file))


def open_partial(path: str | os.PathLike[str]) -> Checkpoint | None:
    """What is whole of the files that are at a path; None for anything but files that are parts of one checkpoint."""
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


def open_named(path: str | os.PathLike[str], names: Names) -> Checkpoint:
    """The files of ranks that are at a path, with rows of parameters cut into a target's tensors."""
    place = Path(path)
    folder = place if place.is_dir() else place.parent
    every = os.listdir(folder)
    group = group_of(place.name, every) if folder != place else model_group(every)
    assert group is not None, "callers have seen that they are files of ranks"
    files = Files(place, folder)
    try:
        with collector_paused(), naming(files):
            from ckpt_tools.formats.parts import rank_files

            return Checkpoint(rank_files.decode(group, files, decode_file, names=names))
    except BaseException:
        files.close()
        raise


def has_partial(path: str | os.PathLike[str]) -> bool:
    """Whether `open_partial` knows what is at a path."""
    return _partial_at(path) is not None


# Of whose parts some are whole where others are missing. Megatron-LM's do not say how long a tensor is that was cut.
_PARTIAL = ("rank-files", "items", "deepspeed", "consolidated", "shards", "sharded", "dcp")


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
