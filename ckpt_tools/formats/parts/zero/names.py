"""Which files of a folder are a DeepSpeed checkpoint, told by their names.

Source: deepspeed/runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`, `_get_optimizer_ckpt_name`,
`_get_expert_ckpt_name`), deepspeed/runtime/pipe/module.py (`ckpt_layer_path`), deepspeed/utils/zero_to_fp32.py (`latest`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import NotACheckpointError

_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<slice>\d{1,6})_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<slice>\d{1,6})_model_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_LAYER = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_TAG = re.compile(r"global_step\d+")
_LATEST = "latest"
_TAG_LENGTH = 1024


@dataclass(slots=True)
class ZeroFiles:
    """The files of one DeepSpeed checkpoint, by what they hold.

    Attributes:
        whole: the model file that all ranks share (stages 1 and 2). models: those of each rank (stage 3).
        optimizers: the optimizer's parts by rank. doubled: files of a rank that has one already.
        slices: the ranks of tensor parallelism. experts, layers: files of a mixture of experts, of a pipeline.
    """

    whole: str | None = None
    models: dict[int, str] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)
    slices: set[int] = field(default_factory=set)
    experts: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        whole = [self.whole] if self.whole is not None else []
        parts = [*self.models.values(), *self.optimizers.values()]
        return (*whole, *parts, *self.doubled, *self.experts, *self.layers)


def zero_files(names: Sequence[str]) -> ZeroFiles | None:
    """The files of a DeepSpeed checkpoint among these; None where there are none, or a model file alone, which is whole."""
    found = ZeroFiles()
    for name in sorted(names):
        _sort_in(name, found)
    return found if len(found.names) > 1 or found.models or found.optimizers else None


def _sort_in(name: str, found: ZeroFiles) -> None:
    if _EXPERTS.fullmatch(name):
        found.experts.append(name)
    elif _LAYER.fullmatch(name):
        found.layers.append(name)
    elif match := _OPTIMIZER.fullmatch(name):
        _take(name, match, found.optimizers, found)
    elif match := _MODEL.fullmatch(name):
        if match["rank"] is not None:
            _take(name, match, found.models, found)
        elif int(match["slice"]) == 0 and found.whole is None:
            found.whole = name
        else:
            found.doubled.append(name)
        found.slices.add(int(match["slice"]))


def _take(name: str, match: re.Match[str], into: dict[int, str], found: ZeroFiles) -> None:
    found.slices.add(int(match["slice"]))
    if int(match["slice"]) != 0 or into.setdefault(int(match["rank"]), name) != name:
        found.doubled.append(name)


def is_zero_file(name: str) -> bool:
    """Whether a file has the name of a rank's part, or of the model file beside those."""
    return _OPTIMIZER.fullmatch(name) is not None or _MODEL.fullmatch(name) is not None


def checkpoint_folder(folder: Path) -> Path:
    """The folder with the files: the one that `latest` names, or the only step there is; else the folder itself.

    What `latest` says is looked for among the folders that are there, and is not a path.

    Raises:
        NotACheckpointError: `latest` names a folder that is not there, or there are several steps and no `latest`.
    """
    try:
        names = os.listdir(folder)
        tag = _latest(folder / _LATEST) if _LATEST in names else None
    except OSError:
        return folder  # told about when it is read
    tags = sorted((name for name in names if _TAG.fullmatch(name) or name == tag), key=len)
    tags = [name for name in tags if _has_files(folder / name)]
    if tag in tags or (tag is None and len(tags) == 1):
        return folder / (tag if tag is not None else tags[0])
    if not tags or zero_files(names) is not None:
        return folder
    if tag is not None:
        raise NotACheckpointError(
            f"{folder / _LATEST} names the checkpoint {tag[:100]!r}, which is not there.",
            fix=f"Name one of them: {folder / tags[-1]}",
        )
    raise NotACheckpointError(
        f"{folder} holds {len(tags)} checkpoints of DeepSpeed, and no file `latest` that names one.",
        fix=f"Name one of them: {folder / tags[-1]}",
    )


def _latest(path: Path) -> str | None:
    if not path.is_file():  # a pipe would never end
        return None
    with path.open("rb") as file:
        return file.read(_TAG_LENGTH).decode("utf-8", "replace").strip()


def _has_files(folder: Path) -> bool:
    try:
        return zero_files(os.listdir(folder)) is not None
    except OSError:
        return False
