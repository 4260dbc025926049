"""The checkpoints that the jobs work on, made by torch itself (a sparse one by our layout: nobody has 200 GB to spare)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.rivals import CKPT, python

TITLES = {
    "60": "{gigabytes:g} GB in 60 tensors",
    "20000": "{gigabytes:g} GB in 20,000 tensors",
    "cnn": "The articles' full `cnn` after DataParallel, 3.2 GB with its optimizer",
    "sparse": "200 GB in 60 tensors, sparse",
    "sharded": "8 shards of 1 GB",
    "files": "10,000 small checkpoints",
}
MAKE = """
import sys, torch
path, tensors, gigabytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rows = max(1, int(gigabytes * 1e9 / tensors / 4 / 256))
values = torch.randn(rows, 256)
kinds = ("attn", "mlp", "norm", "proj")
model = {f"module.layers.{i // 4}.{kinds[i % 4]}.weight": values.clone() for i in range(tensors)}
torch.save({"model": model, "epoch": 1}, path)
"""
MAKE_FILES = """
import sys, torch
model = {f"module.layer.{i}.weight": torch.randn(8, 8) for i in range(20)}
for index in range(int(sys.argv[2])):
    torch.save({"model": model, "epoch": index}, f"{sys.argv[1]}/{index:05}.pth")
"""


def checkpoint(work: Path, tensors: int, gigabytes: float) -> Path:
    """A training checkpoint of one wrapped model with so many float32 matrices."""
    path = work / f"{tensors}.pth"
    python(MAKE, str(path), str(tensors), str(gigabytes))
    return path


def cnn(work: Path) -> Path:
    """What the training core saves for the CIFAR-10 article's network at full width, names wrapped."""
    arguments = ["--model", "cnn", "--epochs", "0", "--data", "synthetic", "--shape", "3x32x32", "--parallel", "dp"]
    command = [sys.executable, "-m", "train", *arguments, "--save", "wrapped", "--out", str(work / "run")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (path,) = (work / "run").rglob("*.pth")
    return path


def sparse(work: Path) -> Path:
    """200 GB that take no room."""
    path = work / "sparse.pth"
    subprocess.run([sys.executable, "-m", "benchmarks.sparse", str(path), "60", "200"], check=True)
    return path


def shards(work: Path, gigabytes: float) -> Path:
    """A folder of eight shards with their index."""
    one = checkpoint(work, 240, gigabytes)
    folder = work / "shards"
    size = f"{gigabytes / 8 * 1.001:.3f}GB"
    command = [*CKPT, "convert", str(one), str(folder), "--shard-size", size, "--select", "model"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    one.unlink()
    return folder


def many_files(work: Path, count: int = 10_000) -> Path:
    """A folder of small checkpoints."""
    folder = work / "files"
    folder.mkdir()
    python(MAKE_FILES, str(folder), str(count))
    return folder
