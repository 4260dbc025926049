"""The jobs: what ckpt does, what a user would do instead, and how to see that both did it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CKPT = [sys.executable, "-m", "ckpt_tools"]
INSPECT = """
import sys, torch
for name, tensor in torch.load(sys.argv[1], mmap=True)["model"].items():
    print(name, tuple(tensor.shape), tensor.dtype)
"""
STRIP = """
import sys, torch
checkpoint = torch.load(sys.argv[1], mmap=True)
checkpoint["model"] = {name.removeprefix("module."): tensor for name, tensor in checkpoint["model"].items()}
torch.save(checkpoint, sys.argv[2])
"""
TO_SAFETENSORS = """
import sys, torch, safetensors.torch
model = torch.load(sys.argv[1], mmap=True)["model"]
safetensors.torch.save_file({name.removeprefix("module."): tensor for name, tensor in model.items()}, sys.argv[2])
"""
TO_BF16 = """
import sys, torch
checkpoint = torch.load(sys.argv[1], mmap=True)
checkpoint["model"] = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint["model"].items()}
torch.save(checkpoint, sys.argv[2])
"""
MAKE = """
import sys, torch
path, tensors, gigabytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rows = max(1, int(gigabytes * 1e9 / tensors / 4 / 256))
values = torch.randn(rows, 256)
kinds = ("attn", "mlp", "norm", "proj")
model = {f"module.layers.{i // 4}.{kinds[i % 4]}.weight": values.clone() for i in range(tensors)}
torch.save({"model": model, "epoch": 1}, path)
"""
IS_STRIPPED = """
import sys, torch
model = torch.load(sys.argv[1], mmap=True)["model"]
assert next(iter(model)) == "layers.0.attn.weight"
assert all(torch.equal(model["layers.0.attn.weight"], tensor) for tensor in model.values())
"""
IS_SAFETENSORS = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    first = file.get_tensor("layers.0.attn.weight")
    assert all(file.get_tensor(name).equal(first) for name in file.keys())
"""
IS_BF16 = """
import sys, torch
model = torch.load(sys.argv[1], mmap=True)["model"]
assert {str(tensor.dtype) for tensor in model.values()} == {"torch.bfloat16"}
"""


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to do a job: a command, and the file that it writes, if any."""

    name: str
    command: list[str]
    output: Path | None = None

    def clean(self) -> None:
        """Remove what the command wrote."""
        if self.output is not None:
            self.output.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its rivals, ours first, and code that fails when what a rival wrote is wrong."""

    title: str
    rivals: list[Rival]
    code: str = ""

    def check(self, rival: Rival) -> None:
        """Check the output of a rival; a plain copy is taken as it is."""
        if self.code and rival.output is not None and rival.name != "cp":
            python(self.code, str(rival.output))


def make_checkpoint(path: Path, tensors: int, gigabytes: float) -> Path:
    """A training checkpoint of one wrapped model with so many float32 matrices."""
    python(MAKE, str(path), str(tensors), str(gigabytes))
    return path


def python(code: str, *arguments: str) -> None:
    """Run code in a process of its own: this one stays small, since a child's peak memory counts its parent's."""
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def make_jobs(source: Path) -> list[Job]:
    """All jobs on one checkpoint."""
    folder = source.parent
    pth, other = folder / "ours.pth", folder / "theirs.pth"
    tensors, others = folder / "ours.safetensors", folder / "theirs.safetensors"
    copied = Rival("cp", [str(shutil.which("cp")), str(source), str(other)], other)
    convert = [*CKPT, "convert", str(source)]
    back = _safetensors_copy(source, folder)
    return [
        Job("inspect", [Rival("ckpt", [*CKPT, "inspect", str(source)]), _script("torch mmap + print", INSPECT, source)]),
        Job(
            "convert --strip-module",
            [
                Rival("ckpt", [*convert, str(pth), "--strip-module"], pth),
                copied,
                _script("torch mmap + save", STRIP, source, other),
            ],
            IS_STRIPPED,
        ),
        Job(
            "pth to safetensors",
            [
                Rival("ckpt", [*convert, str(tensors), "--strip-module"], tensors),
                copied,
                _script("torch + safetensors", TO_SAFETENSORS, source, others),
            ],
            IS_SAFETENSORS,
        ),
        Job(
            "safetensors to pth",
            [
                Rival("ckpt", [*CKPT, "convert", str(back), str(pth)], pth),
                Rival("cp", [str(shutil.which("cp")), str(back), str(other)], other),
            ],
        ),
        Job(
            "convert --dtype bf16",
            [
                Rival("ckpt", [*convert, str(pth), "--dtype", "bf16"], pth),
                _script("torch mmap + cast + save", TO_BF16, source, other),
            ],
            IS_BF16,
        ),
    ]


def _safetensors_copy(source: Path, folder: Path) -> Path:
    target = folder / "source.safetensors"
    subprocess.run([*CKPT, "convert", str(source), str(target), "--overwrite"], check=True, stdout=subprocess.DEVNULL)
    return target


def _script(name: str, code: str, *paths: Path) -> Rival:
    return Rival(name, [sys.executable, "-c", code, *map(str, paths)], paths[1] if len(paths) > 1 else None)
