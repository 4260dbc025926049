"""Which files of a folder belong together, told by their names; and that all of those are there, once each."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ckpt_tools import limits
from ckpt_tools.errors import NotACheckpointError, PartError
from ckpt_tools.io.source import Source
from ckpt_tools.text import listed

# The rules are compiled where one is asked for: most checkpoints are one file.
_NAME = r"(?i)(?P<head>.*rank[_-]?)(?P<rank>\d{1,6})(?P<tail>\D*\.(?:pt|pth|bin|ckpt|th))"
ITEM = r"(?P<head>.+_)(?P<rank>\d{1,6})\.(?:pt|safetensors)"
_WORLD = r"(?i)world[_-]?size[_-]?(\d{1,6})"
_SHARD = r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})(?P<suffix>\.safetensors|\.bin|\.pth|\.pt|\.gguf)"
CONSOLIDATED = r"consolidated\.(\d{2,5})\.pth"
MP_RANK = r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?"
MEGATRON_FILE = "model_optim_rng.pt"
ITEM_METADATA = "metadata.pkl"
COMMON = "common.pt"  # beside a torch_dist checkpoint: what every rank of Megatron-LM has
INDEX_SUFFIX = ".index.json"
_OTHER_LIBRARIES = (".h5.index.json", ".msgpack.index.json")  # TensorFlow's and Flax's, often beside torch's
DCP_METADATA = ".metadata"
# torch.distributed.checkpoint's HuggingFaceStorageWriter with save_distributed=True (torch/distributed/checkpoint/_hf_utils.py)
DCP_SAFETENSORS = r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"
# What transformers and diffusers call the weights of a model that is in one file, beside its config.json
ONE_FILE = ("model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
_DEEPSPEED = r"(?:mp|pp|expp)_rank_\d"
_Place = TypeVar("_Place")
MOST_MISSING = 1 << 16  # a world, where some of its ranks are missing


def matching(names: Sequence[str], rule: str) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if re.fullmatch(rule, name)))


def megatron_files(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}/{MEGATRON_FILE}" for name in matching(names, MP_RANK))


def indexes(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.endswith(INDEX_SUFFIX) and not name.endswith(_OTHER_LIBRARIES))


def is_index(source: Source, head: bytes) -> bool:
    """Whether a file that starts so is the index of a sharded checkpoint: a JSON object that has a weight_map."""
    if not head.lstrip().startswith(b"{") or b"\0" in head or source.size > limits.HEADER.value:
        return False
    return b'"weight_map"' in head or b'"weight_map"' in source.read(0, source.size)


# --- files that differ in a rank alone


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """Files by their ranks; `world`: of how many they say that they are."""

    stem: str
    rows: list[tuple[int, str]]
    world: int | None = None

    @property
    def every(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.rows)

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _ in self.rows}


def _groups(names: Sequence[str], rule: str = _NAME) -> list[Group]:
    found: dict[tuple[str | None, ...], Group] = {}
    for name in sorted(names):
        if (match := re.fullmatch(rule, name)) and not (rule == _NAME and re.search(_DEEPSPEED, name)):
            said = re.search(_WORLD, match["head"]) if rule == _NAME else None
            group = Group(match["head"], [], int(said[1]) if said else None)
            found.setdefault((match["head"], match.groupdict().get("tail")), group).rows.append((int(match["rank"]), name))
    return [*found.values()]


def item_groups(names: Sequence[str]) -> list[Group]:
    """The files that torch_checkpointing calls by their item and rank, `model_0.pt`, of all ranks from 0 on."""
    return [group for group in _groups(names, ITEM) if group.ranks == set(range(len(group.ranks)))]


def group_of(name: str, names: Sequence[str], *, items: bool = False) -> Group | None:
    """The files that differ from this one in the rank alone; None for a name without a rank."""
    return next((group for group in (item_groups(names) if items else _groups(names)) if name in group.every), None)


def model_group(names: Sequence[str]) -> Group | None:
    """The files in a folder that are its model: the only rank files there are, or those called so; None where that is open."""
    groups = [group for group in _groups(names) if group.world is not None or len(group.ranks) > 1]
    if len(groups) > 1:
        groups = [group for group in groups if group.stem.lower().startswith(("model", "pytorch_model"))]
    return groups[0] if len(groups) == 1 else None


def describes_items(head: bytes) -> bool:
    """Whether a metadata.pkl that starts so is torch_checkpointing's; many things are called so."""
    return b"nested_path_to_metadata" in head


# --- shards


@dataclass(slots=True, eq=False, repr=False)
class ShardName:
    """How files of one kind of shard are called, `model-00001-of-00003.safetensors`; of one file, which one it is."""

    stem: str
    suffix: str
    number: int = 0
    count: int = 0

    def shard(self, number: int, count: int) -> str:
        """The file of a shard; `number` counts from 1."""
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"

    @property
    def index(self) -> str:
        return f"{self.stem}{self.suffix}{INDEX_SUFFIX}"


def shard_name(name: str) -> ShardName | None:
    match = re.fullmatch(_SHARD, name)
    return ShardName(match["stem"], match["suffix"], int(match["number"]), int(match["count"])) if match else None


