"""What torch loads, taken apart: its tensors with their paths and device tags, and whether two loads are the same graph."""

import collections
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

LEAVES = (int, str, bytes, type(None), torch.dtype, torch.device, type, FunctionType, BuiltinFunctionType)


def load_with_tags(path: Path, *, weights_only: bool = False) -> tuple[Any, dict[int, str]]:
    """What torch.load gives on the CPU, and the device tag of every storage, by its identity."""
    tags: dict[int, str] = {}

    def record(storage: Any, tag: str) -> Any:
        tags[storage._cdata] = tag
        return storage

    return torch.load(path, map_location=record, weights_only=weights_only), tags


def live_tensors(root: Any) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    """Every tensor with the keys that lead to it, in order; those of a module under the names of its state dict."""
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), root)]
    while stack:
        where, value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield where, value
        else:
            stack.extend(reversed([((*where, key), part) for key, part in parts_of(value)]))


def parts_of(value: Any) -> list[tuple[str | int, Any]]:
    """What a container or object holds, with the keys that lead there."""
    if isinstance(value, torch.nn.Module):
        return list(value.state_dict(keep_vars=True).items())
    if isinstance(value, dict):
        return [
            (key if type(key) is str or (type(key) is int and abs(key) < 2**31) else str(key), part)
            for key, part in value.items()
        ]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(vars(value).items()) if hasattr(value, "__dict__") and not isinstance(value, type) else []


def storage_bytes(tensor: torch.Tensor) -> bytes:
    """All bytes of the storage that a tensor views."""
    storage = tensor.untyped_storage()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()) if storage.nbytes() else b""


def element_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, row-major."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return storage_bytes(flat)


class Same:
    """Compares two graphs: types, values bit by bit, order, and which places hold one and the same object.

    Args:
        storages: whether tensors must be equal views on equal storages; else only their elements count.
        exact: whether float32 tensors must be equal bit by bit; else to a millionth, as training on another CPU gives them.
    """

    def __init__(self, *, storages: bool = True, exact: bool = True) -> None:
        self.storages, self.exact = storages, exact
        self.there: dict[int, Any] = {}
        self.back: dict[int, Any] = {}
        self.live: dict[int, int] = {}
        self.kept: list[Any] = []

    def check(self, one: Any, two: Any, where: str = "root") -> None:
        """Raise AssertionError with the path of the first difference."""
        assert type(one) is type(two), f"{where}: {type(one)} and {type(two)}"
        if isinstance(one, float | complex):
            pair = (one.real, one.imag, two.real, two.imag)
            assert struct.pack("2d", *pair[:2]) == struct.pack("2d", *pair[2:]), f"{where}: {one} and {two}"
        elif isinstance(one, LEAVES):
            assert one == two, f"{where}: {one!r} and {two!r}"
        elif not (type(one) is tuple and not one) and self._new(one, two, where):
            self._parts(one, two, where)

    def _new(self, one: Any, two: Any, where: str) -> bool:
        """Whether this pair is met for the first time; what one side shares the other must share."""
        first = id(one) not in self.there
        assert self.there.setdefault(id(one), two) is two, f"{where}: shared in the first graph only"
        assert self.back.setdefault(id(two), one) is one, f"{where}: shared in the second graph only"
        self.kept += (one, two)
        return first

    def _parts(self, one: Any, two: Any, where: str) -> None:
        if isinstance(one, torch.Tensor):
            self._tensor(one, two, where)
        elif isinstance(one, np.ndarray | np.generic):
            assert (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes()), where
        elif isinstance(one, set | frozenset):
            assert sorted(map(repr, one)) == sorted(map(repr, two)), where
        elif isinstance(one, dict):
            self._sequence(list(one), list(two), f"{where} key")
            self._sequence(list(one.values()), list(two.values()), where, list(one))
        elif isinstance(one, list | tuple | collections.deque):
            self._sequence(list(one), list(two), where)
        elif isinstance(one, bytearray):
            assert one == two, where
        if hasattr(one, "__dict__"):
            self.check(vars(one), vars(two), f"{where} attributes")
        for slot in getattr(type(one), "__slots__", ()):
            self.check(getattr(one, slot, None), getattr(two, slot, None), f"{where}.{slot}")

    def _sequence(self, ones: list[Any], twos: list[Any], where: str, names: list[Any] | None = None) -> None:
        assert len(ones) == len(twos), f"{where}: {len(ones)} and {len(twos)} parts"
        for index, (one, two) in enumerate(zip(ones, twos, strict=True)):
            self.check(one, two, f"{where}[{names[index] if names else index!r}]")

    def _tensor(self, one: torch.Tensor, two: torch.Tensor, where: str) -> None:
        assert (one.dtype, one.shape, one.layout) == (two.dtype, two.shape, two.layout), where
        assert one.requires_grad == two.requires_grad, f"{where}: requires_grad"
        if one.is_sparse:
            self.check(one._indices(), two._indices(), where)
            self.check(one._values(), two._values(), where)
            return
        exact = self.exact or one.dtype != torch.float32
        if exact:
            assert element_bytes(one) == element_bytes(two), f"{where}: values"
        else:
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-6, equal_nan=True), f"{where}: values"
        if self.storages:
            assert (one.stride(), one.storage_offset()) == (two.stride(), two.storage_offset()), f"{where}: view"
            assert (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg()), f"{where}: conj and neg bits"
            same = storage_bytes(one) == storage_bytes(two) if exact else len(storage_bytes(one)) == len(storage_bytes(two))
            assert same, f"{where}: storage"
        if one.untyped_storage().nbytes():
            pair = (one.untyped_storage()._cdata, two.untyped_storage()._cdata)
            assert self.live.setdefault(pair[0], pair[1]) == pair[1], f"{where}: tied in the first graph only"
            assert self.live.setdefault(-pair[1], pair[0]) == pair[0], f"{where}: tied in the second graph only"


def assert_same(one: Any, two: Any, *, storages: bool = True, exact: bool = True) -> None:
    """Two graphs are equal, identity structure included."""
    Same(storages=storages, exact=exact).check(one, two)


def equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same names in order, dtypes and values."""
    same = all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items())
    return list(found) == list(expected) and same
