"""What goes into and comes out of every module while a model runs: a few thousand numbers of each tensor, not the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ckpt_tools.torch.proving.outputs import plain
from ckpt_tools.values.running import tensors_in

_MOST = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Numbers of a tensor, in float64: up to 4096 of them in their order, and what all of them add up to.

    Attributes:
        shape: its shape. taken: the numbers. moments: sum, sum of squares, least and largest of all of them.
    """

    shape: tuple[int, ...]
    taken: torch.Tensor
    moments: torch.Tensor

    @property
    def numel(self) -> int:
        """How many the tensor has."""
        return torch.Size(self.shape).numel()


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of one module.

    Attributes:
        path, module: the module. inputs, outputs: its tensors, in order. calls: those made inside of it, in order.
    """

    path: str
    module: torch.nn.Module
    inputs: list[Numbers] = field(default_factory=list)
    outputs: list[Numbers] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)


CallPair: TypeAlias = tuple[ModuleCall, ModuleCall]  # of the old model and of the new one


def numbers(tensor: torch.Tensor) -> Numbers:
    """What is kept of a tensor."""
    held = plain(tensor)
    flat = held.reshape(-1).to(torch.float64)
    count = flat.numel()
    if not count:
        return Numbers(tuple(held.shape), flat, flat.new_zeros(4))
    taken = flat if count <= _MOST else flat[torch.linspace(0, count - 1, _MOST, dtype=torch.float64).long()]
    return Numbers(tuple(held.shape), taken.clone(), torch.stack([flat.sum(), (flat * flat).sum(), flat.min(), flat.max()]))


def shown_calls(call: ModuleCall, known: Mapping[str, str] | set[str]) -> Iterator[ModuleCall]:
    """The calls inside a call that can have partners: of paired modules, and of leaves; others stand for what is inside."""
    for inner in call.calls:
        if inner.path in known or not inner.calls:
            yield inner
        else:
            yield from shown_calls(inner, known)


class Recorder:
    """Hooks on every module of a model.

    Attributes:
        root: the call of the model itself, once it has run.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.root: ModuleCall | None = None
        self._open: list[ModuleCall] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))

    @property
    def inside(self) -> ModuleCall | None:
        """The call that has begun last and has not ended."""
        return self._open[-1] if self._open else None

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str) -> Any:
        def begin(module: torch.nn.Module, given: Any, named: Any) -> None:
            call = ModuleCall(path, module, [numbers(tensor) for tensor in tensors_in((given, named))])
            if self._open:
                self._open[-1].calls.append(call)
            else:
                self.root = call
            self._open.append(call)

        return begin

    def _after(self, module: torch.nn.Module, given: Any, named: Any, made: Any) -> None:
        self._open.pop().outputs = [numbers(tensor) for tensor in tensors_in(made)]
