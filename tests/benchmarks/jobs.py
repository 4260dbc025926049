"""The jobs: what ckpt does, what a user would do instead, and how to see that both did it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import ckpt_tools
from tests.benchmarks.rivals import CKPT, Job, Rival, ckpt, cp, installed, script

INSPECT = """
import sys, torch
checkpoint = torch.load(sys.argv[1], mmap=True)
for name, tensor in checkpoint.get("model", checkpoint).items():
    print(name, tuple(tensor.shape), tensor.dtype)
"""
STRIP = """
import sys, torch
checkpoint = torch.load(sys.argv[1], mmap=MMAP)
checkpoint["model"] = {name.removeprefix("module."): tensor for name, tensor in checkpoint["model"].items()}
torch.save(checkpoint, sys.argv[2])
"""
STRIP_IN_PLACE = """
import os, sys, torch
checkpoint = torch.load(sys.argv[1], mmap=True)
checkpoint["model"] = {name.removeprefix("module."): tensor for name, tensor in checkpoint["model"].items()}
torch.save(checkpoint, sys.argv[1] + ".new")
os.replace(sys.argv[1] + ".new", sys.argv[1])
"""
TO_SAFETENSORS = """
import sys, torch, safetensors.torch
model = torch.load(sys.argv[1], mmap=True)["model"]
safetensors.torch.save_file({name.removeprefix("module."): tensor for name, tensor in model.items()}, sys.argv[2])
"""
FROM_SAFETENSORS = """
import sys, torch, safetensors.torch
torch.save(safetensors.torch.load_file(sys.argv[1]), sys.argv[2])
"""
TO_BF16 = """
import sys, torch
checkpoint = torch.load(sys.argv[1], mmap=True)
checkpoint["model"] = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint["model"].items()}
torch.save(checkpoint, sys.argv[2])
"""
AVERAGE = """
import sys, torch
one, two = (torch.load(sys.argv[1], mmap=True)["model"] for _ in range(2))
torch.save({"model": {name: (tensor + two[name]) / 2 for name, tensor in one.items()}}, sys.argv[2])
"""
CRC = """
import sys, zlib
with open(sys.argv[1], "rb", buffering=0) as file:
    crc, buffer = 0, bytearray(1 << 22)
    while count := file.readinto(buffer):
        crc = zlib.crc32(memoryview(buffer)[:count], crc)
"""
LOAD = """
import sys, torch
from ckpt_tools.torch import load_into, load_state_dict
class Empty(torch.nn.Module):
    pass
def module(names):
    root = torch.nn.Module()
    for name, shape in names:
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, Empty())
            at = at._modules[part]
        at.register_parameter(leaf, torch.nn.Parameter(torch.empty(shape)))
    return root
tensors, rows = int(sys.argv[2]), int(sys.argv[3])
kinds = ("attn", "mlp", "norm", "proj")
model = module([(f"layers.{i // 4}.{kinds[i % 4]}.weight", (rows, 256)) for i in range(tensors)])
"""
LOAD_INTO = LOAD + "assert load_into(model, sys.argv[1])"
LOAD_TORCH = (
    LOAD
    + """
state = torch.load(sys.argv[1], mmap=True)["model"]
model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
"""
)
LOAD_OURS = "import sys; from ckpt_tools.torch import load_state_dict; load_state_dict(sys.argv[1])"
LOAD_THEIRS = "import sys, torch; torch.load(sys.argv[1], mmap=True, weights_only=True)"
INSPECT_FILES = """
import pathlib, sys, torch
for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.pth")):
    model = torch.load(path, mmap=True, weights_only=True)["model"]
    print(path, [(name, tuple(tensor.shape)) for name, tensor in model.items()])
"""
SHARDS = """
import sys, safetensors.torch, huggingface_hub
from pathlib import Path
model = {}
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    model |= safetensors.torch.load_file(path)
Path(sys.argv[2]).mkdir()
huggingface_hub.save_torch_state_dict(model, sys.argv[2], max_shard_size="2.8GB")
"""
CLEAN = """
import sys, torch
from timm.models import clean_state_dict
torch.save(clean_state_dict(torch.load(sys.argv[1], mmap=True)["model"]), sys.argv[2])
"""
SCAN = "import sys; from picklescan.scanner import scan_file_path; scan_file_path(sys.argv[1])"

ZERO_TO_FP32 = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True)
"""
MERGE = "from mergekit.scripts.merge_raw_pytorch import main; main()"

IS_STRIPPED = """
import sys, torch
checkpoint = torch.load(sys.argv[1], mmap=True)
model = checkpoint.get("model", checkpoint)
assert not any(name.startswith("module.") for name in model)
"""
IS_SAFETENSORS = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    assert not any(name.startswith("module.") for name in file.keys())
    assert all(file.get_tensor(name).numel() for name in list(file.keys())[:50])
