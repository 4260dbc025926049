"""Bytes of a checkpoint on their way into a live tensor, without a second copy of it in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from ckpt_tools.numeric import blocks, row_major, torch_dtype
from ckpt_tools.plan import Content, Range, chunks, read_into
from ckpt_tools.tree import Entry


def copy_into(entry: Entry, tensor: torch.Tensor) -> None:
    """Copy an entry into a tensor of its shape.

    Where the tensor's memory is the file's bytes in their order (on the CPU, contiguous, of the same dtype), the file is read
    into it. Else it goes through a buffer of a few megabytes: to another device, dtype or memory format.
    """
    if not entry.numel:
        return
    content, dtype = row_major(entry), torch_dtype(entry.dtype)
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if plain and tensor.dtype == dtype:
        read_into(content, memory_of(tensor))
        return
    elements = _Elements(content, dtype)
    for block in blocks(tensor.detach()):
        block.copy_(elements.take(block.numel()).reshape(block.shape))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; valid as long as the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Elements:
    """The elements of a content, some at a time, in one buffer that is used again."""

    def __init__(self, content: Content, dtype: torch.dtype) -> None:
        self.content, self.dtype = content, dtype
        self.buffer = bytearray()
        self.at = 0
        self.chunks: Iterator[bytes | memoryview] = iter(()) if isinstance(content, Range) else chunks(content)
        self.rest = memoryview(b"")

    def take(self, count: int) -> torch.Tensor:
        """The next elements; good until the next call."""
        size = count * self.dtype.itemsize
        if len(self.buffer) < size:
            self.buffer = bytearray(size)
        self._read(memoryview(self.buffer)[:size])
        return torch.frombuffer(self.buffer, dtype=self.dtype, count=count)

    def _read(self, out: memoryview) -> None:
        if isinstance(self.content, Range):
            self.content.source.read_into(self.content.offset + self.at, out)
            self.at += len(out)
            return
        while len(out):
            if not len(self.rest):
                self.rest = memoryview(next(self.chunks)).cast("B")
            size = min(len(self.rest), len(out))
            out[:size] = self.rest[:size]
            self.rest, out = self.rest[size:], out[size:]
