"""Write a distributed checkpoint through torch's own writer, so that whatever torch's reader takes, it takes this.

A tree becomes items: flat names with their paths, as torch's `_traverse.py` makes them, tensors once each, values as archives.
The planner is ours: it tells torch's `FileSystemWriter` what there is, and makes one tensor at a time.
Source: torch/distributed/checkpoint/planner.py, whose docstrings say which call comes when.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError
from ckpt_tools.formats import zip_writer
from ckpt_tools.formats.contents import find_optimizers, is_tensor, parameter_numbers
from ckpt_tools.io.content import Content, read_into, to_bytes
from ckpt_tools.io.output import Output, Staging
from ckpt_tools.io.ranks import Ranks
from ckpt_tools.io.sources import write_all
from ckpt_tools.io.writer import Progress
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import PLAIN, Dict, Entry, Global, List, Node
from ckpt_tools.tree.visit import component
from ckpt_tools.values.numeric import row_major, torch_dtype, view_of

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One name: a tensor with its bytes row-major, or a value as a torch-zip."""

    name: str
    path: Path
    entry: Entry | None
    content: Content | None
    value: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor or of the value's archive."""
        return self.content.length if self.content is not None else len(self.value)


@dataclass(slots=True)
class Items:
    """The items in order; tied names -> the name whose chunks they share; how many keys became text."""

    items: list[Item] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    text_keys: int = 0
    states: int = 0
    attributes: bool = False


def collect(root: Node, file_bytes: int = 0) -> Items:
    """The items of a tree that was read from a file of this size."""
    if type(root) is not Dict:
        raise ConvertError(
            "A distributed checkpoint holds a mapping; this checkpoint is something else.", fix="Take one out of it: `select`."
        )
    found = Items()
    for where, optimizer in find_optimizers(root):
        numbers = {key for key, _ in optimizer.state.items if type(key) is int}
        if lost := numbers.difference(parameter_numbers(optimizer).values()):
            raise ConvertError(
                f"A distributed checkpoint has text for keys, and {dotted(where)!r} has states under whole numbers.",
                why=f"No group of the optimizer names {min(lost)}: nothing would find the state again.",
                fix="Write a .pth, which keeps the numbers.",
            )
        found.states += len(numbers)
    names: set[str] = set()
    first: dict[tuple[int, str], str] = {}
    for path, node in _leaves(root, found, limits.NODES.most(file_bytes) // limits.LISTED):
        name = dotted(path)
        if name in names:
            raise ConvertError(
                f"Two places of the checkpoint have the name {name!r} in a distributed one.", fix="Rename one: `rename`."
            )
        names.add(name)
        item = _item(name, path, node)
        if item.entry is not None and item.entry.nbytes:
            holder = first.setdefault(view_of(item.entry), name)
            if holder != name:
                found.aliases[name] = holder
        found.items.append(item)
    return found


def _item(name: str, path: Path, node: Node) -> Item:
    if type(node) is Entry:
        if not node.dtype.in_torch or node.dtype.packed > 1:
            raise ConvertError(f"{name!r} is {node.dtype.name}, which torch's writer does not take.")
        return Item(name, path, node, row_major(node))
    if is_tensor(node):
        raise ConvertError(
            f"{name!r} is a sparse, quantised, nested or meta tensor, which a distributed checkpoint cannot hold.",
            fix="Write a .pth, which holds any tensor.",
        )
    return Item(name, path, None, None, to_bytes(zip_writer.lay_out(node, trust_crc=False)))


def _leaves(root: Dict, found: Items, most: int) -> Iterator[tuple[Path, Node]]:
    """Tensors and values with their paths, depth first in order; a dict or list inside itself is refused."""
    holders = _holders(root)
    stack: list[tuple[Path, Iterator[tuple[str | int, Node]], int]] = [((), _children(root, found), id(root))]
    open_ids, seen = {id(root)}, {id(root)}
    while stack:
        path, children, holder = stack[-1]
        for key, node in children:
            where = (*path, key)
            if not (type(node) is Dict or (type(node) is List and id(node) in holders)) or not node.items:
                yield where, node
                continue
            if id(node) in open_ids:
                raise ConvertError(f"{dotted(where)!r} contains itself, which a distributed checkpoint cannot hold.")
            if id(node) in seen and (most := most - len(node.items)) < 0:
                what = "The checkpoint refers to its dicts too often: a distributed one holds what is in them each time."
                raise limits.NODES.error(what, fix="Write a .pth, which keeps them as they are.")
            open_ids.add(id(node))
            seen.add(id(node))
            stack.append((where, _children(node, found), id(node)))
            break
        else:
            open_ids.discard(holder)
            stack.pop()


def _children(node: Dict | List, found: Items) -> Iterator[tuple[str | int, Node]]:
    if type(node) is List:
        yield from enumerate(node.items)
        return
    found.attributes |= node.attributes is not None
    for key, value in node.items:
        found.text_keys += type(key) is not str
        yield _key_text(key), value


def _key_text(key: Node) -> str:
    """A key as torch's `_traverse.py` writes it: as Python does, where that is a short text that tells it apart."""
    parts = key if type(key) is tuple else (key,)
    if all(type(part) in _AS_TEXT and (type(part) is not int or part.bit_length() <= 128) for part in parts):
        return str(key)
    return str(component(key))


_AS_TEXT = PLAIN | {Global}


def _holders(root: Dict) -> set[int]:
    """The lists that hold a dict or a tensor, in lists at any depth: those are taken apart, others are values."""
    found: set[int] = set()
    lists: list[tuple[List, ...]] = []
    seen: set[int] = set()
    stack: list[tuple[Dict | List, tuple[List, ...]]] = [(root, ())]
    while stack:
        node, above = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        inside = (*above, node) if type(node) is List else ()
        values = node.items if type(node) is List else [value for _, value in node.items]
        if inside and any(type(value) is Dict or is_tensor(value) for value in values):
            lists.append(inside)
        stack.extend((value, inside) for value in values if type(value) is Dict or type(value) is List)
    for chain in lists:
        found.update(map(id, chain))
    return found


# --- torch's writer


_BUFFER = 1 << 20  # torch writes an archive in small pieces
# In PyTorch 2.4 only the older of the two can be told to write alone in a job of several processes.
_save = save_with_torch if "no_dist" in signature(save_with_torch).parameters else save_state_dict


def save(found: Items, staging: Staging, ranks: Ranks, progress: Progress | None) -> None:
    """Write the items into the files of a folder, each process its share; the first writes `.metadata` last.

    Memory: the largest tensor. Ties cost nothing: a tied name's place is that of the name that it is tied to, which torch's
    reader simply reads.
    """
    planner = _Planner(found, ranks, progress)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is what is wanted
        warnings.filterwarnings("ignore", "`save_state_dict` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # by torch 2.4's own writer
        _save({}, storage_writer=_Writer(staging, found.aliases), planner=planner, no_dist=ranks.world == 1)


def shares(found: Items, world: int) -> list[list[Item]]:
    """The items that each process writes: none that is tied to another, each to whoever has the fewest bytes, largest first."""
    written = [item for item in found.items if item.name not in found.aliases]
    loads = [0] * world
    owner: dict[str, int] = {}
    for item in sorted(written, key=lambda item: -item.nbytes):
        owner[item.name] = least = loads.index(min(loads))
        loads[least] += item.nbytes
    return [[item for item in written if owner[item.name] == rank] for rank in range(world)]


def _index(item: Item) -> MetadataIndex:
    return MetadataIndex(item.name) if item.entry is None else MetadataIndex(item.name, [0] * len(item.entry.shape), 0)


def _properties(entry: Entry) -> TensorProperties:
    return TensorProperties(dtype=torch_dtype(entry.dtype), requires_grad=entry.requires_grad)


def _chunk(entry: Entry) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), torch.Size(entry.shape))


