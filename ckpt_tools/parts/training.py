"""The folders that transformers' Trainer and accelerate save: a step's, `checkpoint-500`, and a run's, which has several.

Source: `_save_checkpoint` of transformers/trainer.py; accelerate/checkpointing.py, utils/fsdp_utils.py, utils/constants.py."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.sources import Files
from ckpt_tools.parts import names as by_name
from ckpt_tools.tree.nodes import Dict

TRAINER_STATE = "trainer_state.json"
FSDP_FILE = "pytorch_model_fsdp.bin"
_STATE = (  # what is saved beside a model, to go on with
    r"(?:optimizer|scheduler|sampler|dl_state_dict|scaler|random_states|rng_state|custom_checkpoint)(?:_\d+)*(?:_rank\d+)?"
    r"(?:\.(?:pt|pth|bin|pkl))?|training_args\.bin|trainer_state\.json"
)
_FSDP_FOLDER = r"pytorch_model_fsdp_\d+"
_STEP = r"checkpoint[-_](\d{1,18})"
_MOST_STATE = 100 << 20


def find(folder: Path, names: Sequence[str]) -> Sequence[str]:
    found = [name for name in names if re.fullmatch(_FSDP_FOLDER, name) and (folder / name / by_name.DCP_METADATA).is_file()]
    return found if len(found) == 1 and not {FSDP_FILE, *by_name.ONE_FILE} & set(names) else ()


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    from ckpt_tools.parts import dcp

    inner = Files(files.path, files.folder / names[0])
    decoded = dcp.decode((by_name.DCP_METADATA,), inner, partial=partial)
    if type(decoded.root) is Dict and list(decoded.root.named) == ["model"]:
        decoded.root = decoded.root.named["model"]
    return decoded


def is_state(name: str) -> bool:
    return re.fullmatch(_STATE, name) is not None


def is_state_of_step(path: Path) -> bool:
    """Whether a file is the training's state in a folder of Trainer or accelerate, which load it in their own way."""
    return is_state(path.name) and is_training(path.parent)


def is_training(folder: Path) -> bool:
    return TRAINER_STATE in by_name.names_in(folder) or bool(described(folder))


def steps_in(folder: Path, names: Iterable[str]) -> list[Path]:
    found = [(int(match[1]), name) for name in names if (match := re.fullmatch(_STEP, name)) and os.path.isdir(folder / name)]
    return [folder / name for _, name in sorted(found, reverse=True)]


def unfinished(steps: Sequence[Path]) -> dict[Path, str]:
    """The steps that are still being written, or were never finished, and those whose state is of another step."""
    by_trainer = any((step / TRAINER_STATE).is_file() for step in steps)
    found = {}
    for step in steps if by_trainer else ():
        said, named = step_of(step), re.fullmatch(_STEP, step.name)
        if not (step / TRAINER_STATE).is_file():
            found[step] = f"It has no {TRAINER_STATE}, which is written last."
        elif said is not None and named and said != int(named[1]):
            found[step] = f"Its {TRAINER_STATE} is of step {said}."
    return found


def trainer_state(folder: Path) -> dict[str, Any]:
    """What Trainer says of its run in a step's folder; empty where it says nothing that can be read."""
    from ckpt_tools.io.parsers import load_json

    with contextlib.suppress(OSError, ValueError, CkptError):
        state = folder / TRAINER_STATE
        if state.is_file() and state.stat().st_size <= _MOST_STATE and isinstance(found := load_json(state.read_bytes()), dict):
            return found
    return {}


def step_of(folder: Path) -> int | None:
    step = trainer_state(folder).get("global_step")
    return step if type(step) is int and step >= 0 else None


def described(folder: Path) -> str:
    """What a folder is, in one line; "" where it is neither a run's nor a step's."""
    names = by_name.names_in(folder)
    if steps := steps_in(folder, names):
        return f"a training run with {len(steps)} checkpoint{'s' if len(steps) > 1 else ''}, the newest {steps[0].name}"
    if TRAINER_STATE in names:
        step = step_of(folder)
        return f"a checkpoint of transformers' Trainer{'' if step is None else f' at step {step}'}"
    return "a state of accelerate" if any(name.startswith("random_states_") for name in names) else ""
