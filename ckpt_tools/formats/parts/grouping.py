"""Which files of a folder are the parts of one checkpoint, told by their names: they differ in the rank alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NAME = re.compile(r"(?P<head>.*rank[_-]?)(?P<rank>\d{1,6})(?P<tail>\D*\.(?:pt|pth|bin|ckpt|th))", re.IGNORECASE)
_WORLD = re.compile(r"world[_-]?size[_-]?(\d{1,6})", re.IGNORECASE)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})(?P<suffix>\.safetensors|\.bin|\.pth|\.pt)")
_DEEPSPEED = re.compile(r"(?:mp|pp|expp)_rank_\d")


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one checkpoint.

    Attributes:
        stem: what their names have in common. names: the files by rank. world: how many there should be, if the names tell.
        every: all of them; more than `names` where two are one rank's.
    """

    stem: str
    names: Mapping[int, str]
    world: int | None
    every: tuple[str, ...]


def group_of(name: str, names: Sequence[str]) -> Group | None:
    """The files that differ from this one in the rank alone; None for a name without a rank."""
    match = _NAME.fullmatch(name)
    if match is None or _DEEPSPEED.search(name):
        return None
    found: dict[int, str] = {}
    every: list[str] = []
    for other in sorted(names):
        same = _NAME.fullmatch(other)
        if same and (same["head"], same["tail"]) == (match["head"], match["tail"]):
            every.append(other)
            found.setdefault(int(same["rank"]), other)
    world = _WORLD.search(match["head"])
    return Group(match["head"], found, int(world[1]) if world else None, tuple(every))


def model_group(names: Sequence[str]) -> Group | None:
    """The files in a folder that are its model: the only rank files there are, or those called so; None where that is open."""
    left, groups = list(names), list[Group]()
    while left:
        group = group_of(left[0], left)
        taken = {left[0]} if group is None else set(group.every)
        left = [name for name in left if name not in taken]
        if group is not None and (group.world is not None or len(group.names) > 1):
            groups.append(group)
    if len(groups) > 1:
        groups = [group for group in groups if group.stem.lower().startswith("model")]
    return groups[0] if len(groups) == 1 else None


@dataclass(frozen=True, slots=True)
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
