"""A few elements of a tensor: enough to tell whether two hold the same numbers, in microseconds.

Eight runs of sixteen elements are spread over a tensor, the first and the last elements among them; a tensor of up to 128
elements is taken whole. Runs count elements row-major, so that a view in another shape has the same sample.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import torch

from ckpt_tools.torch.copying import is_freed, memory_of
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.values.numeric import torch_dtype

Runs: TypeAlias = tuple[tuple[int, int], ...]  # the first element, and how many

_RUNS, _LENGTH = 8, 16
START = 4  # elements by which a part of a tensor is looked for
SMALL = 8192  # bytes of a tensor that is read at once, and cut into runs afterwards


@lru_cache(maxsize=4096)
def runs_of(numel: int) -> Runs:
    """The runs of a tensor of this many elements."""
    if numel <= _RUNS * _LENGTH:
        return ((0, numel),) if numel else ()
    last = numel - _LENGTH
    # the inner ones are off an even grid by the golden ratio, else they would all lie in one column of a matrix
    inner = [int(last * (number + number * 0.618 % 1) / _RUNS) for number in range(1, _RUNS - 1)]
    return tuple((start, _LENGTH) for start in (0, *inner, last))


def ends_of(numel: int) -> Runs:
    """The first and the last of the runs: what is remembered of how a tensor was."""
    runs = runs_of(numel)
    return runs if len(runs) < 2 else (runs[0], runs[-1])


def ends(sample: bytes, numel: int, dtype: DType) -> bytes:
    """What `ends_of` takes, of a sample."""
    run = _LENGTH * dtype.itemsize
    return sample if numel <= _RUNS * _LENGTH else sample[:run] + sample[-run:]


def shifted(runs: Runs, by: int) -> Runs:
    """The same runs, so many elements further on."""
    return tuple((start + by, length) for start, length in runs)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that can be looked at here: not meta, not lazy, not cut among ranks, not freed."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or dtype_of(tensor.dtype) is None:
        return False
    is_one = type(tensor) in _PLAIN or (not is_lazy(tensor) and type(tensor.data) is torch.Tensor)
    return is_one and not is_freed(tensor)


_PLAIN = (torch.nn.Parameter, torch.Tensor)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no shape yet."""
    return isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)


@cache
def dtype_of(dtype: torch.dtype) -> DType | None:
    """torch's dtype as ours; None where files have none like it."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


def of_live(tensor: torch.Tensor, runs: Runs) -> bytes:
    """The bytes of these runs of a tensor in memory."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        size, at = tensor.itemsize, tensor.data_ptr()
        if len(runs) == 1:
            ((start, length),) = runs
            return ctypes.string_at(at + start * size, length * size)
        return b"".join([ctypes.string_at(at + start * size, length * size) for start, length in runs])
    return _bytes_of(_taken(tensor, runs))


def of_all_live(tensors: Sequence[torch.Tensor], wanted: Callable[[int], Runs] = runs_of) -> list[bytes]:
    """The samples of plain tensors; those on another device come in one transfer for each dtype, not one by one."""
    found: list[bytes] = [b""] * len(tensors)
    waiting: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu:
            found[index] = of_live(tensor, wanted(tensor.numel()))
        else:
            waiting.setdefault((tensor.device, tensor.dtype), []).append(index)
    for group in waiting.values():
        taken = [_taken(tensors[index], wanted(tensors[index].numel())) for index in group]
        for index, part in zip(group, torch.cat(taken).cpu().split([len(part) for part in taken]), strict=True):
            found[index] = _bytes_of(part)
    return found


def _taken(tensor: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The elements of the runs, in a row; one-byte types as uint8: torch takes from no float8."""
    held = tensor.detach().resolve_conj().resolve_neg()
    held = held.view(torch.uint8) if held.itemsize == 1 else held
    places = [place for start, length in runs for place in range(start, start + length)]
    return torch.take(held, torch.tensor(places, dtype=torch.int64, device=held.device))


def _bytes_of(taken: torch.Tensor) -> bytes:
    return bytes(memory_of(taken.cpu().contiguous())) if taken.numel() else b""


def cast(data: bytes, old: DType, new: DType) -> bytes | None:
    """Elements in another dtype, as torch casts them; None where torch has no such cast."""
    if old is new or not data:
        return data
    if not (old.in_torch and new.in_torch) or old.packed > 1 or new.packed > 1:
        return None
    try:
        return _bytes_of(torch.frombuffer(bytearray(data), dtype=torch_dtype(old)).to(torch_dtype(new)))
    except (RuntimeError, TypeError):
        return None


def is_telling(data: bytes, dtype: DType) -> bool:
    """Whether a sample could hardly be another tensor's too: four elements and more that are not all one number."""
    size = max(dtype.itemsize, 1)
    return len(data) >= 4 * size and data != data[:size] * (len(data) // size)
