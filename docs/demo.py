"""The main job, on real input: train on two processes, strip the names, load them into the plain model, get the same accuracy.

    make demo            or   python -m docs.demo

Trains LeNet on scikit-learn's digits under DistributedDataParallel (two processes on gloo). Exits non-zero as soon as
anything differs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from train import data, models

EPOCHS = 6
SOURCE = f"run/epoch_{EPOCHS:03d}.weights.pth"


def main() -> None:
    """Runs the demo in a folder of its own, which it removes."""
    _, test = data.load("digits")
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as folder:
        os.chdir(folder)
        heading("1. Train on two processes, under DistributedDataParallel")
        train()
        heading("2. Load it into the plain model")
        show_refusal()
        heading("3. Strip the names")
        ckpt("convert", SOURCE, "plain.pth", "--strip-module")
        ckpt("convert", SOURCE, "plain.safetensors", "--strip-module")
        heading("4. Load it again")
        before = accuracy(nn.DataParallel(LeNet()), torch.load(SOURCE, weights_only=True), test)
        print(f"test accuracy of {SOURCE}, in the wrapped model: {before!r}")
        for path, load in (("plain.pth", torch.load), ("plain.safetensors", load_file)):
            after = accuracy(LeNet(), load(path), test)
            print(f"test accuracy of {path}, in the plain model: {after!r}")
            if before != after:
                sys.exit("they differ")
    print("\nThe same accuracy, to the last digit.")


class LeNet(models.LeNet):
    """The network as load code has it: plain, for images of one channel."""

    def __init__(self) -> None:
        super().__init__(1, data.CLASSES, 1.0)


def train() -> None:
    """Trains in two processes, into run/."""
    options = f"--model lenet --data digits --device cpu --epochs {EPOCHS} --batch-size 60 --weights wrapped --out run"
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 -m train --parallel ddp"
    run(f"-m {launcher} {options}", {"OMP_NUM_THREADS": "1"})


def show_refusal() -> None:
    """PyTorch's own words, shortened, for what everybody runs into."""
    try:
        LeNet().load_state_dict(torch.load(SOURCE, weights_only=True))
    except RuntimeError as error:
        print(*(f"{line.strip()[:100]} ..." for line in str(error).splitlines()[:3]), sep="\n")
    else:
        sys.exit(f"{SOURCE} loads into the plain model: it is not wrapped")


@torch.no_grad()
def accuracy(network: nn.Module, state_dict: dict[str, Tensor], test: TensorDataset) -> float:
    """The share of held-out images that the network with these weights gets right."""
    network.load_state_dict(state_dict)
    network.eval()
    images, labels = test.tensors
    return float((network(data.fitted(images, (1, 32, 32))).argmax(1) == labels).double().mean())


def heading(text: str) -> None:
    """A line that separates the steps."""
    print(f"\n=== {text} " + "=" * (90 - len(text)), flush=True)


def ckpt(*arguments: str) -> None:
    """Runs the command line as a user would, and shows what was typed."""
    print(f"$ ckpt {' '.join(arguments)}", flush=True)
    run(f"-m ckpt_tools {' '.join(arguments)}", {"COLUMNS": "100"})


def run(command: str, extra: dict[str, str]) -> None:
    """Runs Python with the repository on its path; ends the demo when it fails."""
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    code = subprocess.run([sys.executable, *command.split()], env={**os.environ, "PYTHONPATH": path, **extra}).returncode
    if code:
        sys.exit(f"python {command} failed with exit code {code}")


if __name__ == "__main__":
    main()
