"""What torch and safetensors make of a file, in the form of the rows of `ckpt inspect`; and where the two differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.support.graphs import parts_of

Row = dict[str, Any]
_MOST = 20_000
_VIEW = ("stride", "offset", "requires_grad", "kind")


def torch_rows(path: Path) -> list[Row] | str:
    """The tensors that `torch.load(weights_only=True)` finds, in order; its message when it refuses the file."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        return [_row(where, tensor) for where, tensor in _tensors(loaded)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


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
    row: Row = {"where": list(where), "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested and tensor.device.type == "cpu":
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        row |= {
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "requires_grad": tensor.requires_grad,
            "kind": kind,
        }
    return row


def safetensors_rows(path: Path) -> list[Row] | str:
    """The tensors that `safe_open` finds, by name; its message when it refuses the file."""
    try:
        with safe_open(path, "pt") as file:
            return [_named(name, file) for name in sorted(file.keys())]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _named(name: str, file: Any) -> Row:
    part = file.get_tensor(name)
    return {"where": [name], "dtype": str(part.dtype).removeprefix("torch."), "shape": list(part.shape)}


def difference(ours: list[Row], theirs: list[Row]) -> str | None:
    """The first row in which the two lists differ, None when they agree on all that both know."""
    for one, two in zip(ours, theirs, strict=False):
        keys = [key for key in two if one.get(key) is not None and (key not in _VIEW or one["kind"] in ("tensor", "parameter"))]
        if any(one[key] != two[key] for key in keys if key != "where") or not _same_path(one["where"], two["where"]):
            return f"ours { ({key: one[key] for key in keys}) }, theirs {two}"
    return None if len(ours) == len(theirs) else f"ours has {len(ours)} tensors, theirs {len(theirs)}"


def _same_path(ours: list[str | int], theirs: list[str | int]) -> bool:
    """Whether two paths are one; keys that are no text have a text of their own in each."""
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(
        one == two or str(one).startswith("<") or str(one) == str(two) or f"<class '{one}'>" == two for one, two in pairs
    )
