"""Large files that someone made in earnest: none of them meets a limit that is there for those made to harm."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckpt_tools

Made = tuple[Path, int]


def log(folder: Path) -> Made:
    """Half a million small dicts beside the weights."""
    rows = [{"step": step, "loss": step / 7, "lr": 0.1} for step in range(500_000)]
    torch.save({"model": {"w": torch.ones(2)}, "log": rows}, folder / "log.pth")
    return folder / "log.pth", 1


def replay_buffer(folder: Path) -> Made:
    """20,000 transitions of a reinforcement learner, with arrays."""
    state = np.zeros(4, "f4")
    rows = [(state + step, step % 4, 0.5, state, False) for step in range(20_000)]
    torch.save({"model": {"w": torch.ones(2)}, "buffer": rows}, folder / "buffer.pth")
    return folder / "buffer.pth", 1


def numbers(folder: Path) -> Made:
    """Five million whole numbers in a list, and a text of 30 MB."""
    torch.save({"w": torch.ones(2), "order": list(range(5_000_000)), "text": "a b " * 7_500_000}, folder / "numbers.pth")
    return folder / "numbers.pth", 1


def many_tensors(folder: Path) -> Made:
    """300,000 tensors, views of one storage."""
    whole = torch.arange(300_000.0)
    torch.save({f"layers.{row}.weight": whole[row : row + 1] for row in range(300_000)}, folder / "many.pth")
    return folder / "many.pth", 300_000


def index(folder: Path) -> Made:
    """An index of 500,000 names in two shards."""
    names = [f"layers.{row}.experts.{row % 64}.weight" for row in range(500_000)]
    weights: dict[str, str] = {}
    for number, part in enumerate((names[:250_000], names[250_000:]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        rows = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * row, 4 * row + 4]} for row, name in enumerate(part)}
        header = json.dumps(rows).encode()
        (folder / shard).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * len(part)))
        weights |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder / "model.safetensors.index.json", 500_000


def distributed(folder: Path, ranks: int, tensors: int) -> Made:
    """A `.metadata` of one chunk for each rank and tensor."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    properties = TensorProperties(dtype=torch.float32)
    rows: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for number in range(tensors):
        name = f"model.layers.{number}.weight"
        chunks = [ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, 2])) for rank in range(ranks)]
        rows[name] = TensorStorageMetadata(properties, torch.Size([ranks, 2]), chunks)
        for rank in range(ranks):
            key = MetadataIndex(name, torch.Size([rank, 0]), rank)
            places[key] = _StorageInfo(f"__{rank}_0.distcp", number * 8, 8)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(rows, storage_data=places)))
    for rank in range(ranks):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes(8 * tensors))
    return folder, tensors


QUICK: list[Callable[[Path], Made]] = [log, replay_buffer, numbers, lambda folder: distributed(folder, 110, 100)]
SLOW: list[Callable[[Path], Made]] = [many_tensors, index, lambda folder: distributed(folder, 1000, 100)]


@pytest.mark.parametrize(
    "number", [*range(len(QUICK)), *(pytest.param(-1 - n, marks=pytest.mark.slow) for n in range(len(SLOW)))]
)
def test_it_is_opened(number: int, tmp_path: Path) -> None:
    """Its tensors are listed."""
    path, count = (QUICK + SLOW)[number](tmp_path)
    assert len(ckpt_tools.inspect(path).tensors) == count
