"""The jobs on one training checkpoint: what ckpt does, what a user would do instead, and how to see that both did it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.benchmarks.rivals import CKPT, Job, ckpt, cp, python, script

MAKE = """
import sys, torch
path, tensors, gigabytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
values = torch.randn(max(1, int(gigabytes * 1e9 / tensors / 4 / 256)), 256)
kinds = ("attn", "mlp", "norm", "proj")
model = {f"module.layers.{i // 4}.{kinds[i % 4]}.weight": values.clone() for i in range(tensors)}
torch.save({"model": model, "epoch": 1}, path)
"""
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
from ckpt_tools.torch import load_into
tensors, gigabytes = int(sys.argv[2]), float(sys.argv[3])
rows = max(1, int(gigabytes * 1e9 / tensors / 4 / 256))
def layer(count):
    kinds = ("attn", "mlp", "norm", "proj")[:count]
    return torch.nn.ModuleDict({kind: torch.nn.Linear(256, rows, bias=False, device="meta") for kind in kinds})
layers = torch.nn.ModuleList(layer(min(4, tensors - at)) for at in range(0, tensors, 4))
model = torch.nn.ModuleDict({"layers": layers}).to_empty(device="cpu")
"""
LOAD_OURS = f"{LOAD}assert load_into(model, sys.argv[1])"
LOAD_TORCH = f"""{LOAD}
state = torch.load(sys.argv[1], mmap=True)["model"]
model.load_state_dict({{name.removeprefix("module."): tensor for name, tensor in state.items()}})
"""
IS_STRIPPED = """
import sys, torch
assert not any(name.startswith("module.") for name in torch.load(sys.argv[1], mmap=True)["model"])
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


def checkpoint(work: Path, tensors: int, gigabytes: float) -> Path:
    """A training checkpoint of one wrapped model with so many float32 matrices."""
    path = work / f"{tensors}.pth"
    python(MAKE, str(path), str(tensors), str(gigabytes))
    return path


def on(folder: Path, name: str, gigabytes: float) -> list[Job]:
    """All jobs on a checkpoint of so many tensors, wrapped names under `model`."""
    source, back = checkpoint(folder, int(name), gigabytes), folder / "source.safetensors"
    pth, other = folder / "ours.pth", folder / "theirs.pth"
    tensors, others = folder / "ours.safetensors", folder / "theirs.safetensors"
    select = [*CKPT, "convert", str(source), str(back), "--select", "model"]
    subprocess.run(select, check=True, stdout=subprocess.DEVNULL)
    strip = [
        ckpt("convert", source, pth, "--strip-module", output=pth), cp(source, other),
        script("torch mmap + save", STRIP.replace("MMAP", "True"), source, other),
        script("torch + save", STRIP.replace("MMAP", "False"), source, other),
    ]  # fmt: skip
    to_safetensors = [
        ckpt("convert", source, tensors, "--strip-module", "--select", "model", output=tensors), cp(source, other),
        script("torch + safetensors", TO_SAFETENSORS, source, others),
    ]  # fmt: skip
    from_safetensors = [
        ckpt("convert", back, pth, output=pth), cp(back, other), script("safetensors + torch", FROM_SAFETENSORS, back, other),
    ]  # fmt: skip
    cast = [
        ckpt("convert", source, pth, "--dtype", "bf16", output=pth), script("torch mmap + cast + save", TO_BF16, source, other),
    ]  # fmt: skip
    average = [ckpt("average", source, source, pth, output=pth), script("torch mmap + mean + save", AVERAGE, source, other)]
    load = [
        script(who, code, source, more=(name, str(gigabytes)))
        for who, code in (("ckpt", LOAD_OURS), ("torch mmap + load_state_dict", LOAD_TORCH))
    ]
    return [
        Job("inspect", [ckpt("inspect", source), script("torch mmap + print", INSPECT, source)]),
        Job("convert --strip-module", strip, IS_STRIPPED), Job("pth to safetensors", to_safetensors, IS_SAFETENSORS),
        Job("safetensors to pth", from_safetensors), Job("convert --dtype bf16", cast, IS_BF16), Job("average of two", average),
        Job("check", [ckpt("check", source), script("zlib.crc32 of the file", CRC, source)]), Job("load_into", load),
    ]  # fmt: skip
