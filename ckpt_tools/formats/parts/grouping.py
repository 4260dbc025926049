"""Which files of a folder are the parts of one checkpoint, told by their names: they differ in the rank alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import NotACheckpointError

_NAME = re.compile(r"(?P<head>.*rank[_-]?)(?P<rank>\d{1,6})(?P<tail>\D*\.(?:pt|pth|bin|ckpt|th))", re.IGNORECASE)
_WORLD = re.compile(r"world[_-]?size[_-]?(\d{1,6})", re.IGNORECASE)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})(?P<suffix>\.safetensors|\.bin|\.pth|\.pt|\.gguf)")
CONSOLIDATED = re.compile(r"consolidated\.(\d{2,5})\.pth")
MP_RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_LATEST, _MOST_DIGITS = "latest_checkpointed_iteration.txt", 32
MEGATRON_FILE = "model_optim_rng.pt"
ITEM_METADATA = "metadata.pkl"
COMMON = "common.pt"  # beside a torch_dist checkpoint: what every rank of Megatron-LM has
_ITEM = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,6})\.(?:pt|safetensors)")
_DEEPSPEED = re.compile(r"(?:mp|pp|expp)_rank_\d")


@dataclass(slots=True, unsafe_hash=True)
class Group:
    """The files of one checkpoint."""

    stem: str
    names: Mapping[int, str]
    world: int | None
    every: tuple[str, ...]


def group_of(name: str, names: Sequence[str]) -> Group | None:
    """The files that differ from this one in the rank alone; None for a name without a rank."""
    match = _NAME.fullmatch(name)
    return _groups(names).get((match["head"], match["tail"])) if match is not None else None


def _groups(names: Sequence[str]) -> dict[tuple[str, str], Group]:
    """The groups among these names, by what stands before the rank and behind it."""
    ranks: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in sorted(names):
        if (match := _NAME.fullmatch(name)) and not _DEEPSPEED.search(name):
            ranks.setdefault((match["head"], match["tail"]), []).append((int(match["rank"]), name))
    return {key: _group(key[0], rows) for key, rows in ranks.items()}


def _group(head: str, rows: Sequence[tuple[int, str]]) -> Group:
    world = _WORLD.search(head)
    first = dict(reversed(rows))  # of two files of one rank the first
    names = {rank: first[rank] for rank, _ in rows}
    return Group(head, names, int(world[1]) if world else None, tuple(name for _, name in rows))


def describes_items(head: bytes) -> bool:
    """Whether a metadata.pkl that starts so is torch_checkpointing's; many things are called so."""
    return b"nested_path_to_metadata" in head


def item_groups(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """The files that torch_checkpointing calls by their item and rank, `model_0.pt`: by item and rank; all ranks from 0 on."""
    found: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if match := _ITEM.fullmatch(name):
            found.setdefault(match["item"], {})[int(match["rank"])] = name
    return {item: group for item, group in found.items() if set(group) == set(range(len(group)))}


def model_group(names: Sequence[str]) -> Group | None:
    """The files in a folder that are its model: the only rank files there are, or those called so; None where that is open."""
    groups = [group for group in _groups(names).values() if group.world is not None or len(group.names) > 1]
    if len(groups) > 1:
        groups = [group for group in groups if group.stem.lower().startswith("model")]
    return groups[0] if len(groups) == 1 else None


def consolidated_files(names: Sequence[str]) -> tuple[str, ...]:
    """The files `consolidated.00.pth` and so on: a rank of Meta's model parallelism each."""
    return tuple(sorted(name for name in names if CONSOLIDATED.fullmatch(name)))


def megatron_files(names: Sequence[str]) -> tuple[str, ...]:
    """The files in the folders `mp_rank_00` and so on: a rank of Megatron-LM each."""
    return tuple(f"{name}/{MEGATRON_FILE}" for name in sorted(names) if MP_RANK.fullmatch(name))


def iteration_folder(folder: Path) -> Path:
    """Where the files of a folder's checkpoint are: Megatron-LM's root has a file that says which of its folders counts."""
    try:
        with open(folder / _LATEST, "rb") as file:
            said = file.read(_MOST_DIGITS).strip().decode("ascii", "replace")
    except OSError:
        return folder
    name = "release" if said == "release" else f"iter_{int(said):07d}" if said.isascii() and said.isdecimal() else ""
    if not name or not (folder / name).is_dir():
        raise NotACheckpointError(
            f"{folder / _LATEST} says {said!r}, and there is no such checkpoint.",
            why="It should be a number, or release, and the folder is beside it.", fix="Name the folder that is wanted.",
        )  # fmt: skip
    return folder / name


@dataclass(slots=True, unsafe_hash=True)
class ShardName:
    """What the name of a shard says: `model-00001-of-00003.safetensors`."""

    stem: str
    number: int
    count: int
    suffix: str


def shard_name(name: str) -> ShardName | None:
    """What the name of a file says of a shard; None for any other."""
    match = _SHARD.fullmatch(name)
    return ShardName(match["stem"], int(match["number"]), int(match["count"]), match["suffix"]) if match else None


def shard_groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The files that call themselves shards, those together that differ in the number alone."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for name in sorted(names):
        if said := shard_name(name):
            groups.setdefault((said.stem, said.count, said.suffix), []).append(name)
    return [tuple(group) for group in groups.values()]