"""
IS_BF16 = """
import sys, torch
model = torch.load(sys.argv[1], mmap=True)["model"]
assert {str(tensor.dtype) for tensor in model.values()} == {"torch.bfloat16"}
"""


def on_checkpoint(source: Path) -> list[Job]:
    """All jobs on one training checkpoint with wrapped names under `model`."""
    folder = source.parent
    pth, other = folder / "ours.pth", folder / "theirs.pth"
    tensors, others = folder / "ours.safetensors", folder / "theirs.safetensors"
    back = _converted(source, folder / "source.safetensors", "--select", "model")
    strip = [
        ckpt("convert", source, pth, "--strip-module", output=pth),
        cp(source, other),
        script("torch mmap + save", STRIP.replace("MMAP", "True"), source, other),
        script("torch + save", STRIP.replace("MMAP", "False"), source, other),
        *installed("timm", script("timm's clean_state_dict", CLEAN, source, other)),
    ]
    to_safetensors = [
        ckpt("convert", source, tensors, "--strip-module", "--select", "model", output=tensors),
        cp(source, other),
        script("torch + safetensors", TO_SAFETENSORS, source, others),
    ]
    from_safetensors = [
        ckpt("convert", back, pth, output=pth),
        cp(back, other),
        script("safetensors + torch", FROM_SAFETENSORS, back, other),
    ]
    cast = [
        ckpt("convert", source, pth, "--dtype", "bf16", output=pth),
        script("torch mmap + cast + save", TO_BF16, source, other),
    ]
    average = [ckpt("average", source, source, pth, output=pth), script("torch mmap + mean + save", AVERAGE, source, other)]
    twin = folder / "twin.safetensors"
    os.link(back, twin)
    scan = installed("picklescan", script("picklescan", SCAN, source))
    return [
        Job("inspect", [ckpt("inspect", source), script("torch mmap + print", INSPECT, source), *scan]),
        Job("convert --strip-module", strip, IS_STRIPPED),
        Job("pth to safetensors", to_safetensors, IS_SAFETENSORS),
        Job("safetensors to pth", from_safetensors),
        Job("convert --dtype bf16", cast, IS_BF16),
        Job("average of two", average),
        Job(
            "average of two safetensors",
            [ckpt("average", back, twin, tensors, output=tensors), *installed("mergekit", _mergekit(back, twin))],
        ),
        Job("check", [ckpt("check", source), script("zlib.crc32 of the file", CRC, source)]),
        *_loading(source),
        Job("convert --in-place", [_in_place(source), _torch_in_place(source)]),
    ]


def _loading(source: Path) -> list[Job]:
    if not source.stem.isdecimal():
        return []
    rows = str(ckpt_tools.inspect(source).tensors[0]["shape"][0])
    ours, theirs = script("ckpt", LOAD_INTO, source), script("torch mmap + load_state_dict", LOAD_TORCH, source)
    for rival in (ours, theirs):
        rival.command.extend([source.stem, rows])
    return [
        Job("load_into", [Rival(row.name, row.command) for row in (ours, theirs)]),
        Job("load_state_dict", [script("ckpt", LOAD_OURS, source), script("torch mmap", LOAD_THEIRS, source)]),
    ]


def _mergekit(one: Path, two: Path) -> Rival:
    """mergekit's linear merge of raw files, with equal weights."""
    config = one.parent / "merge.yml"
    models = "".join(f"  - {{model: {path}, parameters: {{weight: 0.5}}}}\n" for path in (one, two))
    config.write_text(f"merge_method: linear\nmodels:\n{models}")
    return script("mergekit's linear merge", MERGE, config, one.parent / "merged")


def _in_place(source: Path) -> Rival:
    edit = [*CKPT, "convert", str(source), "--in-place"]
    return Rival("ckpt", [*edit, "--map-location", "cpu"], before=[*edit, "--map-location", "cuda:0"])


def _torch_in_place(source: Path) -> Rival:
    return script("torch mmap + save + rename", STRIP_IN_PLACE, source)


def on_sparse(source: Path) -> list[Job]:
    """What depends on the names alone."""
    return [Job("inspect", [ckpt("inspect", source)]), Job("convert --in-place", [_in_place(source)])]


def on_shards(source: Path) -> list[Job]:
    """Eight shards in, three out; and a check of all."""
    ours, copied, others = (source.parent / name for name in ("ours", "copy", "theirs"))
    return [
        Job(
            "8 shards to 3",
            [
                ckpt("convert", source, ours, "--shard-size", "2.8GB", output=ours),
                cp(source, copied),
                *installed("huggingface_hub", script("safetensors + huggingface_hub", SHARDS, source, others)),
            ],
        ),
        Job("check", [ckpt("check", source)]),
    ]


def on_ranks(source: Path) -> list[Job]:
    """The files of many ranks become one."""
    folder = source.parent
    tensors, everything, copied, others = (folder / name for name in ("ours.safetensors", "ours.pth", "copy", "theirs"))
    return [
        Job("inspect", [ckpt("inspect", source)]),
        Job(
            "ZeRO-3 to safetensors",
            [
                ckpt("convert", source, tensors, output=tensors),
                cp(source, copied),
                *installed("deepspeed", script("DeepSpeed's zero_to_fp32", ZERO_TO_FP32, source, others)),
            ],
        ),
        Job(
            "ZeRO-3 with its optimizer to pth",
            [ckpt("convert", source, everything, "--select", "training", output=everything), cp(source, copied)],
        ),
    ]


def on_sparse_ranks(source: Path) -> list[Job]:
    """What depends on the names and on the number of ranks alone."""
    one = source.parent / "one.safetensors"
    return [
        Job("inspect", [ckpt("inspect", source)]),
        Job("convert one tensor", [ckpt("convert", source, one, "--keep", "norm.weight", output=one)]),
    ]


def on_many_files(source: Path) -> list[Job]:
    """A folder of ten thousand files: the seconds are those of all."""
    several = Rival("ckpt, several processes", ckpt("inspect", "--json", source, "--jobs", "4").command)
    return [
        Job(
            "inspect --json",
            [
                several,
                Rival("ckpt, one process", ckpt("inspect", "--json", source, "--jobs", "1").command),
                script("torch mmap", INSPECT_FILES, source),
            ],
        ),
        Job("check", [ckpt("check", "--json", source)]),
    ]


def _converted(source: Path, target: Path, *options: str) -> Path:
    subprocess.run([*CKPT, "convert", str(source), str(target), *options], check=True, stdout=subprocess.DEVNULL)
    return target
