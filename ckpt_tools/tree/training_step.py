"""How far a training run was when it wrote a checkpoint: what the checkpoint says itself, or what its name says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.tree.nodes import Dict, Node

# What frameworks call them: PyTorch's examples, Lightning, DeepSpeed, Megatron-LM, timm.
_EPOCHS = ("epoch", "epochs")
_STEPS = ("global_step", "global_steps", "step", "iteration", "iter")
_WITHIN = ("common",)  # where Megatron-core keeps them
_NAME = re.compile(r"(epoch|global_step|iteration|iter|step|checkpoint|ckpt)[-_=]?(\d{1,18})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class TrainingStep:
    """The epoch and the step; -1 for what is not said, so that what says it is later than what does not."""

    epoch: float = -1
    step: float = -1

    @property
    def is_known(self) -> bool:
        """Whether anything is said."""
        return self.epoch >= 0 or self.step >= 0


def step_in(root: Node) -> TrainingStep:
    """What the dict at the top of a checkpoint says, or the one below it where Megatron-core keeps it."""
    found = _step_of(root.named) if type(root) is Dict else TrainingStep()
    if type(root) is Dict and not found.is_known:
        inner = [node for name in _WITHIN if type(node := root.get(name)) is Dict]
        return step_in(inner[0]) if inner else found
    return found


def step_in_texts(texts: Mapping[str, object]) -> TrainingStep:
    """What a mapping of plain values says, which may be numbers as text: a safetensors header, a JSON file."""
    return _step_of({name: _as_number(value) for name, value in texts.items()})


def step_in_name(name: str) -> TrainingStep:
    """What the name of a file or a folder says: `epoch_012.pth`, `checkpoint-500`, `global_step100`.

    >>> step_in_name("model-epoch=3-step=120.ckpt")
    TrainingStep(epoch=3, step=120)
    """
    epoch, step = -1, -1
    for word, digits in _NAME.findall(name):
        if word.lower() == "epoch":
            epoch = int(digits)
        else:
            step = int(digits)
    return TrainingStep(epoch, step)


def _step_of(values: Mapping[str, object]) -> TrainingStep:
    return TrainingStep(_first(values, _EPOCHS), _first(values, _STEPS))


def _first(values: Mapping[str, object], names: tuple[str, ...]) -> float:
    for name in names:
        value = values.get(name)
        if (type(value) is int or type(value) is float) and 0 <= value < 1 << 63:
            return value
    return -1


def _as_number(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return float(value) if not value.isdecimal() or len(value) > 18 else int(value)
    except ValueError:
        return value
