"""The ways in which a checkpoint is in several files, a row each. CONTRIBUTING.md says how to add one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.formats.base import PART_CONTAINERS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.source import Handed, Source, is_address
from ckpt_tools.io.sources import Files
from ckpt_tools.parts import names as by_name
from ckpt_tools.parts import partition as parts
from ckpt_tools.parts import training
from ckpt_tools.parts.partition import Partition
from ckpt_tools.tree.nodes import Global

Beside: TypeAlias = tuple[Path, tuple[str, ...]]  # a folder, and names in it


@dataclass(slots=True, eq=False, repr=False)
class Family:
    """A way in which a checkpoint is in several files.

    Attributes:
        module: reads them: `decode(names, files) -> Checkpoint`.
        find: of a folder and the names of its files those that say what is in it; none where the folder is something else.
        stands_for: what is named with a file that stands for all of them by what is in it: those that `find` would give.
        beside: what a file is one of, by its path, the names in its folder, and the globals of its pickle, if it was read.
        part: what part of the whole a file is by itself. The last argument gives how many files of the checkpoint are there.
        partial: whether `decode` takes `partial=True`: what is whole, where files are missing.
        decode: the function's name, where the module has several.
    """

    module: str
    find: Callable[[Path, Sequence[str]], Sequence[str]] | None = None
    stands_for: Callable[[Source, bytes, Callable[[], list[str]]], Sequence[str]] | None = None
    beside: Callable[[Path, Sequence[str], Sequence[Global]], Beside | None] | None = None
    part: Callable[[Checkpoint, Callable[[], int]], Partition | None] | None = None
    partial: bool = False
    decode: str = "decode"


class Found(NamedTuple):
    """The files of one checkpoint, and the name of the row that reads them."""

    family: str
    folder: Path
    names: tuple[str, ...]

    def decode(self, files: Files, *, partial: bool = False) -> Checkpoint:
        """Read the structure of the files; no tensor bytes. `partial`: what is whole without those that are missing."""
        row = ROWS[self.family]
        decode: Callable[..., Checkpoint] = getattr(import_module(row.module), row.decode)
        return decode(self.names, files, partial=True) if partial else decode(self.names, files)


# --- which files belong together


def _index(folder: Path, names: Sequence[str]) -> Sequence[str]:
    """The index of shards, or the metadata of a distributed checkpoint."""
    indexes = (*by_name.matching(names, re.escape(by_name.DCP_METADATA)), *by_name.indexes(names))
    return indexes if len(indexes) < 2 else _several(folder, indexes)


def _shards(folder: Path, names: Sequence[str]) -> Sequence[str]:
    groups = by_name.shard_groups(names)
    if len(groups) > 1:
        _several(folder, [group[0] for group in groups])
    return groups[0] if groups and not groups[0][0].endswith(".gguf") else ()


def _consolidated(folder: Path, names: Sequence[str]) -> Sequence[str]:
    found = by_name.matching(names, by_name.CONSOLIDATED)
    whole = [name for name in names if name in by_name.ONE_FILE]
    return _several(folder, [*found[:4], *whole]) if found and whole else found


def _several(folder: Path, names: Sequence[str]) -> NoReturn:
    what = f"{folder} holds several checkpoints: {', '.join(names[:5])}."
    raise NotACheckpointError(what, fix=f"Name one of them: {folder / names[-1]}")


def _items(_: Path, names: Sequence[str]) -> Sequence[str]:
    groups = by_name.item_groups(names) if by_name.ITEM_METADATA in names else ()
    return (by_name.ITEM_METADATA, *(name for group in groups for name in group.every)) if groups else ()


# --- a file that stands for others, and the files beside one


def _of_split(source: Source, head: bytes, names: Callable[[], list[str]]) -> Sequence[str]:
    said = by_name.shard_name(source.path.name) if head.startswith(b"GGUF") else None
    groups = by_name.shard_groups(names()) if said is not None and said.count > 1 else ()
    return next((group for group in groups if source.path.name in group), ())


def _beside_megatron(path: Path, _: Sequence[str], __: Sequence[Global]) -> Beside | None:
    if path.name != by_name.MEGATRON_FILE or not re.fullmatch(by_name.MP_RANK, path.parent.name):
        return None
    return path.parent.parent, by_name.megatron_files(os.listdir(path.parent.parent))


def _beside_consolidated(path: Path, names: Sequence[str], _: Sequence[Global]) -> Beside | None:
    found = by_name.matching(names, by_name.CONSOLIDATED)
    return (path.parent, found) if path.name in found else None


def _beside_zero(path: Path, names: Sequence[str], _: Sequence[Global]) -> Beside | None:
    found = by_name.zero_files(names) if by_name.zero_kind(path.name)[0] not in ("", "expert-optimizer") else {}
    return (path.parent, tuple(found)) if found else None


def _beside_rank(path: Path, names: Sequence[str], known: Sequence[Global]) -> Beside | None:
    group = by_name.group_of(path.name, names)
    if group is None and any(str(name) == "torch.distributed.tensor.DTensor" for name in known):
        group = by_name.group_of(path.name, names, items=True)
    return (path.parent, group.every) if group is not None else None


def _beside_item(path: Path, names: Sequence[str], known: Sequence[Global]) -> Beside | None:
    """The files of one item, where the metadata.pkl beside them says so; others have such names too."""
    group = by_name.group_of(path.name, names, items=True) if by_name.ITEM_METADATA in names else None
    if group is None:
        return None
    from ckpt_tools.parts.rank_files import describes

    return (path.parent, (by_name.ITEM_METADATA, *group.every)) if describes(path, group) else None


# --- the table

ROWS = {
    "dcp": Family(
        "ckpt_tools.parts.dcp", partial=True,
        find=lambda folder, names: _index(folder, names) if by_name.DCP_METADATA in names else (),
    ),
    "sharded": Family(
        "ckpt_tools.parts.sharded", _index, partial=True,
        stands_for=lambda source, head, _: (source.path.name,) if by_name.is_index(source, head) else (),
    ),
    "dcp-safetensors": Family(
        "ckpt_tools.parts.dcp", lambda _, names: by_name.matching(names, by_name.DCP_SAFETENSORS), decode="decode_safetensors"
    ),
    "deepspeed": Family(
        "ckpt_tools.parts.deepspeed", lambda _, names: tuple(by_name.zero_files(names)),
        beside=_beside_zero, part=parts.of_zero, partial=True,
    ),
    "items": Family(
        "ckpt_tools.parts.rank_files", _items, beside=_beside_item, part=parts.of_item, partial=True, decode="decode_items"
    ),
    "shards": Family("ckpt_tools.parts.sharded", _shards, partial=True, decode="decode_loose"),
    "gguf-splits": Family(
        "ckpt_tools.parts.sharded", lambda _, names: next(iter(by_name.shard_groups(names)), ()),
        stands_for=_of_split, decode="decode_splits",
    ),
    "consolidated": Family(
        "ckpt_tools.parts.model_parallel", _consolidated, beside=_beside_consolidated, part=parts.of_consolidated,
        partial=True, decode="decode_consolidated",
    ),
    "megatron": Family(
        "ckpt_tools.parts.model_parallel", lambda _, names: by_name.megatron_files(names), beside=_beside_megatron,
        part=parts.of_megatron, decode="decode_megatron",
    ),
    "training": Family("ckpt_tools.parts.training", training.find, partial=True),
    "rank-files": Family(
        "ckpt_tools.parts.rank_files", lambda _, names: group.every if (group := by_name.model_group(names)) else (),
        beside=_beside_rank, partial=True,
    ),
}  # fmt: skip


def layout_of(folder: str | os.PathLike[str], names: Sequence[str]) -> Found | None:
    """The one checkpoint that a folder with these files is; None where it is not one."""
    rows = ((name, row.find(Path(folder), sorted(names))) for name, row in ROWS.items() if row.find is not None)
    return next((Found(name, Path(folder), tuple(found)) for name, found in rows if found), None)


def find_layout(folder: str | os.PathLike[str]) -> Found | None:
    folder = by_name.folder_of_files(Path(folder))
    return layout_of(folder, Files(folder, folder).names())


def is_whole(folder: Path) -> bool:
    """Whether a local folder is one checkpoint, or a run of which one is read."""
    try:
        names = by_name.names_in(folder)
        return find_layout(folder) is not None or weights_of(folder, names) is not None or bool(steps_of(folder))
    except NotACheckpointError:  # told about when it is opened
        return True


def steps_of(place: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of the training run that a folder is, the newest first; none where it is one checkpoint itself."""
    if isinstance(place, Handed) or is_address(place) or not os.path.isdir(place):
        return []
    folder, names = Path(place), by_name.names_in(Path(place))
    steps = training.steps_in(folder, names)
    return steps if steps and find_layout(folder) is None and weights_of(folder, names) is None else []


