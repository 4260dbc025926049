"""What torch, safetensors and NumPy make of a file, in the form of the rows of `ckpt inspect`; and where the two differ."""

from __future__ import annotations

import collections
import hashlib
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from tests.support.graphs import element_bytes, parts_of

Row = dict[str, Any]
UNORDERED = ("safetensors_rows", "numpy_rows")
_LARGEST = 1 << 16  # elements of a tensor whose bytes are compared
_MOST = 20_000
_VIEW = ("stride", "offset", "requires_grad", "kind")


def loaders(data: bytes) -> list[Callable[[Path], list[Row] | str]]:
    """Who else reads a file with these bytes."""
    if data.startswith(b"\x93NUMPY"):
        return [numpy_rows]
    if data[8:9] == b"{" and not data.startswith(b"PK"):
        return [safetensors_rows, pickle_rows]
    return [torch_rows, pickle_rows, *([numpy_rows] if data.startswith(b"PK") and b".npy" in data else [])]


def torch_rows(path: Path) -> list[Row] | str:
    """The tensors that `torch.load(weights_only=True)` finds, in order; its message when it refuses the file."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        return [_row(where, tensor) for where, tensor in _tensors(loaded)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class _Unpickler(pickle.Unpickler):
    """Python's own, which finds a few names and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """What is as harmless as the data it makes."""
        if module == "torch" and name.endswith("Storage"):
            return torch.serialization.StorageType(name)
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _HARMLESS[module, name]


_REBUILDS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict, ("torch", "Size"): torch.Size,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    **{("torch._utils", name): getattr(torch._utils, name) for name in _REBUILDS},
    **{("torch", name): getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "uint8", "bool")},
}  # fmt: skip
_PICKLE = SimpleNamespace(
    __name__="harmless", Unpickler=_Unpickler, load=lambda file, **options: _Unpickler(file, **options).load()
)


def pickle_rows(path: Path) -> list[Row] | str:
    """The tensors that `torch.load(weights_only=False)` finds, with an unpickler that knows harmless names only."""
    if path.suffix == ".safetensors":
        return "torch would ask safetensors"
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_PICKLE)
        return [_row(where, tensor) for where, tensor in _tensors(loaded)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def numpy_rows(path: Path) -> list[Row] | str:
    """The arrays that `numpy.load` finds, by name; its message when it refuses the file."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray) and not all(name.endswith(".npy") for name in loaded.zip.namelist()):
            return "an archive of more than arrays"
        arrays = {(): loaded} if isinstance(loaded, np.ndarray) else {(name,): loaded[name] for name in loaded.files}
        return [_plain(_row(where, _tensor(array))) for where, array in arrays.items()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    native = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(np.ascontiguousarray(native)).reshape(array.shape)


def _plain(row: Row) -> Row:
    """Without what only torch has."""
    return {key: value for key, value in row.items() if key not in _VIEW}


def _tensors(root: Any) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    """Every tensor with its path; a mutated file may hold a container that holds itself, or one thing in a million places."""
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), root)]
    for _ in range(_MOST):
        if not stack:
            return
        where, value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield where, value
        else:
            stack.extend(reversed([((*where, key), part) for key, part in parts_of(value)]))
    raise RecursionError("the object has no end")


def _row(where: tuple[str | int, ...], tensor: torch.Tensor) -> Row:
    if isinstance(tensor, DTensor):  # has no bytes of its own: torch mostly says so, and died on one with another part
        raise TypeError("a DTensor")
    row: Row = {"where": list(where), "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested and tensor.device.type == "cpu":
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        row |= {
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "requires_grad": tensor.requires_grad,
            "kind": kind,
        }
        if tensor.numel() <= _LARGEST and tensor.dtype is not torch.bool:  # whose bytes are 0 and 1 once they are copied
            head = f"{row['dtype']} [{','.join(map(str, tensor.shape))}]\n"
            row["sha256"] = hashlib.sha256(head.encode() + element_bytes(tensor)).hexdigest()
    return row


def safetensors_rows(path: Path) -> list[Row] | str:
    """The tensors that `safe_open` finds, by name; its message when it refuses the file."""
    try:
        with safe_open(path, "pt") as file:
            return [_named(name, file) for name in sorted(file.keys())]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _named(name: str, file: Any) -> Row:
    return _plain(_row((name,), file.get_tensor(name)))


def difference(ours: list[Row], theirs: list[Row]) -> str | None:
    """The first row in which the two lists differ, None when they agree on all that both know."""
    ours = comparable(ours, theirs)
    for one, two in zip(ours, theirs, strict=False):
        keys = [key for key in two if one.get(key) is not None and (key not in _VIEW or one["kind"] in ("tensor", "parameter"))]
        if any(one[key] != two[key] for key in keys if key != "where") or not _same_path(one["where"], two["where"]):
            return f"ours { ({key: one[key] for key in keys}) }, theirs {two}"
    return None if len(ours) == len(theirs) else f"ours has {len(ours)} tensors, theirs {len(theirs)}"


def comparable(ours: list[Row], theirs: list[Row]) -> list[Row]:
    """Our rows but for what a call is given; torch alone knows what it makes of it: `set.__new__(set, tensor)` is empty.

    A program's attributes are in no state dict either, where theirs is one.
    """
    found = [row for row in ours if not any(str(key).startswith("<arg ") for key in row["where"])]
    whole = any("_modules" in row["where"] for row in theirs)
    return found if whole else [row for row in found if "_modules" not in row["where"]]


def _same_path(ours: list[str | int], theirs: list[str | int]) -> bool:
    """Whether two paths are one; keys that are no text have one of their own in each: `torch.f` is `<function f at 0x7f>`."""
    return len(ours) == len(theirs) and all(map(_same_key, ours, theirs))


def _same_key(ours: str | int, theirs: str | int) -> bool:
    one, two = str(ours), str(theirs)
    if two.startswith("StorageType(") and hasattr(torch, one.removeprefix("torch.")):
        one = str(torch.serialization.StorageType(one.removeprefix("torch.")))
    named = re.fullmatch(r"<(?:class|function|built-in \w+) '?([\w.]+)\b.*>", two)
    return ours == theirs or one.startswith("<") or one == two or (named is not None and f".{one}".endswith(f".{named[1]}"))
