"""The main job, on real input: train in three modes, look at each file, mend it, load it, and get the same answers.

    make demo            or   python -m docs.demo

Trains LeNet on scikit-learn's digits as one process, under nn.DataParallel and under DistributedDataParallel (two
processes on gloo), each saved as its wrapper names it. Exits non-zero as soon as anything differs.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from train import data, models

EPOCHS = 6
MODES = ("single", "dp", "ddp")


def main() -> None:
    """Runs the demo in a folder of its own, which it removes."""
    test, network = the_task()
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as folder:
        os.chdir(folder)
        for mode in MODES:
            heading(f"{mode}: train, save")
            train(mode)
            source = f"{mode}/epoch_{EPOCHS:03d}.pth"
            ckpt("inspect", source)
            if mode != "single":
                show_refusal(source, network())
            before = accuracy(wrapped(network(), mode), torch.load(source, weights_only=True)["model"], test)
            compare(before, accuracy(network(), convert(source, f"{mode}.pth"), test))
            compare(before, accuracy(network(), convert(source, f"{mode}.safetensors"), test))
    print("\nEvery file gives the same accuracy before and after.")


def the_task() -> tuple[data.Images, type["LeNet"]]:
    """The held-out images, fitted to the network; and the network, untrained."""
    _, test = data.load("digits")
    test.fit = models.input_shape("lenet", test.fit)
    return test, LeNet


class LeNet(models.LeNet):
    """The network as load code has it: plain, for images of one channel."""

    def __init__(self) -> None:
        super().__init__(1, data.CLASSES, 1.0)


def train(mode: str) -> None:
    """Trains in a process of its own (two for DDP) into the folder named after the mode."""
    options = f"--model lenet --data digits --device cpu --epochs {EPOCHS} --batch-size 60 --save wrapped --out {mode}".split()
    python = [sys.executable, "-m"]
    launcher = [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if mode == "ddp" else python
    run([*launcher, "train", "--parallel", mode, *options], {"OMP_NUM_THREADS": "1"})


def convert(source: str, target: str) -> dict[str, Tensor]:
    """`ckpt convert`, and what a reader without ckpt_tools then loads: torch itself, or safetensors."""
    ckpt("convert", source, target, "--strip-module", "--select", "model")
    if target.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(target)
    loaded: dict[str, Tensor] = torch.load(target, weights_only=True)
    return loaded


def wrapped(network: nn.Module, mode: str) -> nn.Module:
    """The network with the names that training in this mode gives it."""
    return network if mode == "single" else nn.DataParallel(network)


def show_refusal(source: str, network: nn.Module) -> None:
    """PyTorch's own words, shortened, for what everybody runs into."""
    try:
        network.load_state_dict(torch.load(source, weights_only=True)["model"])
    except RuntimeError as error:
        lines = str(error).splitlines()
        print("\nThe plain model refuses it:", *(f"  {line.strip()[:100]} ..." for line in lines[:3]), sep="\n")
    else:
        sys.exit(f"{source} loads into the plain model: it is not wrapped")


@torch.no_grad()
def accuracy(network: nn.Module, state_dict: dict[str, Tensor], test: data.Images) -> float:
    """The share of held-out images that the network with these weights gets right."""
    network.load_state_dict(state_dict)
    network.eval()
    images, labels = test[range(len(test))]
    return float((network(images).argmax(1) == labels).double().mean())


def compare(before: float, after: float) -> None:
    """Prints both accuracies in full, and ends the demo where they differ."""
    print(f"test accuracy before {before!r}, after {after!r}")
    if before != after:
        sys.exit("they differ")


def heading(text: str) -> None:
    """A line that separates the modes."""
    print(f"\n=== {text} " + "=" * (70 - len(text)), flush=True)


def ckpt(*arguments: str) -> None:
    """Runs the command line as a user would, and shows what was typed."""
    print(f"\n$ ckpt {' '.join(arguments)}", flush=True)
    run([sys.executable, "-m", "ckpt_tools", *arguments], {"COLUMNS": "100"})


def run(command: Sequence[str], extra: dict[str, str]) -> None:
    """Runs a command with the repository on its path; ends the demo when it fails."""
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **extra}).returncode
    if code:
        sys.exit(f"{' '.join(command)} failed with exit code {code}")


if __name__ == "__main__":
    main()
