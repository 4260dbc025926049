"""Large files that someone made in earnest: none of them meets a limit that is there for those made to harm.

They are a fifth as large as the limits allow, and so is the limit here.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata

import ckpt_tools
from ckpt_tools import limits

Made = tuple[Path, int]


def log(folder: Path) -> Made:
    """A hundred thousand small dicts beside the weights."""
    rows = [{"step": step, "loss": step / 7, "lr": 0.1} for step in range(100_000)]
    torch.save({"model": {"w": torch.ones(2)}, "log": rows}, folder / "log.pth")
    return folder / "log.pth", 1


def replay_buffer(folder: Path) -> Made:
    """4,000 transitions of a reinforcement learner, with arrays."""
    state = np.zeros(4, "f4")
    rows = [(state + step, step % 4, 0.5, state, False) for step in range(4_000)]
    torch.save({"model": {"w": torch.ones(2)}, "buffer": rows}, folder / "buffer.pth")
    return folder / "buffer.pth", 1


def numbers(folder: Path) -> Made:
    """A million whole numbers in a list, and a text of 6 MB."""
    torch.save({"w": torch.ones(2), "order": list(range(1_000_000)), "text": "a b " * 1_500_000}, folder / "numbers.pth")
    return folder / "numbers.pth", 1


def many_tensors(folder: Path) -> Made:
    """60,000 tensors, views of one storage."""
    whole = torch.arange(60_000.0)
    torch.save({f"layers.{row}.weight": whole[row : row + 1] for row in range(60_000)}, folder / "many.pth")
    return folder / "many.pth", 60_000


def index(folder: Path) -> Made:
    """An index of 100,000 names in two shards."""
    names = [f"layers.{row}.experts.{row % 64}.weight" for row in range(100_000)]
    weights: dict[str, str] = {}
    for number, part in enumerate((names[:50_000], names[50_000:]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        rows = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * row, 4 * row + 4]} for row, name in enumerate(part)}
        header = json.dumps(rows).encode()
        (folder / shard).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * len(part)))
        weights |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder / "model.safetensors.index.json", 100_000


def distributed(folder: Path, ranks: int, tensors: int) -> Made:
    """A `.metadata` of one chunk for each rank and tensor."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    properties = metadata.TensorProperties(dtype=torch.float32)
    rows: dict[str, Any] = {}
    places = {}
    for number in range(tensors):
        name = f"model.layers.{number}.weight"
        chunks = [metadata.ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, 2])) for rank in range(ranks)]
        rows[name] = metadata.TensorStorageMetadata(properties, torch.Size([ranks, 2]), chunks)
        for rank in range(ranks):
            key = metadata.MetadataIndex(name, torch.Size([rank, 0]), rank)
            places[key] = _StorageInfo(f"__{rank}_0.distcp", number * 8, 8)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(rows, storage_data=places)))
    for rank in range(ranks):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes(8 * tensors))
    return folder, tensors


MADE: list[Callable[[Path], Made]] = [
    log, replay_buffer, numbers, lambda folder: distributed(folder, 110, 20), many_tensors, index,
]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1, 2, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 5))])
def test_it_is_opened(number: int, tmp_path: Path) -> None:
    """Its tensors are listed."""
    path, count = MADE[number](tmp_path)
    with limits.raised(nodes=200_000):
        assert len(ckpt_tools.inspect(path).tensors) == count
