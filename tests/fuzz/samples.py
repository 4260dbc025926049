"""Good checkpoints to start from: the fixtures, and what torch and safetensors write here."""

from __future__ import annotations

import argparse
import pickle
import shutil
from collections import Counter, OrderedDict, deque
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support import containers

FIXTURES = Path(__file__).parents[2] / "fixtures"
_LARGEST = 20_000  # bytes; small files are mutated more often where it matters


def make(folder: Path) -> dict[str, bytes]:
    """Every sample by name, in an order that does not change."""
    _write(folder)
    paths = [path for path in (*sorted(FIXTURES.rglob("*")), *sorted(folder.iterdir())) if path.is_file()]
    found = {path.name: path.read_bytes() for path in paths if path.suffix not in (".py", ".json", ".md")}
    for path in folder.iterdir():
        path.unlink()
    return {name: data for name, data in found.items() if 0 < len(data) <= _LARGEST}


def _write(folder: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    tied = {"a.weight": tensor, "b.weight": tensor, "c.weight": tensor.t()}
    torch.save(tied, folder / "tied_views.pth")
    torch.save(tied, folder / "tied_views_legacy.pth", _use_new_zipfile_serialization=False)
    torch.save({"model": OrderedDict(tied), "epoch": 3, "best": 0.5, "names": ["a", ("b", None)]}, folder / "nested.pth")
    values = {"n": np.float32(2), "a": np.arange(3), "when": datetime(2024, 1, 1), "args": argparse.Namespace(lr=0.1), "c": 1j}
    more = {"set": {1, 2}, "d": deque([1]), "count": Counter("aab"), "path": Path("x"), "bytes": b"\xff\0", "long": 2**80}
    torch.save({"a.w": tensor, **values, **more}, folder / "objects.pth")
    torch.save({"a.w": tensor, **values, **more}, folder / "objects4.pth", pickle_protocol=4)
    torch.save(
        {"a.w": tensor, **values, **more},
        folder / "objects5_legacy.pth",
        pickle_protocol=5,
        _use_new_zipfile_serialization=False,
    )
    torch.save({"s": torch.eye(2).to_sparse(), "q": torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)}, folder / "odd.pth")
    torch.save({"m": torch.empty(2, device="meta"), "p": torch.nn.Parameter(tensor)}, folder / "meta.pth")
    torch.save(tensor, folder / "one.pth")
    torch.export.save(torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),)), folder / "program.pt2")
    torch.save({1: tensor, (1, 2): tensor, None: {True: tensor}}, folder / "keys.pth")
    save_file(
        {"a.w": tensor, "b": torch.zeros(3, dtype=torch.bfloat16), "e": torch.zeros(0)},
        folder / "small.safetensors",
        {"format": "pt"},
    )
    for name in ("torch-tar", "torchscript", "npz", "npy", "zip-bundle", "dcp-part", "pickled model"):
        containers.MAKERS[name](folder)
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    (folder / "plain.pkl").write_bytes(pickle.dumps({"a": np.arange(3.0), "b": [1, 2.0, "x"]}))
    np.savez(folder / "arrays.npz", a=np.arange(6.0), b=np.ones((2, 2), np.float16))