def shard_groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, int, str], list[str]] = {}
    for name in sorted(names):
        if said := shard_name(name):
            groups.setdefault((said.stem, said.count, said.suffix), []).append(name)
    return [tuple(group) for group in groups.values()]


# --- DeepSpeed: deepspeed/runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`, `_get_optimizer_ckpt_name`,
# `_get_expert_ckpt_name`), deepspeed/runtime/pipe/module.py (`ckpt_layer_path`), deepspeed/utils/zero_to_fp32.py (`latest`)

_ZERO = {
    "optimizer": r"(?:[a-z0-9]+_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt",
    "model": r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt",
    "whole": r"mp_rank_(\d{1,6})_model_states\.pt",
    "expert": r"(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt",
    "layer": r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt",
    "expert-optimizer": r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt",  # without ZeRO, and without names
}


def zero_kind(name: str) -> tuple[str, tuple[int, ...]]:
    """Of which kind a file is by its name, or "", and the numbers in it, the slice (`mp_rank_NN`) last."""
    for kind, rule in _ZERO.items():
        if match := re.fullmatch(rule, name):
            return kind, tuple(int(text or 0) for text in match.groups())
    return "", ()


def zero_files(names: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The files of a DeepSpeed checkpoint by name, with what `zero_kind` says; none of one without a model or an optimizer."""
    found = {name: said for name in sorted(names) if (said := zero_kind(name))[0]}
    return found if any(kind in ("optimizer", "model", "whole") for kind, _ in found.values()) else {}


# --- a folder in which a file says which of its folders counts

_LATEST_ITERATION, _MOST_DIGITS = "latest_checkpointed_iteration.txt", 32  # Megatron-LM's
_LATEST, _TAG_LENGTH, _TAG = "latest", 1024, r"global_step\d+"  # DeepSpeed's


def folder_of_files(folder: Path) -> Path:
    """Where the files of a folder's checkpoint are: the folder itself, or the one in it that its training says counts."""
    if (said := _text_of(folder / _LATEST_ITERATION, _MOST_DIGITS)) is not None:
        name = "release" if said == "release" else f"iter_{int(said):07d}" if said.isascii() and said.isdecimal() else ""
        if not name or not (folder / name).is_dir():
            what = f"{folder / _LATEST_ITERATION} names the checkpoint {said!r}, which is not there."
            raise NotACheckpointError(what, fix="Name the folder that is wanted.")
        folder /= name
    tag = _text_of(folder / _LATEST, _TAG_LENGTH)
    names = names_in(folder)
    tags = sorted((name for name in names if re.fullmatch(_TAG, name) or name == tag), key=len)
    tags = [name for name in tags if zero_files(names_in(folder / name))]
    if tag in tags or (tag is None and len(tags) == 1):
        return folder / (tag or tags[0])
    if not tags or zero_files(names):
        return folder
    what = f"{folder} holds several checkpoints, and no {_LATEST} names one."
    if tag is not None:
        what = f"{folder / _LATEST} names the checkpoint {tag[:100]!r}, which is not there."
    raise NotACheckpointError(what, fix=f"Name one of them: {folder / tags[-1]}")


def _text_of(path: Path, most: int) -> str | None:
    with contextlib.suppress(OSError):
        if path.is_file():  # a pipe would never end
            with path.open("rb") as file:
                return file.read(most).decode("utf-8", "replace").strip()
    return None


def names_in(folder: Path) -> list[str]:
    """What is in a folder; nothing where that cannot be told."""
    with contextlib.suppress(OSError):  # told about when it is read
        return os.listdir(folder)
    return []


# --- all are there


def by_rank(rows: Iterable[tuple[_Place, str]]) -> dict[_Place, str]:
    """The files by what they say that they are; each is there once."""
    found: dict[_Place, str] = {}
    for rank, name in rows:
        if found.setdefault(rank, name) != name:
            raise PartError(f"{found[rank]} and {name} are one part, under two names.", fix="Remove one of the two.")
    return found


def check_world(there: Mapping[int, str], world: int, called: Callable[[int], str], *, partial: bool = False) -> list[str]:
    """What is `called` so and missing of a world, if some may be (`partial`); no rank is beyond it."""
    if beyond := [name for rank, name in there.items() if not 0 <= rank < world]:
        raise PartError(f"{listed(beyond)}: beyond the {world} parts that there should be.")
    missing = (called(rank) for rank in range(world) if rank not in there)
    count = world - len(there)
    if count and (not partial or world > MOST_MISSING):
        shown = listed(list(islice(missing, 5)), rest=count - 5)  # a file may say any number
        what = f"{count} of {world} parts {'is' if count == 1 else 'are'} missing: {shown}."
        raise PartError(what, fix="Get the others too.", rest=True)
    return list(missing)


def check_same(what: str, said: Mapping[str, object]) -> None:
    first = next(iter(said), "")
    if other := next((file for file, value in said.items() if value != said[first]), None):
        raise PartError(
            f"{first} and {other} do not have the same {what}.", why="Their steps differ, or they are of several jobs."
        )
