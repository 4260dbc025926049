"""The tensors of the files that were opened, found by name and by a few elements, their samples.

Eight runs of sixteen elements are spread over a tensor, the first and the last elements among them; a tensor of up to 128
elements is taken whole. Runs count elements row-major, so that a view in another shape has the same sample.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch

from ckpt_tools.edit import casts
from ckpt_tools.errors import CkptError, NotACheckpointError
from ckpt_tools.formats.base import PART_CONTAINERS
from ckpt_tools.formats.folders import INDEX_SUFFIX
from ckpt_tools.formats.open import Checkpoint, open_checkpoint
from ckpt_tools.formats.parts.named import open_whole, partition
from ckpt_tools.io.content import Joined, Range, read
from ckpt_tools.text import dotted
from ckpt_tools.torch.copying import memory_of
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import part, row_major, torch_dtype

Runs: TypeAlias = tuple[tuple[int, int], ...]  # the first element, and how many

_RUNS, _LENGTH = 8, 16
_DCP = (".distcp", os.sep + ".metadata")


@lru_cache(maxsize=4096)
def runs_of(numel: int) -> Runs:
    """The runs of a tensor of this many elements."""
    if numel <= _RUNS * _LENGTH:
        return ((0, numel),) if numel else ()
    last = numel - _LENGTH
    # the inner ones are off an even grid by the golden ratio, else they would all lie in one column of a matrix
    inner = [int(last * (number + number * 0.618 % 1) / _RUNS) for number in range(1, _RUNS - 1)]
    return tuple((start, _LENGTH) for start in (0, *inner, last))


def cast(data: bytes, old: DType, new: DType) -> bytes | None:
    """Elements in another dtype, as torch casts them; None where torch has no such cast."""
    if old is new or not data:
        return data
    if not (old.in_torch and new.in_torch) or old.packed > 1 or new.packed > 1:
        return None
    try:
        made = torch.frombuffer(bytearray(data), dtype=torch_dtype(old)).to(torch_dtype(new))
    except (RuntimeError, TypeError):
        return None
    return bytes(memory_of(made))


@dataclass(slots=True, eq=False)
class Stored:
    """A tensor of a file: the file, its path in there, its own name (without wrappers), and what it is."""

    path: str
    where: str
    name: str
    entry: Entry
    _sample: bytes | None = field(default=None, repr=False)

    @property
    def sample(self) -> bytes:
        """Its sample, read once."""
        if self._sample is None:
            self._sample = self.at(runs_of(self.entry.numel))
        return self._sample

    def at(self, runs: Runs) -> bytes:
        """The bytes of these runs of it."""
        size, content = self.entry.dtype.itemsize, row_major(self.entry)
        places = [(start * size, length * size) for start, length in runs]
        if type(content) is Range:
            return b"".join([content.source.read(content.offset + start, length) for start, length in places])
        if isinstance(content, Joined):
            return b"".join([read(part(content, start, length)) for start, length in places])
        data = read(content)
        return b"".join([data[start : start + length] for start, length in places])


class Library:
    """Every plain tensor of the files, while they are open."""

    def __init__(self) -> None:
        self.tensors: list[Stored] = []
        self.paths: list[str] = []
        self.notes: list[str] = []
        self._stack = ExitStack()
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
            found = list(_tensors(path, checkpoint))
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
        return _grouped((stored.name, stored) for stored in self.tensors)

    @cached_property
    def _by_end(self) -> dict[str, list[Stored]]:
        """Each end of a path that begins at a dot."""
        return _grouped((end, stored) for stored in self.tensors for end in _ends(stored.where))

    def named(self, name: str) -> list[Stored]:
        """Tensors of this name; else those whose path ends so; else those by whose path the name ends."""
        if found := self._by_name.get(name):  # as most: these names have no wrappers
            return found
        name = unwrap(name)
        if found := self._by_name.get(name) or self._by_end.get(name):
            return found
        return next((self._by_name[end] for end in _ends(name) if end in self._by_name), [])

    @cached_property
    def _by_numel(self) -> dict[int, list[Stored]]:
        found: dict[int, list[Stored]] = defaultdict(list)
        for stored in self.tensors:
            found[stored.entry.numel].append(stored)
        return found

    def same(self, sample: bytes, dtype: DType, numel: int) -> list[Stored]:
        """Tensors with this sample, once they are cast to this dtype."""
        key = dtype.name, numel
        if key not in self._by_sample:
            index = self._by_sample[key] = {}
            for stored in self._by_numel.get(numel, ()):
                own = stored.entry.dtype
                if own is dtype or own.family == dtype.family == "float":
                    data = cast(stored.sample, own, dtype)
                    if data is not None:
                        index.setdefault(data, []).append(stored)
        return self._by_sample[key].get(sample, [])


def _grouped(rows: Iterable[tuple[str, Stored]]) -> dict[str, list[Stored]]:
    found: dict[str, list[Stored]] = {}
    for key, stored in rows:
        found.setdefault(key, []).append(stored)
    return found


def _ends(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[at:]) for at in range(len(parts)))


def _tensors(path: str, checkpoint: Checkpoint) -> Iterator[Stored]:
    if checkpoint.decoded.byteorder == "big":
        checkpoint.root = casts.to_little_endian(checkpoint.root, "big")
    for tensor in checkpoint.tensors:
        if type(tensor.node) is Entry and tensor.node.dtype.itemsize:
            where, last = dotted(tensor.where), str(tensor.where[-1]) if tensor.where else ""
            yield Stored(path, where, unwrap(last if "." in last else where), tensor.node)
