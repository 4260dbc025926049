"""Which files of a folder belong together, told by their names."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.io.output import Source

# The rules are compiled where one is asked for: most checkpoints are one file.
_NAME = r"(?i)(?P<head>.*rank[_-]?)(?P<rank>\d{1,6})(?P<tail>\D*\.(?:pt|pth|bin|ckpt|th))"
_WORLD = r"(?i)world[_-]?size[_-]?(\d{1,6})"
_SHARD = r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})(?P<suffix>\.safetensors|\.bin|\.pth|\.pt|\.gguf)"
CONSOLIDATED = r"consolidated\.(\d{2,5})\.pth"
MP_RANK = r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?"
_LATEST_ITERATION, _MOST_DIGITS = "latest_checkpointed_iteration.txt", 32
MEGATRON_FILE = "model_optim_rng.pt"
ITEM_METADATA = "metadata.pkl"
COMMON = "common.pt"  # beside a torch_dist checkpoint: what every rank of Megatron-LM has
_ITEM = r"(?P<item>.+)_(?P<rank>\d{1,6})\.(?:pt|safetensors)"
INDEX_SUFFIX = ".index.json"
DCP_METADATA = ".metadata"
# What transformers and diffusers call the weights of a model that is in one file, beside its config.json
ONE_FILE = ("model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
_DEEPSPEED = r"(?:mp|pp|expp)_rank_\d"


@dataclass(slots=True, eq=False, repr=False)
class Group:
    stem: str
    names: Mapping[int, str]
    world: int | None
    every: tuple[str, ...]


def group_of(name: str, names: Sequence[str]) -> Group | None:
    """The files that differ from this one in the rank alone; None for a name without a rank."""
    return next((group for group in _groups(names) if name in group.every), None)


def _groups(names: Sequence[str]) -> list[Group]:
    ranks: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in sorted(names):
        if (match := re.fullmatch(_NAME, name)) and not re.search(_DEEPSPEED, name):
            ranks.setdefault((match["head"], match["tail"]), []).append((int(match["rank"]), name))
    found = []
    for (head, _), rows in ranks.items():
        world = re.search(_WORLD, head)
        # of two files of one rank the first
        found.append(Group(head, dict(reversed(rows)), int(world[1]) if world else None, tuple(name for _, name in rows)))
    return found


def describes_items(head: bytes) -> bool:
    """Whether a metadata.pkl that starts so is torch_checkpointing's; many things are called so."""
    return b"nested_path_to_metadata" in head


def item_groups(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """The files that torch_checkpointing calls by their item and rank, `model_0.pt`: by item and rank; all ranks from 0 on."""
    found: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if match := re.fullmatch(_ITEM, name):
            found.setdefault(match["item"], {})[int(match["rank"])] = name
    return {item: group for item, group in found.items() if set(group) == set(range(len(group)))}


def item_group_of(name: str, names: Sequence[str]) -> Group | None:
    groups = (Group(f"{item}_", group, None, tuple(group.values())) for item, group in item_groups(names).items())
    return next((group for group in groups if name in group.every), None)


def model_group(names: Sequence[str]) -> Group | None:
    """The files in a folder that are its model: the only rank files there are, or those called so; None where that is open."""
    groups = [group for group in _groups(names) if group.world is not None or len(group.names) > 1]
    if len(groups) > 1:
        groups = [group for group in groups if group.stem.lower().startswith(("model", "pytorch_model"))]
    return groups[0] if len(groups) == 1 else None


def matching(names: Sequence[str], rule: str) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if re.fullmatch(rule, name)))


def megatron_files(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}/{MEGATRON_FILE}" for name in matching(names, MP_RANK))


def iteration_folder(folder: Path) -> Path:
    """Where the files of a folder's checkpoint are: Megatron-LM's root has a file that says which of its folders counts."""
    said = _text_of(folder / _LATEST_ITERATION, _MOST_DIGITS)
    if said is None:
        return folder
    name = "release" if said == "release" else f"iter_{int(said):07d}" if said.isascii() and said.isdecimal() else ""
    if not name or not (folder / name).is_dir():
        what = f"{folder / _LATEST_ITERATION} says {said!r}, and there is no such checkpoint."
        raise NotACheckpointError(what, fix="Name the folder that is wanted.")
    return folder / name


