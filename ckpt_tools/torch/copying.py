"""Bytes of a checkpoint on their way into a live tensor, without a second copy of it in memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from ckpt_tools.io.content import Content, Range, read_into
from ckpt_tools.io.source import Source
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import CastCount, blocks, by_position, narrow, part, row_major, torch_dtype

_STEP = 16 << 20
_Read = tuple[Source, int, memoryview]


def copy_all(copies: Iterable[tuple[Entry, torch.Tensor]]) -> list[CastCount]:
    """Copy each entry into its tensor; of each what a cast loses."""
    reads: list[_Read] = []
    counts: list[CastCount] = []
    for entry, tensor in copies:
        counts.append(CastCount())
        if not entry.numel:
            continue
        content, dtype = row_major(entry), torch_dtype(entry.dtype)
        is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not is_plain or tensor.dtype != dtype:
            _copy_elements(by_position(content), dtype, tensor.detach(), counts[-1])
        elif isinstance(content, Range) and content.source.fd >= 0:
            memory = memory_of(tensor)
            steps = range(0, len(memory), _STEP)
            reads += [(content.source, content.offset + start, memory[start : start + _STEP]) for start in steps]
        else:
            read_into(content, memory_of(tensor))
    _read_all(reads)
    return counts


def _read_all(reads: list[_Read]) -> None:
    """Fresh memory is mapped as it is first written to, page by page: that takes longer than the copy, and threads share it."""
    threads = min(torch.get_num_threads(), sum(len(memory) for *_, memory in reads) // _STEP)
    reads.reverse()
    if threads < 2 or not hasattr(os, "pread"):  # else threads would move one position in the file
        _read_some(reads)
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(_read_some, reads) for _ in range(threads)]:
                done.result()
        finally:
            reads.clear()  # after an error the other threads have nothing more to do


def _read_some(reads: list[_Read]) -> None:
    """Take reads from the end of the list until there are none."""
    while True:
        try:
            source, offset, memory = reads.pop()
        except IndexError:
            return
        source.read_into(offset, memory)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; valid as long as the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory has been given back, as sharding and offloading do: to look there would crash."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return False
    if tensor.is_contiguous():
        span = tensor.numel()
    else:
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (tensor.storage_offset() + span) * tensor.itemsize


def _copy_elements(content: Content, dtype: torch.dtype, tensor: torch.Tensor, count: CastCount) -> None:
    """Copy a block at a time, through one buffer that is used again."""
    buffer, at = bytearray(), 0
    is_narrowed = dtype != tensor.dtype and dtype.is_floating_point and tensor.dtype.is_floating_point
    for block in blocks(tensor):
        size = block.numel() * dtype.itemsize
        if len(buffer) < size:
            buffer = bytearray(size)
        read_into(part(content, at, size), memoryview(buffer)[:size])
        values = torch.frombuffer(buffer, dtype=dtype, count=block.numel()).reshape(block.shape)
        if is_narrowed:
            narrow(values.to(block.device), block, count)
        else:
            block.copy_(values)
        at += size
