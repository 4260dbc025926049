"""Write a distributed checkpoint through torch's own writer, so that whatever torch's reader takes, it takes this.

The planner is ours: it tells torch's `FileSystemWriter` what there is from the tree, and makes one tensor at a time.
Source: torch/distributed/checkpoint/planner.py, whose docstrings say which call comes when.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
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
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_tools.dcp_items import Item, Items
from ckpt_tools.numeric import torch_dtype
from ckpt_tools.plan import read_into
from ckpt_tools.tree import Entry
from ckpt_tools.writer import Progress


def save(found: Items, folder: Path, progress: Progress | None) -> None:
    """Write the items into a folder. Memory: the largest tensor.

    Ties cost nothing: a tied name's place is that of the name that it is tied to, which torch's reader simply reads.
    """
    planner = _Planner(found, progress)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is what is wanted
        save_with_torch({}, storage_writer=_Writer(folder, found.aliases), planner=planner, no_dist=True)


def _index(item: Item) -> MetadataIndex:
    return MetadataIndex(item.name) if item.entry is None else MetadataIndex(item.name, [0] * len(item.entry.shape), 0)


def _properties(entry: Entry) -> TensorProperties:
    return TensorProperties(dtype=torch_dtype(entry.dtype), requires_grad=entry.requires_grad)


def _chunk(entry: Entry) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), torch.Size(entry.shape))


class _Writer(FileSystemWriter):
    """torch's writer, which also enters the places of tied names."""

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(folder, sync_files=False)
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

    def __init__(self, found: Items, progress: Progress | None) -> None:
        self.found, self.progress = found, progress
        self.by_name = {item.name: item for item in found.items}
        self.done, self.total = 0, sum(item.nbytes for item in found.items if item.name not in found.aliases)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the items are known."""

    def create_local_plan(self) -> SavePlan:
        """One item for every value and for every tensor that is no other's twin."""
        written = [item for item in self.found.items if item.name not in self.found.aliases]
        return SavePlan([_write_item(item) for item in written])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The metadata of all names, tied ones too, with their paths in the nested dicts."""
        described = {item.name: _described(item) for item in self.found.items}
        paths = {item.name: item.path for item in self.found.items}
        return all_plans, Metadata(described, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As planned."""
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
