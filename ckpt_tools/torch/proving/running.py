"""Run a model on seeded inputs of the shapes that the user gave, in float64 throughout or in float32."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ckpt_tools.errors import ConvertError
from ckpt_tools.torch.copying import memory_of
from ckpt_tools.torch.proving.outputs import Named, named
from ckpt_tools.torch.proving.recording import ModuleCall, Recorder
from ckpt_tools.tree.graphs import Input


@dataclass(frozen=True, slots=True)
class Given:
    """What one call of a model is given."""

    by_position: tuple[torch.Tensor, ...]
    by_name: dict[str, torch.Tensor]

    def to(self, dtype: torch.dtype) -> Given:
        """Copies, which the model may write into."""
        return Given(
            tuple(_to(value, dtype) for value in self.by_position),
            {name: _to(value, dtype) for name, value in self.by_name.items()},
        )


def _to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()


def make(inputs: Sequence[Input], seed: int, runs: int) -> list[Given]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(runs):
        pairs = [(row.name, _values(row, generator)) for row in inputs]
        by_name = {name: value for name, value in pairs if name is not None}
        made.append(Given(tuple(value for name, value in pairs if name is None), by_name))
    return made


def _values(row: Input, generator: torch.Generator) -> torch.Tensor:
    if row.below is not None:
        return torch.randint(row.below, row.shape, generator=generator)
    return torch.randn(row.shape, generator=generator, dtype=torch.float32).double()


def digest(sets: Sequence[Given]) -> str:
    total = hashlib.sha256()
    for given in sets:
        for value in (*given.by_position, *given.by_name.values()):
            total.update(memory_of(value))
    return total.hexdigest()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch draws from this seed in here; afterwards it goes on as if nothing had been."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class Done(NamedTuple):
    root: ModuleCall
    outputs: Named


def run(side: str, model: torch.nn.Module, given: Given, dtype: torch.dtype, seed: int) -> Done:
    """Run a model, and write down what its modules are given and give. Raises ConvertError where the model raises."""
    recorder = Recorder(model)
    try:
        _ = model.double() if dtype is torch.float64 else model.float()
        with torch.no_grad():
            made = named(called(model, given, dtype, seed))
    except Exception as error:  # whatever the user's model raises
        where = f", in {recorder.open[-1].path} ({recorder.open[-1].kind})" if recorder.open[1:] else ""
        raise ConvertError(
            f"{side} raised {type(error).__name__} when it ran{where}.", why=f"{error}",
            fix="Give the inputs that its forward takes: NAME=SHAPE by name, SHAPE:N for integers below N.",
        ) from error  # fmt: skip
    finally:
        recorder.close()
    assert recorder.root is not None, "the model's own hooks ran"
    return Done(recorder.root, made)


def called(model: Callable[..., Any], given: Given, dtype: torch.dtype, seed: int) -> Any:
    """What a model gives, computed in a dtype. Module by module: torch's transformer layers have a shortcut."""
    own = given.to(dtype)
    shortcut = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with redirect_stdout(sys.stderr), seeded(seed), _in_float64() if dtype is torch.float64 else contextlib.nullcontext():
            return model(*own.by_position, **own.by_name)
    finally:
        torch.backends.mha.set_fastpath_enabled(shortcut)


# --- float64 throughout: code that asks for float32 on the way, as norms and rotary embeddings do, gets float64


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_CASTS: dict[Any, Callable[..., Any]] = {torch.Tensor.float: torch.Tensor.double}


class _Widened(TorchFunctionMode):
    """Says float64 for float32 in every call of torch."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = _CASTS.get(func, func)
        return call(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)