def files_of(source: Source, head: bytes, names: Callable[[], list[str]]) -> Found | None:
    """The files that one file stands for, by what is in it: an index of shards."""
    rows = ((name, row.stands_for(source, head, names)) for name, row in ROWS.items() if row.stands_for is not None)
    return next((Found(name, source.path.parent, tuple(found)) for name, found in rows if found), None)


def siblings(path: Path, known: Sequence[Global] = ()) -> Found | None:
    """The files of the checkpoint that a local file is one of, by its name and its globals, as far as they are there."""
    names = os.listdir(path.parent)
    rows = ((name, row.beside(path, names, known)) for name, row in ROWS.items() if row.beside is not None)
    return next((Found(name, *found) for name, found in rows if found is not None), None)


def others(checkpoint: Checkpoint) -> Found | None:
    """The files of the other ranks beside one rank's file; None where there are none."""
    if type(checkpoint.source) is not Source or is_address(str(checkpoint.path)):
        return None
    found = siblings(checkpoint.path, checkpoint.globals)
    return found if found is not None and len(found.names) > 1 else None


def partition(checkpoint: Checkpoint) -> Partition | None:
    """What part of what a checkpoint is; None for anything that is not a part, or whole on this rank."""
    if checkpoint.container in ("dcp", *PART_CONTAINERS):
        return None  # which hold whole tensors; what a dcp keeps of Megatron-LM's arguments is no part's

    def files() -> int:
        return 1 if (found := others(checkpoint)) is None else len(found.names)

    found = parts.of_tensors(checkpoint)
    for row in ROWS.values():
        if found is None and row.part is not None:
            found = row.part(checkpoint, files)
    if found is not None and files() > 1:
        command = f"ckpt convert {shlex.quote(str(checkpoint.path))} OUT.safetensors"
        return replace(found, fix=f"With the files of all ranks beside it, it becomes the model: {command}")
    return found


