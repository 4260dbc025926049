"""What goes into and comes out of every module while a model runs: a few thousand numbers of each tensor, not the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ckpt_tools.torch.proving.outputs import plain
from ckpt_tools.values.running import tensors_in

_MOST = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Numbers of a tensor, in float64: up to 4096 of them in their order; and of all their sum, that of squares, both ends."""

    shape: tuple[int, ...]
    taken: torch.Tensor
    moments: torch.Tensor

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def size(self) -> float:
        """The largest magnitude, never 0."""
        return float(self.moments[2:].abs().nan_to_num(0).max()) or 1e-300

    def holds_those_of(self, other: Numbers, tolerance: float) -> bool:
        """Whether both hold the same numbers, in any order and shape."""
        if self.numel != other.numel:
            return False
        size = max(self.size, other.size)
        room = torch.tensor([size * self.numel, 2 * size * size * self.numel, size, size], dtype=torch.float64) * tolerance
        apart = (self.moments - other.moments).abs()
        return bool(((apart <= room) | apart.isnan()).all())

    def is_equal(self, other: Numbers, tolerance: float) -> bool:
        """Whether both hold the same numbers in the same order, row-major, whatever their shapes are."""
        room = tolerance * max(self.size, other.size)
        return self.holds_those_of(other, tolerance) and torch.allclose(
            self.taken, other.taken, rtol=0, atol=room, equal_nan=True
        )


def are_equal(old: Sequence[Numbers], new: Sequence[Numbers], tolerance: float) -> bool:
    """Whether two lists of tensors are equal; where they are not equally long, their first ones count."""
    if len(old) != len(new):
        old, new = old[:1], new[:1]
    return len(old) == len(new) and all(left.is_equal(right, tolerance) for left, right in zip(old, new, strict=True))


@dataclass(slots=True, eq=False)
class ModuleCall:
    path: str
    module: torch.nn.Module
    inputs: list[Numbers] = field(default_factory=list)
    outputs: list[Numbers] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return type(self.module).__name__


CallPair: TypeAlias = tuple[ModuleCall, ModuleCall]  # of the old model and of the new one


def _numbers(tensor: torch.Tensor) -> Numbers:
    held = plain(tensor)
    flat = held.reshape(-1).to(torch.float64)
    count = flat.numel()
    if not count:
        return Numbers(tuple(held.shape), flat, flat.new_zeros(4))
    taken = flat if count <= _MOST else flat[torch.linspace(0, count - 1, _MOST, dtype=torch.float64).long()]
    return Numbers(tuple(held.shape), taken.clone(), torch.stack([flat.sum(), (flat * flat).sum(), flat.min(), flat.max()]))


class Recorder:
    """Writes down the calls of a model's modules; the last that has begun and not ended is the last of `open`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.root: ModuleCall | None = None
        self.open: list[ModuleCall] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str) -> Any:
        def begin(module: torch.nn.Module, given: Any, named: Any) -> None:
            call = ModuleCall(path, module, [_numbers(tensor) for tensor in tensors_in((given, named))])
            if self.open:
                self.open[-1].calls.append(call)
            else:
                self.root = call
            self.open.append(call)

        return begin

    def _after(self, module: torch.nn.Module, given: Any, made: Any) -> None:
        self.open.pop().outputs = [_numbers(tensor) for tensor in tensors_in(made)]
