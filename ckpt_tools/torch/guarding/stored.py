"""The tensors of the files that were opened, found by name and by sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ckpt_tools.edit import casts
from ckpt_tools.errors import CkptError, NotACheckpointError
from ckpt_tools.formats.base import PART_CONTAINERS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.content import Content, Joined, Literal, Range, read
from ckpt_tools.io.output import Source
from ckpt_tools.parts.families import partition
from ckpt_tools.parts.names import INDEX_SUFFIX
from ckpt_tools.parts.open import open_checkpoint, open_whole
from ckpt_tools.text import dotted
from ckpt_tools.torch.guarding import samples
from ckpt_tools.torch.guarding.samples import SMALL, Runs
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import row_major

_DCP = (".distcp", os.sep + ".metadata")


@dataclass(slots=True, eq=False)
class Stored:
    """A tensor of a file: the file, its path in there, its own name (without wrappers), and what it is."""

    path: str
    where: str
    name: str
    entry: Entry
    reader: Reader = field(repr=False)
    _sample: bytes | None = field(default=None, repr=False)

    @property
    def sample(self) -> bytes:
        """Its sample, read once."""
        if self._sample is None:
            self._sample = self.reader.runs(self.entry, samples.runs_of(self.entry.numel))
        return self._sample

    def at(self, runs: Runs) -> bytes:
        """The bytes of these runs of it."""
        return self.reader.runs(self.entry, runs)


class Library:
    """Every plain tensor of the files, while they are open."""

    def __init__(self) -> None:
        self.tensors: list[Stored] = []
        self.paths: list[str] = []
        self.notes: list[str] = []
        self._stack, self._reader = ExitStack(), Reader()
        self._by_start: dict[tuple[tuple[int, ...], str], dict[bytes, list[Stored]]] = {}
        self._by_sample: dict[tuple[str, int], dict[bytes, list[Stored]]] = {}

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, opened: Iterable[str], named: Iterable[str]) -> None:
        """Take in the files that are checkpoints; a file that is a part of one stands for its folder."""
        folders: dict[str, None] = {}
        for path in named:
            self._take(path, open_whole)
        for path in opened:
            if path.endswith(INDEX_SUFFIX):
                continue  # the shards that it names count where they were opened themselves
            if path.endswith(_DCP) or (os.path.isfile(path) and not self._take(path, open_checkpoint)):
                folders[os.path.dirname(path)] = None
            elif not os.path.lexists(path):
                self.notes.append(f"{path} was opened, and is gone")
        for folder in folders:
            self._take(folder, open_whole)

    def _take(self, path: str, opener: Callable[[str], Checkpoint]) -> bool:
        """Whether the path stands for itself; what is not a checkpoint does, and is passed over."""
        try:
            checkpoint = self._stack.enter_context(opener(path))
            if opener is open_checkpoint and (checkpoint.container in PART_CONTAINERS or partition(checkpoint) is not None):
                return False
            checkpoint.locate()
            found = list(_tensors(path, checkpoint, self._reader))
        except NotACheckpointError:
            return True
        except CkptError as error:
            self.notes.append(f"{path} was opened, and cannot be read here: {error.what}")
            return True
        if found:
            self.paths.append(path)
            self.tensors += found
        return True

    @cached_property
    def _by_name(self) -> dict[str, list[Stored]]:
        found: dict[str, list[Stored]] = {}
        for stored in self.tensors:
            found.setdefault(stored.name, []).append(stored)
        return found

    @cached_property
    def _by_end(self) -> dict[str, list[Stored]]:
        """Each end of a path that begins at a dot."""
        found: dict[str, list[Stored]] = {}
        for stored in self.tensors:
            parts = stored.where.split(".")
            for at in range(len(parts)):
                found.setdefault(".".join(parts[at:]), []).append(stored)
        return found

    def named(self, name: str) -> list[Stored]:
        """Tensors of this name; else those whose path ends so; else those by whose path the name ends."""
        if found := self._by_name.get(name):  # as most: these names have no wrappers
            return found
        name = unwrap(name)
        if found := self._by_name.get(name) or self._by_end.get(name):
            return found
        parts = name.split(".")
        ends = (".".join(parts[at:]) for at in range(1, len(parts)))
        return next((self._by_name[end] for end in ends if end in self._by_name), [])

    def same(self, sample: bytes, dtype: DType, numel: int) -> list[Stored]:
        """Tensors with this sample, once they are cast to this dtype."""
        key = dtype.name, numel
        if key not in self._by_sample:
            index = self._by_sample[key] = {}
            for stored in self._by_numel.get(numel, ()):
                own = stored.entry.dtype
                data = (
                    samples.cast(stored.sample, own, dtype) if own is dtype or own.family == dtype.family == "float" else None
                )
                if data is not None:
                    index.setdefault(data, []).append(stored)
        return self._by_sample[key].get(sample, [])

    @cached_property
    def _by_numel(self) -> dict[int, list[Stored]]:
        found: dict[int, list[Stored]] = {}
        for stored in self.tensors:
            found.setdefault(stored.entry.numel, []).append(stored)
        return found

    def starts(self, row: tuple[int, ...], dtype: DType) -> dict[bytes, list[Stored]]:
        """Tensors with rows of this shape, by their first elements in this dtype."""
        if (row, dtype.name) not in self._by_start:
            index = self._by_start[row, dtype.name] = {}
            for stored in self.by_row.get(row, ()):
                own = stored.entry.dtype
                data = samples.cast(stored.sample[: samples.START * own.itemsize], own, dtype)
                if data and own.family == dtype.family:
                    index.setdefault(data, []).append(stored)
        return self._by_start[row, dtype.name]

    @cached_property
    def by_row(self) -> dict[tuple[int, ...], list[Stored]]:
        """Tensors by the shape of their rows."""
        found: dict[tuple[int, ...], list[Stored]] = {}
        for stored in self.tensors:
            if stored.entry.shape:
                found.setdefault(stored.entry.shape[1:], []).append(stored)
        return found


def _tensors(path: str, checkpoint: Checkpoint, reader: Reader) -> Iterator[Stored]:
    if checkpoint.decoded.byteorder == "big":
        checkpoint.root = casts.to_little_endian(checkpoint.root, "big")
    for tensor in checkpoint.tensors:
        if type(tensor.node) is Entry and tensor.node.dtype.itemsize:
            where, last = dotted(tensor.where), str(tensor.where[-1]) if tensor.where else ""
            yield Stored(path, where, unwrap(last if "." in last else where), tensor.node, reader)


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
        if not hasattr(os, "pread") or (fd := source.fd) < 0:
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
