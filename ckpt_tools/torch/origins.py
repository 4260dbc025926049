"""Where a live tensor's numbers are from: the tensors of the files that were opened, found by name, and by a sample.

A sample is eight runs of sixteen elements, the first and the last among them; a tensor of up to 128 elements is taken whole.
Runs count elements row-major, so that a view in another shape has the same sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import torch

from ckpt_tools.edit import casts
from ckpt_tools.errors import CkptError, NotACheckpointError
from ckpt_tools.formats.base import PART_CONTAINERS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.content import read
from ckpt_tools.parts.families import partition
from ckpt_tools.parts.names import INDEX_SUFFIX
from ckpt_tools.parts.open import open_checkpoint, open_whole
from ckpt_tools.text import dotted, listed
from ckpt_tools.torch.building import Builder
from ckpt_tools.torch.copying import memory_of
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import by_position, part, row_major, torch_dtype

_RUNS, _LENGTH = 8, 16
_DCP = (".distcp", os.sep + ".metadata")
_MOST_OFFSETS, _MOST_PARTS, _SHOWN = 64, 1024, 4
_START = 4  # elements by which a part of a tensor is looked for


@lru_cache(maxsize=4096)
def _starts(numel: int) -> tuple[int, ...]:
    """Where the runs of a tensor of this many elements begin: the first, some between, the last."""
    last = numel - _LENGTH
    # the inner ones are off an even grid by the golden ratio, else they would all lie in one column of a matrix
    return (0, *(int(last * (number + number * 0.618 % 1) / _RUNS) for number in range(1, _RUNS - 1)), last)


@lru_cache(maxsize=4096)
def _places(numel: int) -> torch.Tensor:
    if numel <= _RUNS * _LENGTH:
        return torch.arange(numel, device="cpu")
    return (torch.tensor(_starts(numel), device="cpu")[:, None] + torch.arange(_LENGTH, device="cpu")).flatten()


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """The sample of a live tensor, in its dtype; one-byte types are taken as uint8: torch takes from no float8."""
    held = tensor.detach().resolve_conj().resolve_neg()
    held = held.view(torch.uint8) if held.itemsize == 1 else held
    return torch.take(held, _places(held.numel()).to(held.device)).cpu().view(tensor.dtype)


def as_bytes(values: torch.Tensor) -> bytes:
    return bytes(memory_of(values)) if values.numel() else b""


def cast(values: torch.Tensor, *dtypes: torch.dtype) -> bytes | None:
    """The bytes of elements in another dtype, as torch casts them; None where torch has no such cast."""
    try:
        for dtype in dtypes:
            values = values.to(dtype)
    except (RuntimeError, TypeError):
        return None
    return as_bytes(values)


# --- what the files hold


@dataclass(eq=False)
class Stored:
    """A tensor of a file: the file, its path in there, its own name (without wrappers), and what it is."""

    path: str
    where: str
    name: str
    entry: Entry
    builder: Builder

    @cached_property
    def sample(self) -> torch.Tensor:
        """Its sample; nothing else of it is read where it lies in a file as it is."""
        content, size, numel = row_major(self.entry), self.entry.dtype.itemsize, self.entry.numel
        if numel <= _RUNS * _LENGTH:
            data = read(content)
        else:
            content = by_position(content)
            runs = (part(content, start * size, _LENGTH * size) for start in _starts(numel))
            data = b"".join(map(read, runs))
        return torch.frombuffer(bytearray(data), dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype, device="cpu")

    @cached_property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.entry.dtype)

    @property
    def tensor(self) -> torch.Tensor:
        """All of it; mapped where that can be, and not kept."""
        try:
            return self.builder.tensor(self.entry).detach()
        finally:
            self.builder.made.clear()


class Library:
    def __init__(self) -> None:
        self.tensors: list[Stored] = []
        self.paths: list[str] = []
        self.notes: list[str] = []
        self._stack = ExitStack()
        self._indexes: dict[tuple[torch.dtype, int | None], dict[bytes, list[Stored]]] = {}

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
        return _grouped((end, stored) for stored in self.tensors for end in ends(stored.where))

    def named(self, name: str) -> list[Stored]:
        """Tensors of this name; else those whose path ends so; else those by whose path the name ends."""
        name = unwrap(name)
        if found := self._by_name.get(name) or self._by_end.get(name):
            return found
        return next((self._by_name[end] for end in ends(name) if end in self._by_name), [])

    def index(self, dtype: torch.dtype, most: int | None = None) -> dict[bytes, list[Stored]]:
        """By their samples, or the first elements of those, once they are cast to this dtype."""
        if (dtype, most) not in self._indexes:
            alike = ((cast(stored.sample[:most], dtype), stored) for stored in self.tensors if is_cast(stored.dtype, dtype))
            self._indexes[dtype, most] = _grouped((data, stored) for data, stored in alike if data is not None)
        return self._indexes[dtype, most]


def _tensors(path: str, checkpoint: Checkpoint) -> Iterator[Stored]:
    if checkpoint.byteorder == "big":
        checkpoint.root = casts.to_little_endian(checkpoint.root, "big")
    builder = Builder(checkpoint, "cpu", mapped=True)
    for tensor in checkpoint.tensors:
        if type(tensor.node) is Entry and tensor.node.dtype.in_torch and tensor.node.dtype.itemsize:
            where, last = dotted(tensor.where), str(tensor.where[-1]) if tensor.where else ""
            yield Stored(path, where, unwrap(last if "." in last else where), tensor.node, builder)


Key = TypeVar("Key")


def _grouped(pairs: Iterable[tuple[Key, Stored]]) -> dict[Key, list[Stored]]:
    found: dict[Key, list[Stored]] = {}
    for key, stored in pairs:
        found.setdefault(key, []).append(stored)
    return found


def ends(path: str) -> Iterator[str]:
    """Each end of a dotted path that begins at a dot, and the path itself, the longest first."""
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def is_cast(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether numbers of one dtype may be another's, cast: floats may."""
    return old is new or (old.is_floating_point and new.is_floating_point)