def _text_of(path: Path, most: int) -> str | None:
    with contextlib.suppress(OSError):
        if path.is_file():  # a pipe would never end
            with path.open("rb") as file:
                return file.read(most).decode("utf-8", "replace").strip()
    return None


_OTHER_LIBRARIES = (".h5.index.json", ".msgpack.index.json")  # TensorFlow's and Flax's, often beside torch's
# torch.distributed.checkpoint's HuggingFaceStorageWriter with save_distributed=True (torch/distributed/checkpoint/_hf_utils.py)
DCP_SAFETENSORS = r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"


def indexes(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.endswith(INDEX_SUFFIX) and not name.endswith(_OTHER_LIBRARIES))


def is_index(source: Source, head: bytes) -> bool:
    """Whether a file that starts so is the index of a sharded checkpoint: a JSON object that has a weight_map."""
    if not head.lstrip().startswith(b"{") or b"\0" in head or source.size > limits.HEADER.value:
        return False
    return b'"weight_map"' in head or b'"weight_map"' in source.read(0, source.size)


def taken_before(index: str, names: Sequence[str]) -> list[str]:
    """The files of a whole model in a folder that transformers and diffusers take before an index in it."""
    return [name for name in names if name in ONE_FILE and (".safetensors" in name or ".safetensors" not in index)]


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
_TAG = r"global_step\d+"
_LATEST = "latest"
_TAG_LENGTH = 1024


class ZeroFiles:
    """The files of one DeepSpeed checkpoint: of each kind by the numbers in their names, the slice (`mp_rank_NN`) last."""

    def __init__(self, names: Sequence[str]) -> None:
        self.kinds: dict[str, dict[tuple[int, ...], str]] = {kind: {} for kind in _ZERO}
        self.doubled: list[str] = []
        for name in sorted(names):
            for kind, rule in _ZERO.items():
                if match := re.fullmatch(rule, name):
                    there = self.kinds[kind].setdefault(tuple(int(text or 0) for text in match.groups()), name)
                    self.doubled += [name] if there != name else []
        # The slices of the model: tensor parallel ranks, or stages of a pipeline
        self.slices = sorted({key[-1] for kind in ("optimizer", "model", "whole") for key in self.kinds[kind]})
        every = (*(name for found in self.kinds.values() for name in found.values()), *self.doubled)
        self.names = every if self.slices else ()  # none of a checkpoint without a model or an optimizer

    def of_slice(self, kind: str, number: int) -> dict[int, str]:
        return {key[0]: name for key, name in sorted(self.kinds[kind].items()) if key[-1] == number}


def zero_kind(name: str) -> str:
    """Of which kind a file is by its name: a rank's part, the model file beside those, an expert, a pipeline's layer; or ""."""
    found = next((kind for kind, rule in _ZERO.items() if re.fullmatch(rule, name)), "")
    return "" if found == "expert-optimizer" else found


def checkpoint_folder(folder: Path) -> Path:
    """The folder with the files: the one that `latest` names, or the only step there is; else the folder itself."""
    tag = _text_of(folder / _LATEST, _TAG_LENGTH)
    try:
        names = os.listdir(folder)
    except OSError:
        return folder  # told about when it is read
    tags = sorted((name for name in names if re.fullmatch(_TAG, name) or name == tag), key=len)
    tags = [name for name in tags if _has_files(folder / name)]
    if tag in tags or (tag is None and len(tags) == 1):
        return folder / (tag if tag is not None else tags[0])
    if not tags or ZeroFiles(names).names:
        return folder
    what = f"{folder} holds {len(tags)} checkpoints of DeepSpeed, and no file `latest` that names one."
    if tag is not None:
        what = f"{folder / _LATEST} names the checkpoint {tag[:100]!r}, which is not there."
    raise NotACheckpointError(what, fix=f"Name one of them: {folder / tags[-1]}")


def _has_files(folder: Path) -> bool:
    try:
        return bool(ZeroFiles(os.listdir(folder)).names)
    except OSError:
        return False
