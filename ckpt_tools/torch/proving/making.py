"""The two models, made and filled: alike where nothing says otherwise, and with no memory in common."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt_tools.errors import TargetError, UsageError
from ckpt_tools.fit.targets import read_target
from ckpt_tools.torch import load_into
from ckpt_tools.torch.proving.inputs import seeded


class Wanted(NamedTuple):
    """One side: its checkpoint, what makes its model, the arguments of that, which state dict of the checkpoint."""

    path: str
    spec: Any
    arguments: Any
    select: str | None

    @property
    def label(self) -> str:
        """What the user called the model."""
        return self.spec if isinstance(self.spec, str) else getattr(self.spec, "__qualname__", type(self.spec).__qualname__)


def make_both(old: Wanted, new: Wanted, seed: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Both models with the numbers of their checkpoints, ready to be run.

    Random numbers that a constructor draws are the same for both. What the second has in common with the first is copied first:
    filling it would change the first.

    Raises:
        TargetError: a model cannot be made. MatchError: a checkpoint does not fit its model. CkptError: one cannot be read.
    """
    first = _filled(_made(old, seed), old)
    second = _made(new, seed)
    if _memory(first) & _memory(second):
        second = copy.deepcopy(second)
    return first, _filled(second, new)


def _made(wanted: Wanted, seed: int) -> torch.nn.Module:
    with seeded(seed):
        made = _from(wanted)
    if not isinstance(made, torch.nn.Module):
        raise TargetError(f"{wanted.label} gives a {type(made).__name__}.", why="A torch.nn.Module is wanted.")
    return made


def _from(wanted: Wanted) -> Any:
    if isinstance(wanted.spec, torch.nn.Module):
        return copy.deepcopy(wanted.spec)
    if callable(wanted.spec):
        return _called(wanted)
    target = read_target(wanted.spec, args=wanted.arguments)
    if target.build is None:
        raise UsageError(f"{wanted.spec} does not make a model.", fix="Give package.module:callable or ./models.py:Net.")
    return target.build()


def _called(wanted: Wanted) -> Any:
    make: Callable[..., Any] = wanted.spec
    if isinstance(wanted.arguments, str):
        raise UsageError("`model_args` of a callable are a mapping.")
    try:
        return make(**(wanted.arguments or {}))
    except Exception as error:  # whatever the user's function raises
        raise TargetError(f"{wanted.label} raised {type(error).__name__} when it was called.", why=f"{error}") from error


def _filled(model: torch.nn.Module, wanted: Wanted) -> torch.nn.Module:
    load_into(model, wanted.path, select=wanted.select)
    model.eval()
    for module in model.modules():
        module.training = False  # whatever an eval() of its own does
    return model


def _memory(model: torch.nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