# --- which of them a live tensor is


class Live(NamedTuple):
    """A live tensor, under all its names."""

    names: Sequence[str]
    tensor: torch.Tensor
    sample: bytes

    @property
    def is_telling(self) -> bool:
        """Whether its sample could hardly be another tensor's too: four elements and more that are not all one number."""
        size = self.tensor.itemsize
        return len(self.sample) >= 4 * size and self.sample != self.sample[:size] * (len(self.sample) // size)


class Origin(NamedTuple):
    """Where a tensor's numbers are from: the file, the name in there, and what was done to them on the way."""

    path: str
    name: str
    how: str = ""


class Tracer:
    """Finds the origins of one model's tensors in the files' tensors."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._claimed: set[int] = set()

    def by_name(self, live: Live) -> Origin | None:
        """The tensor in a file under one of the live tensor's names, if its numbers are the same."""
        for stored in (stored for name in live.names for stored in self.library.named(name)):
            if (how := _how(stored, live)) is not None:
                self._claimed.add(id(stored))
                return Origin(stored.path, stored.where, how)
        return None

    def by_numbers(self, live: Live, *, written: bool) -> Origin | None:
        """A tensor under any other name with the same numbers; rows of one, or several one below the other."""
        alike = self.library.index(live.tensor.dtype).get(live.sample, ())
        found = [stored for stored in alike if stored.entry.numel == live.tensor.numel()]
        if not live.is_telling:
            found = [stored for stored in found if written and id(stored) not in self._claimed]
        if found:
            self._claimed.add(id(found[0]))
            return Origin(found[0].path, found[0].where, _how(found[0], live) or "")
        if not written or not live.tensor.dim() or not live.is_telling:
            return None
        return self._in_rows(live) or self._joined(live)

    def _in_rows(self, live: Live) -> Origin | None:
        """Rows of a larger tensor: a fused one that was split."""
        rows = len(live.tensor)
        for stored in self.library.tensors:
            over = stored.entry.shape[0] - rows if stored.entry.shape[1:] == live.tensor.shape[1:] and stored.entry.shape else 0
            if over <= 0 or not is_cast(stored.dtype, live.tensor.dtype):
                continue
            whole = stored.tensor
            for at in [*range(0, over, rows)[:_MOST_OFFSETS], over]:
                if cast(sample(whole[at : at + rows]), live.tensor.dtype) == live.sample:
                    return Origin(stored.path, stored.where, f"rows {at} to {at + rows - 1}")
        return None

    def _joined(self, live: Live) -> Origin | None:
        """Several tensors one behind the other: parts that were fused, experts that were stacked."""
        dtype, flat = live.tensor.dtype, live.tensor.detach().reshape(-1)
        starts, names, path = self.library.index(dtype, _START), list[str](), ""
        while len(flat) and len(names) < _MOST_PARTS:
            for stored in starts.get(as_bytes(flat[:_START].cpu()), ()):
                size = stored.entry.numel
                if 0 < size <= len(flat) and cast(stored.sample, dtype) == as_bytes(sample(flat[:size])):
                    path, flat = path or stored.path, flat[size:]
                    names.append(stored.where)
                    break
            else:
                return None
        return None if len(flat) else Origin(path, names[0], f"joined with {listed(names[1:], _SHOWN)}")


def _how(stored: Stored, live: Live) -> str | None:
    """What was done to a file's tensor to make the live one; the empty text where they are equal, None where they are not."""
    old, new, was, shape = stored.dtype, live.tensor.dtype, stored.entry.shape, tuple(live.tensor.shape)
    if stored.entry.numel != live.tensor.numel():
        return None
    if cast(stored.sample, new) == live.sample:
        moves = [f"{len(was)} -> {len(shape)} dimensions"] if was != shape else []
        return ", ".join([*moves, *([_named(old, new)] if old is not new else [])])
    for half in (torch.bfloat16, torch.float16):
        if old.is_floating_point and new.is_floating_point and cast(stored.sample, half, new) == live.sample:
            return _named(old, half, new)
    if len(shape) == 2 and was == shape[::-1] and cast(sample(stored.tensor.t()), new) == live.sample:
        return "transposed"
    return None


def _named(*dtypes: torch.dtype) -> str:
    return " -> ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
