"""The checkpoints that the jobs work on, made by torch itself (a sparse one by our layout: nobody has 200 GB to spare)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks.rivals import CKPT, python

TITLES = {
    "60": "{gigabytes:g} GB in 60 tensors",
    "20000": "{gigabytes:g} GB in 20,000 tensors",
    "cnn": "The articles' full `cnn` after DataParallel, 3.2 GB with its optimizer",
    "sparse": "200 GB in 60 tensors, sparse",
    "sharded": "8 shards of 1 GB",
    "ranks": "ZeRO-3 of {ranks} ranks, {gigabytes:g} GB",
    "sparse-ranks": "ZeRO-3 of 64 ranks, 100 GB, sparse",
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


# What DeepSpeed's engine writes under stage 3 (as the genuine folder in fixtures/deepspeed), for a model of 291 tensors as a
# Llama has them. With `skip_data` torch leaves holes for the bytes, and the rows of a rank are memory that nobody touches.
MAKE_RANKS = """
import sys, torch
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
tag, world, gigabytes, sparse = Path(sys.argv[1], "global_step2"), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "sparse"
def shapes(width):
    inner = width * 43 // 16
    found = [("embed.weight", (32000, width)), ("norm.weight", (width,)), ("head.weight", (32000, width))]
    for layer in range(32):
        found += [(f"layers.{layer}.attn.{name}.weight", (width, width)) for name in "qkvo"]
        found += [(f"layers.{layer}.mlp.{name}.weight", (inner, width)) for name in ("gate", "up")]
        found += [(f"layers.{layer}.mlp.down.weight", (width, inner))]
        found += [(f"layers.{layer}.norm{number}.weight", (width,)) for number in (1, 2)]
    return OrderedDict((name, torch.Size(shape)) for name, shape in found)
width = 64
while sum(shape.numel() for shape in shapes(width + 64).values()) * 12 < gigabytes * 1e9:
    width += 64
model = shapes(width)
part = sum(-(-shape.numel() // world) for shape in model.values())
module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in model)
names = {
    "module": module, "buffer_names": [], "optimizer": None, "param_shapes": [model], "frozen_param_shapes": None,
    "frozen_param_fragments": None, "shared_params": {}, "lr_scheduler": None, "global_steps": 2, "skipped_steps": 0,
    "dp_world_size": world, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8",
}
tag.mkdir(parents=True)
(tag.parent / "latest").write_text(tag.name)
for rank in range(world):
    rows = [torch.empty(part) if sparse else torch.full((part,), float(rank)) for _ in range(3)]
    adam = {"state": {0: {"step": 2, "exp_avg": rows[1], "exp_avg_sq": rows[2]}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    state = {
        "zero_stage": 3, "ds_version": "0.19.8", "overflow": False, "partition_count": world, "fp32_flat_groups": [rows[0]],
        "optimizer_state_dict": adam,
    }
    with torch.serialization.skip_data() if sparse else nullcontext():
        torch.save(
            {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
            tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    torch.save(names, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
"""


def checkpoint(work: Path, tensors: int, gigabytes: float) -> Path:
    """A training checkpoint of one wrapped model with so many float32 matrices."""
    path = work / f"{tensors}.pth"
    python(MAKE, str(path), str(tensors), str(gigabytes))
    return path


def cnn(work: Path) -> Path:
    """What the training core saves for the CIFAR-10 article's network at full width, names wrapped."""
    arguments = ["--model", "cnn", "--epochs", "0", "--data", "synthetic", "--shape", "3x32x32", "--parallel", "dp"]
    command = [sys.executable, "-m", "train", *arguments, "--save", "wrapped", "--weights", "none", "--out", str(work / "run")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (path,) = (work / "run").rglob("*.pth")
    return path


def sparse(work: Path) -> Path:
    """200 GB that take no room."""
    path = work / "sparse.pth"
    subprocess.run([sys.executable, "-m", "tests.benchmarks.sparse", str(path), "60", "200"], check=True)
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


def ranks(work: Path, count: int, gigabytes: float, *, holes: bool = False) -> Path:
    """The folder that DeepSpeed leaves behind after training with ZeRO-3 on so many ranks."""
    folder = work / "ranks"
    python(MAKE_RANKS, str(folder), str(count), str(gigabytes), "sparse" if holes else "")
    return folder


def many_files(work: Path, count: int = 10_000) -> Path:
    """A folder of small checkpoints."""
    folder = work / "files"
    folder.mkdir()
    python(MAKE_FILES, str(folder), str(count))
    return folder
