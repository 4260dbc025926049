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
_EXPERTS = re.compile(r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_mp_rank_(?P<slice>\d{1,6})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_\d{1,6}_mp_rank_\d{1,6}_optim_states\.pt")  # without ZeRO, and without names
_LAYER = re.compile(r"layer_(?P<layer>\d{1,6})(?:-model_(?P<slice>\d{1,6}))?-model_states\.pt")
_TAG = re.compile(r"global_step\d+")
_LATEST = "latest"
_TAG_LENGTH = 1024


@dataclass(slots=True)
class SliceFiles:
    """The files of one slice of the model: of a tensor parallel rank, or of a stage of a pipeline."""

    whole: str | None = None
    models: dict[int, str] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class ZeroFiles:
    """The files of one DeepSpeed checkpoint, by what they hold."""

    slices: dict[int, SliceFiles] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)

    @property
    def optimizers(self) -> list[str]:
        """The optimizer's parts of all slices."""
        return [name for own in self.slices.values() for name in own.optimizers.values()]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        found = [own.whole for own in self.slices.values() if own.whole is not None]
        for own in self.slices.values():
            found += [*own.models.values(), *own.optimizers.values()]
        return (*found, *self.doubled, *self.experts.values(), *self.layers.values(), *self.beside)


def zero_files(names: Sequence[str]) -> ZeroFiles | None:
    """The files of a DeepSpeed checkpoint among these; None where there are none."""
    found = ZeroFiles()
    for name in sorted(names):
        _sort_in(name, found)
    return found if found.slices else None


def _sort_in(name: str, found: ZeroFiles) -> None:
    if match := _EXPERTS.fullmatch(name):
        key = (int(match["layer"] or 0), int(match["expert"]), int(match["slice"]))
        _take(name, found.experts.setdefault(key, name), found)
    elif match := _LAYER.fullmatch(name):
        _take(name, found.layers.setdefault((int(match["layer"]), int(match["slice"] or 0)), name), found)
    elif match := _OPTIMIZER.fullmatch(name):
        own = found.slices.setdefault(int(match["slice"]), SliceFiles())
        _take(name, own.optimizers.setdefault(int(match["rank"]), name), found)
    elif match := _MODEL.fullmatch(name):
        own = found.slices.setdefault(int(match["slice"]), SliceFiles())
        if match["rank"] is not None:
            _take(name, own.models.setdefault(int(match["rank"]), name), found)
        else:
            own.whole = own.whole if own.whole is not None else name
            _take(name, own.whole, found)
    elif _EXPERT_OPTIMIZER.fullmatch(name):
        found.beside.append(name)


def _take(name: str, there: str, found: ZeroFiles) -> None:
    """Whether a file is the only one of what it holds."""
    if there != name:
        found.doubled.append(name)


def is_zero_file(name: str) -> bool:
    """Whether a file has the name of a rank's part, of the model file beside those, of an expert or of a pipeline's layer."""
    return any(rule.fullmatch(name) for rule in (_OPTIMIZER, _MODEL, _EXPERTS, _LAYER))


def checkpoint_folder(folder: Path) -> Path:
    """The folder with the files: the one that `latest` names, or the only step there is; else the folder itself."""
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
