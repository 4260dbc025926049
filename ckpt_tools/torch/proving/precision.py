"""Float64 throughout: code that asks for float32 on the way, as norms and rotary embeddings do, gets float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_CASTS: dict[Any, Callable[..., Any]] = {torch.Tensor.float: torch.Tensor.double}
_OF_BITS = frozenset({"view", "frombuffer", "from_file"})  # they say what the bytes are, not what is wanted


class Precision(Enum):
    """What a model computes in."""

    FLOAT64 = "float64"
    MIXED = "float64, with float32 where the code says so"
    FLOAT32 = "float32"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self is Precision.FLOAT32 else torch.float64

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


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
    """With the tensors in it."""
    if isinstance(value, torch.Tensor) and value.dtype in _WIDER:
        return value.to(_WIDER[value.dtype])
    if isinstance(value, Mapping):
        return {name: _deeply(item) for name, item in value.items()}
    return type(value)(map(_deeply, value)) if type(value) in (list, tuple) else _wider(value)


@contextlib.contextmanager
def computing_in(precision: Precision) -> Iterator[None]:
    if precision is not Precision.FLOAT64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def cast(model: torch.nn.Module, precision: Precision) -> None:
    """The floats of a model in the dtype of a precision, its complex numbers in the one that goes with it."""
    dtype = precision.dtype
    of_complex = torch.complex64 if dtype is torch.float32 else torch.complex128

    def to(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(of_complex)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(to)
