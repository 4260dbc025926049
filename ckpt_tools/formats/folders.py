"""What kind of checkpoint a folder is, told by the files in it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.formats.parts.grouping import (
    ITEM_METADATA,
    consolidated_files,
    item_groups,
    iteration_folder,
    megatron_files,
    model_group,
    shard_groups,
)
from ckpt_tools.formats.parts.zero_names import checkpoint_folder, zero_files

INDEX_SUFFIX = ".index.json"
_OTHER_LIBRARIES = (".h5.index.json", ".msgpack.index.json")  # TensorFlow's and Flax's, often beside torch's
DCP_METADATA = ".metadata"
_CHECKPOINTS = (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".th", ".tar")
# torch.distributed.checkpoint's HuggingFaceStorageWriter with save_distributed=True (torch/distributed/checkpoint/_hf_utils.py)
_DCP_SAFETENSORS = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")


# What transformers and diffusers call the weights of a model that is in one file, beside its config.json
_ADAPTER = "adapter_config.json"  # PEFT's
_CONFIG = "config.json"
ONE_FILE = ("model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")


@dataclass(slots=True, unsafe_hash=True)
class Layout:
    """A folder that is one checkpoint: its container, and the files that say what is in it."""

    container: Literal[
        "sharded", "dcp", "dcp-safetensors", "rank-files", "shards", "consolidated", "megatron", "deepspeed", "items"
    ]
    names: tuple[str, ...]


def find_layout(folder: str | os.PathLike[str]) -> Layout | None:
    """The layout of a folder, None where it is not one checkpoint."""
    folder = folder_of_files(Path(folder))
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise NotACheckpointError(f"{folder} cannot be read.", why=f"{error.strerror or error}.") from None
    return layout_of(folder, names)


def folder_of_files(folder: Path) -> Path:
    """Where the files of a folder's checkpoint are: the folder itself, or the one in it that its training says counts."""
    return checkpoint_folder(iteration_folder(folder))


def weights_of(folder: str | os.PathLike[str], names: list[str]) -> str | None:
    """The one file of weights in the folder of a model as transformers and diffusers save it; None for any other folder."""
    found = [name for name in names if name in ONE_FILE]
    return found[0] if _CONFIG in names and len(found) == 1 and layout_of(folder, sorted(names)) is None else None


def taken_before(index: str, names: list[str]) -> list[str]:
    """The files of a whole model in a folder that transformers and diffusers take before an index in it."""
    return [name for name in names if name in ONE_FILE and (".safetensors" in name or ".safetensors" not in index)]


def layout_of(folder: str | os.PathLike[str], names: list[str]) -> Layout | None:
    """The layout of a folder with these files."""
    indexes = tuple(name for name in names if name.endswith(INDEX_SUFFIX) and not name.endswith(_OTHER_LIBRARIES))
    if DCP_METADATA in names:
        if indexes:
            raise _several(folder, [DCP_METADATA, *indexes])
        return Layout("dcp", (DCP_METADATA,))
    if len(indexes) > 1:
        raise _several(folder, indexes)
    if indexes:
        return Layout("sharded", indexes)
    shards = tuple(name for name in names if _DCP_SAFETENSORS.fullmatch(name))
    if shards:
        return Layout("dcp-safetensors", shards)
    return _layout_of_parts(folder, names)


def _layout_of_parts(folder: str | os.PathLike[str], names: list[str]) -> Layout | None:
    """The layout of files that say by their names alone that they belong together."""
    if (zero := zero_files(names)) is not None:
        return Layout("deepspeed", zero.names)
    if ITEM_METADATA in names and (items := item_groups(names)):
        return Layout("items", (ITEM_METADATA, *(name for group in items.values() for name in group.values())))
    groups = shard_groups(names)
    if len(groups) > 1:
        raise _several(folder, [group[0] for group in groups], "They are shards without an index, and of several checkpoints.")
    if groups:
        return Layout("shards", groups[0])
    if consolidated := consolidated_files(names):
        if whole := [name for name in names if name in ONE_FILE]:
            raise _several(
                folder, [*consolidated[:4], *whole], "transformers and diffusers take the last, Meta's code the others."
            )
        return Layout("consolidated", consolidated)
    if megatron := megatron_files(names):
        return Layout("megatron", megatron)
    group = model_group(names)
    return Layout("rank-files", group.every) if group is not None else None


def _several(
    folder: str | os.PathLike[str], names: list[str] | tuple[str, ...], why: str = "Each index is one of its own."
) -> NotACheckpointError:
    listed = ", ".join(names[:5])
    fix = f"Name one of them: {Path(folder) / names[-1]}"
    return NotACheckpointError(f"{folder} holds several checkpoints: {listed}.", why=why, fix=fix)


def layout(folder: Path, names: list[str]) -> Layout:
    """The layout of a folder that should be a checkpoint."""
    found = layout_of(folder, sorted(names))
    if found is None:
        files = [*_checkpoint_folders(folder, sorted(names)), *(name for name in sorted(names) if name.endswith(_CHECKPOINTS))]
        raise NotACheckpointError(
            f"{folder} is a directory, and not a checkpoint.", why=_what_is_missing(names), fix=_named_in(folder, names, files)
        )
    return found


_NO_MODEL = re.compile(r"optim|sched|rng_state|random_state|scaler|sampler|training_args|custom_checkpoint")
_OF_RANK = re.compile(r"rank_?\d+\b(?=.*\.)")


def _what_is_missing(names: Iterable[str]) -> str:
    """Why a folder is not one checkpoint."""
    missing = "It has no shards, no index of them (*.index.json), no distributed checkpoint (.metadata)"
    ranks = sorted(name for name in names if _OF_RANK.search(name) and name.endswith(_CHECKPOINTS))
    kinds = {re.sub(r"\d+", "", name) for name in ranks}
    if not kinds:
        return f"{missing}, no files of ranks."
    one = "files of ranks that are not one model's" if len(kinds) > 1 else "files of ranks beside others"
    return f"{missing} of its own; it has {one}: {', '.join(ranks[:4])}."


def _named_in(folder: Path, names: list[str], files: list[str]) -> str:
    """What to give in the place of a folder: a checkpoint in it, or all of its files."""
    if _ADAPTER in names:
        return f"It is an adapter; with its base it becomes a model: ckpt convert BASE OUT --lora {shlex.quote(str(folder))}"
    models = [name for name in files if not _NO_MODEL.search(name)] or files
    named = ": ".join(["Name a checkpoint in it", *([", ".join(models[:4])] if models else [])])
    endings = {os.path.splitext(name)[1] for name in files}
    if len(models) < len(files) or len(files) < 2 or len(endings) > 1 or not files[0].endswith(_CHECKPOINTS):
        return f"{named}."
    return f"{named}. ckpt convert {shlex.quote(str(folder))}/*{endings.pop()} --to-dir DIR takes all of them."


def _checkpoint_folders(folder: Path, names: list[str]) -> list[str]:
    """Those of the names that are folders with a checkpoint's files."""
    return [name for name in names if os.path.isdir(folder / name) and _is_checkpoint(folder / name)]


def _is_checkpoint(folder: Path) -> bool:
    try:
        return find_layout(folder) is not None
    except NotACheckpointError:
        return False
