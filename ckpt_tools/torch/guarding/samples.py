"""A few elements of a tensor, live or in a file: enough to tell whether two hold the same numbers, in microseconds.

Eight runs of sixteen elements are spread over a tensor, the first and the last elements among them; a tensor of up to 128
elements is taken whole. Runs count elements row-major, so that a view in another shape has the same sample.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import torch

from ckpt_tools.io.content import Content, Joined, Literal, Range, read
from ckpt_tools.torch.copying import memory_of
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import row_major, torch_dtype

Runs: TypeAlias = tuple[tuple[int, int], ...]  # the first element, and how many

_RUNS, _LENGTH = 8, 16


@lru_cache(maxsize=4096)
def runs_of(numel: int) -> Runs:
    """The runs of a tensor of this many elements."""
    if numel <= _RUNS * _LENGTH:
        return ((0, numel),) if numel else ()
    last = numel - _LENGTH
    # the inner ones are off an even grid by the golden ratio, else they would all lie in one column of a matrix
    inner = [int(last * (number + number * 0.618 % 1) / _RUNS) for number in range(1, _RUNS - 1)]
    return tuple((start, _LENGTH) for start in (0, *inner, last))


def shifted(runs: Runs, by: int) -> Runs:
    """The same runs, so many elements further on."""
    return tuple((start + by, length) for start, length in runs)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that can be looked at here: not on the meta device, not lazy, not cut among ranks."""
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer) or tensor.is_meta:
        return False
    named = dtype_of(tensor) in DTYPES
    return type(tensor.data) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized and named


def dtype_of(tensor: torch.Tensor) -> str:
    """torch's name for its dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def of_live(tensor: torch.Tensor, runs: Runs) -> bytes:
    """The bytes of these runs of a tensor in memory."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        size, at = tensor.itemsize, tensor.data_ptr()
        return b"".join([ctypes.string_at(at + start * size, length * size) for start, length in runs])
    return _bytes_of(_taken(tensor, runs))


def of_all_live(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The samples of plain tensors; those on another device come in one transfer for each dtype, not one by one."""
    found: list[bytes] = [b""] * len(tensors)
    waiting: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            found[index] = of_live(tensor, runs_of(tensor.numel()))
        else:
            waiting.setdefault((tensor.device, tensor.dtype), []).append(index)
    for group in waiting.values():
        taken = [_taken(tensors[index], runs_of(tensors[index].numel())) for index in group]
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


def of_entry(entry: Entry, runs: Runs) -> bytes:
    """The bytes of these runs of a tensor in a file."""
    size, content = entry.dtype.itemsize, row_major(entry)
    if isinstance(content, Range) and (fast := _of_file(content, size, runs)) is not None:
        return fast
    if not _is_by_position(content):
        content = Literal(read(content))  # compressed, or its elements lie apart
    return b"".join([_at(content, start * size, length * size) for start, length in runs])


def _of_file(content: Range, size: int, runs: Runs) -> bytes | None:
    """The runs of a plain file by one system call each; None where the source reads in another way, or says why it cannot."""
    source, at = content.source, content.offset
    if source.half_edited or not hasattr(os, "pread") or (fd := source.fd) < 0:
        return None
    data = b"".join([os.pread(fd, length * size, at + start * size) for start, length in runs])
    return data if len(data) == sum(length for _, length in runs) * size else None


def _is_by_position(content: Content) -> bool:
    parts = content.parts if isinstance(content, Joined) else (content,)
    return all(isinstance(part, Range | Literal) for part in parts)


def _at(content: Content, start: int, length: int) -> bytes:
    if isinstance(content, Range):
        return content.source.read(content.offset + start, length)
    if isinstance(content, Literal):
        return content.data[start : start + length]
    assert isinstance(content, Joined), "asked before"
    found, at = [], 0
    for part in content.parts:
        first, last = max(start - at, 0), min(start + length - at, part.length)
        if first < last:
            found.append(_at(part, first, last - first))
        at += part.length
    return b"".join(found)


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