class _Files(FileSystemBase):
    """The door through which torch's writer reaches the files of a folder that is being written."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file that is written; torch writes `.metadata` under another name, and the folder's own commit is what counts."""
        name = os.fspath(path).removesuffix(".tmp")
        with self.staging.output(name) as output, io.BufferedWriter(_Stream(output), _BUFFER) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def rename(self, *paths: Any, **more: Any) -> None:
        """Nothing: see `create_stream`. The folder is there, and what exists is never asked for."""

    mkdir = rm_file = rename

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Nothing is there before it is written, and nothing is written twice."""
        return False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Stream(io.RawIOBase):
    """An output as a file object; `tell` counts, since a pipe has no position."""

    def __init__(self, output: Output) -> None:
        self.output, self.position = output, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        write_all(self.output.fd, view)
        self.position += len(view)
        return len(view)

    def tell(self) -> int:
        return self.position


class _Writer(FileSystemWriter):
    """torch's writer, which also enters the places of tied names."""

    def __init__(self, staging: Staging, aliases: Mapping[str, str]) -> None:
        super().__init__(str(staging.target), sync_files=False)
        self.fs = _Files(staging)  # type: ignore[assignment]  # as torch's own FsspecWriter does
        self.path = str(staging.target)  # what .metadata says of its place
        self.aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index.fqn: result for rank in results for result in rank}
        for name, holder in self.aliases.items():
            result = places[holder]
            index = MetadataIndex(name, result.index.offset, result.index.index)
            results[0].append(WriteResult(index, result.size_in_bytes, result.storage_data))
        super().finish(metadata, results)


class _Planner(SavePlanner):
    """Plans from items in place of a state dict of tensors."""

    def __init__(self, found: Items, ranks: Ranks, progress: Progress | None) -> None:
        self.found, self.progress = found, progress
        self.own = shares(found, ranks.world)[ranks.rank]
        self.by_name = {item.name: item for item in self.own}
        self.done, self.total = 0, sum(item.nbytes for item in self.own)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the items are known."""

    def create_local_plan(self) -> SavePlan:
        """One item for every value and for every tensor of this process's share."""
        return SavePlan([_write_item(item) for item in self.own])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The metadata of all names, tied ones too, with their paths in the nested dicts."""
        described = {item.name: _described(item) for item in self.found.items}
        paths = {item.name: item.path for item in self.found.items}
        return all_plans, Metadata(described, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor or the value of an item, made now."""
        item = self.by_name[write_item.index.fqn]
        self.done += item.nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)
        return io.BytesIO(item.value) if item.entry is None else _tensor(item)


def _write_item(item: Item) -> WriteItem:
    if item.entry is None:
        return WriteItem(_index(item), WriteItemType.BYTE_IO)
    data = TensorWriteData(_chunk(item.entry), _properties(item.entry), torch.Size(item.entry.shape))
    return WriteItem(_index(item), WriteItemType.TENSOR, tensor_data=data)


def _described(item: Item) -> TensorStorageMetadata | BytesStorageMetadata:
    if item.entry is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(_properties(item.entry), torch.Size(item.entry.shape), [_chunk(item.entry)])


def _tensor(item: Item) -> torch.Tensor:
    assert item.entry is not None
    assert item.content is not None
    shape: Sequence[int] = item.entry.shape
    dtype = torch_dtype(item.entry.dtype)
    if not item.content.length:
        return torch.empty(shape, dtype=dtype)
    data = bytearray(item.content.length)
    read_into(item.content, memoryview(data))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)