# --- folders that are none


_OTHERS = (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".th", ".tar")
_ADAPTER, _CONFIG = "adapter_config.json", "config.json"  # PEFT's, transformers'


def weights_of(folder: str | os.PathLike[str], names: list[str]) -> str | None:
    """The one file of weights in the folder of a model as transformers, diffusers and accelerate save it; None for another."""
    found = [name for name in names if name in (*by_name.ONE_FILE, training.FSDP_FILE)]
    alone = _CONFIG in names or found == [name for name in names if name.endswith(_OTHERS) and not training.is_state(name)]
    return found[0] if alone and len(found) == 1 and layout_of(folder, names) is None else None


def layout(folder: Path, names: list[str]) -> Found:
    if (found := layout_of(folder, names)) is not None:
        return found
    fix, names = "Name a checkpoint in it.", sorted(names)
    folders = [name for name in names if (folder / name).is_dir() and is_whole(folder / name)]
    inside = [*folders, *(name for name in names if name.endswith(_OTHERS) and name not in folders)]
    if _ADAPTER in names:
        fix = f"It is an adapter; with its base it becomes a model: ckpt convert BASE OUT --lora {shlex.quote(str(folder))}"
    elif models := [name for name in inside if not training.is_state(name)] or inside:
        fix = f"Name a checkpoint in it: {', '.join(models[:4])}."
    raise NotACheckpointError(
        f"{folder} is a directory, and not a checkpoint.",
        why="It has no shards or index of them (*.index.json), no .metadata, and not the files of all ranks of one model.",
        fix=fix,
    )
