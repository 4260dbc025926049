"""Samples of tensors in files: by one system call for each run, and small neighbours by one for all of them."""

from __future__ import annotations

import os
from functools import lru_cache

from ckpt_tools.io.content import Content, Joined, Literal, Range, read
from ckpt_tools.io.output import Source
from ckpt_tools.torch.guarding.samples import SMALL, Runs
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import row_major

_BLOCK, _KEPT = 1 << 15, 64


class Reader:
    """Reads runs of tensors; what was read last of plain files is kept, 2 MB of it."""

    def __init__(self) -> None:
        self._block = lru_cache(maxsize=_KEPT)(_read_block)

    def runs(self, entry: Entry, runs: Runs) -> bytes:
        """The bytes of these runs of a tensor."""
        size, content = entry.dtype.itemsize, row_major(entry)
        if isinstance(content, Range) and (fast := self._of_file(content, size, runs)) is not None:
            return fast
        if not _is_by_position(content):
            content = Literal(read(content))  # compressed, or its elements lie apart
        return b"".join([_at(content, start * size, length * size) for start, length in runs])

    def _of_file(self, content: Range, size: int, runs: Runs) -> bytes | None:
        """The runs of a plain file; None where the source reads in another way, or says why it cannot."""
        source, at = content.source, content.offset
        if source.half_edited or not hasattr(os, "pread") or (fd := source.fd) < 0:
            return None
        if content.length <= SMALL:
            data = self._small(source, at, content.length)
            return b"".join([data[start * size : (start + length) * size] for start, length in runs])
        data = b"".join([os.pread(fd, length * size, at + start * size) for start, length in runs])
        return data if len(data) == sum(length for _, length in runs) * size else None

    def _small(self, source: Source, at: int, length: int) -> bytes:
        number, start = divmod(at, _BLOCK)
        data = self._block(source, number)[start : start + length]
        return data if len(data) == length else data + self._block(source, number + 1)[: length - len(data)]


def _read_block(source: Source, number: int) -> bytes:
    start = number * _BLOCK
    return source.read(start, min(_BLOCK, source.size - start))


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
