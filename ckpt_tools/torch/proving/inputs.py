"""Seeded inputs of the shapes that the user gave; and what a model draws itself, from a seed too."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ckpt_tools.errors import CkptError
from ckpt_tools.torch.copying import memory_of
from ckpt_tools.torch.proving.recording import ModuleCall, Named, Recorder, named
from ckpt_tools.tree.graphs import Input


@dataclass(frozen=True, slots=True)
class Given:
    """What one call of a model is given."""

    by_position: tuple[torch.Tensor, ...]
    by_name: dict[str, torch.Tensor]

    def to(self, dtype: torch.dtype) -> Given:
        return Given(tuple(_to(value, dtype) for value in self.by_position),
                     {name: _to(value, dtype) for name, value in self.by_name.items()})  # fmt: skip


def _to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()


def make(inputs: Sequence[Input], seed: int, runs: int) -> list[Given]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(runs):
        values = [_values(row, generator) for row in inputs]
        pairs = list(zip(inputs, values, strict=True))
        made.append(Given(tuple(value for row, value in pairs if row.name is None),
                          {row.name: value for row, value in pairs if row.name is not None}))  # fmt: skip
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
    """torch, Python and numpy draw from this seed in here; afterwards they go on as if nothing had been."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy and of_numpy is not None:
                numpy.random.set_state(of_numpy)


class Done(NamedTuple):
    root: ModuleCall
    outputs: Named


class RaisedError(Exception):
    """A model raised when it ran: which one, and the module that it was in; the cause is what it raised."""

    def __init__(self, model: torch.nn.Module, inside: ModuleCall | None) -> None:
        super().__init__()
        self.model, self.inside = model, inside


def run(model: torch.nn.Module, given: Given, dtype: torch.dtype, seed: int) -> Done:
    """Run a model, and write down what its modules are given and give."""
    recorder = Recorder(model)
    try:
        made = run_alone(model, given, dtype, seed)
    except CkptError:
        raise
    except Exception as error:  # whatever the user's model raises
        raise RaisedError(model, recorder.inside) from error
    finally:
        recorder.close()
    assert recorder.root is not None, "the model's own hooks ran"
    return Done(recorder.root, made)


def run_alone(model: torch.nn.Module, given: Given, dtype: torch.dtype, seed: int) -> Named:
    """What a model gives. The inputs are its own: it may write into them."""
    own = given.to(dtype)
    with torch.no_grad(), seeded(seed), computing_in(dtype), _as_written(), redirect_stdout(sys.stderr):
        return named(model(*own.by_position, **own.by_name))


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Module by module: torch's transformer layers pass theirs by when they are evaluated, and compiled code has none.

    Asking torch's compiler for anything imports it, which takes seconds: it is asked where the model has imported it.
    """
    set_stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.nullcontext() if set_stance is None else set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# --- float64 throughout: code that asks for float32 on the way, as norms and rotary embeddings do, gets float64


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_CASTS: dict[Any, Callable[..., Any]] = {torch.Tensor.float: torch.Tensor.double}
_OF_BITS = frozenset({"view", "frombuffer", "from_file"})  # they say what the bytes are, not what is wanted


class _Widened(TorchFunctionMode):
    """Says float64 for float32 in every call of torch."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", "") in _OF_BITS:
            return func(*args, **named)
        call = _CASTS.get(func, func)
        try:
            return call(*map(_wider, args), **{name: _wider(value) for name, value in named.items()})
        except RuntimeError:  # of two dtypes: a tensor that is neither parameter nor buffer was not cast with them
            return call(*_deeply(list(args)), **_deeply(named))


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _deeply(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _WIDER:
        return value.to(_WIDER[value.dtype])
    if isinstance(value, Mapping):
        return {name: _deeply(item) for name, item in value.items()}
    return type(value)(map(_deeply, value)) if type(value) in (list, tuple) else _wider(value)


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    if dtype is not torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """The floats of a model in a dtype, its complex numbers in the one that goes with it."""
    of_complex = torch.complex64 if dtype is torch.float32 else torch.complex128

    def to(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(of_complex)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(to)
