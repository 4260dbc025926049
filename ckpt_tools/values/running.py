"""Run a model once to see what it computes: on the meta device where it can, without numbers; else on the CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_tools.tree.graphs import Graph, Input, Operation, Value


def graph_of(model: torch.nn.Module, inputs: Sequence[Input], build: Callable[[], Any] | None) -> Graph:
    try:
        return _run(model, inputs, "meta")
    except Exception:
        if build is None:
            raise
        return _run(build(), inputs, "cpu")


def _run(model: torch.nn.Module, inputs: Sequence[Input], device: str) -> Graph:
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    there = {id(tensor): tensor if tensor.device.type == device else tensor.to(device) for tensor in tensors.values()}
    floats = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    given: list[tuple[str | None, torch.Tensor]] = []
    for row in inputs:
        fill, dtype = (0.5, floats) if row.below is None else (0, torch.int64)
        given.append((row.name, torch.full(row.shape, fill, dtype=dtype, device=device)))
    recorder = _Recorder()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) in there:
            recorder.graph.weights[name] = recorder.value(there[id(tensor)])
    recorder.graph.inputs = [recorder.value(tensor) for _, tensor in given]
    places = tuple(tensor for name, tensor in given if name is None)
    names = {name: tensor for name, tensor in given if name is not None}
    with _evaluated(model), torch.no_grad(), redirect_stdout(sys.stderr), torch.device(device), recorder:
        called = {name: there[id(tensor)] for name, tensor in tensors.items()}
        outputs = torch.func.functional_call(model, called, places, names)
    recorder.graph.outputs = [recorder.value(tensor) for tensor in tensors_in(outputs)]
    return recorder.graph


@contextlib.contextmanager
def _evaluated(model: torch.nn.Module) -> Iterator[None]:
    """The model as it is evaluated, and module by module: torch's transformer layers have a shortcut."""
    trained = [module for module in model.modules() if module.training]
    shortcut = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(shortcut)
        for module in trained:
            module.training = True


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module is given or gives: in tuples, mappings and records too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


class _Recorder(TorchDispatchMode):
    """Writes down every operation, as torch carries it out below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self._values: dict[int, Value] = {}
        self._alive: list[torch.Tensor] = []  # a tensor that is gone would give its id to another
        self._views: dict[int, list[torch.Tensor]] = {}

    def value(self, tensor: torch.Tensor) -> Value:
        found = self._values.get(id(tensor))
        return self._new(tensor) if found is None else found

    def _new(self, tensor: torch.Tensor) -> Value:
        if id(tensor) not in self._values:
            self._alive.append(tensor)
            self._views.setdefault(_memory(tensor), []).append(tensor)
        made = self._values[id(tensor)] = Value(tuple(tensor.shape))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tuple(map(self._plain, (*args, *(kwargs or {}).values())))
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outputs = list(tensors_in(made))
        changed = [tensor for tensor in outputs if id(tensor) in self._values]
        self.graph.operations.append(Operation(name, given, tuple(map(self._new, outputs))))
        for tensor in changed:  # in place, which changes whatever else lies in its memory
            for other in self._views[_memory(tensor)]:
                if other is not tensor:
                    before, after = self.value(other), self.value(tensor)
                    self.graph.operations.append(Operation("slice_scatter", (before, after), (self._new(other),)))
        return made

    def _plain(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return self.value(given)
        return [self._plain(each) for each in given] if isinstance(given, list | tuple) else given


def _memory(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse: no storage
        return id(tensor)
