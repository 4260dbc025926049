"""Runs for the tests of `train/`, in this process and in several; and what makes two checkpoints equal."""

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.distributed import TCPStore

import train as package
from tests.support.job import job
from train import train as loop
from train.__main__ import command
from train.config import Config

ROOT = Path(package.__file__).parents[1]

# Seven steps an epoch, which leaves 25 images out.
FEW: dict[str, Any] = {"data": "synthetic", "shape": "1x8x8", "samples": 311}
LENET: dict[str, Any] = {"model": "lenet", "lr": 0.01, **FEW}  # a higher rate makes rounding grow to anything
RESNET: dict[str, Any] = {
    "model": "resnet18",
    "width": 0.05,
    "batch_size": 64,
    "epochs": 2,
    **FEW,
    "samples": 240,
}  # three steps


def spelled(options: dict[str, Any]) -> list[str]:
    return [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def run(out: Path, **options: Any) -> dict[str, Any]:
    """Trains in this process, on few images where neither images nor a checkpoint are named; the last checkpoint."""
    few = {} if {"data", "resume"} & options.keys() else FEW
    options = {"weights": "none", **few, **options}
    assert loop.train(Config(out=out, **options), frozenset(options)) == 0
    return last(out)


def called(*options: object, code: int | None = 0) -> Result:
    """The command line; fails where it ends with another exit code, None for any."""
    done = CliRunner().invoke(command, [str(option) for option in options])
    assert code is None or done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def rows(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def last(out: Path) -> dict[str, Any]:
    """What `latest` names, as torch itself reads it, refusing all but plain data."""
    checkpoint: dict[str, Any] = torch.load(out / (out / "latest").read_text().strip(), weights_only=True)
    return checkpoint


def signalled(monkeypatch: pytest.MonkeyPatch, number: int, *steps: int) -> None:
    """Sends this process a signal in the middle of these steps, counted over all runs."""
    step, counted = loop.train_step, count(1)

    def stopping(*arguments: Any) -> None:
        if next(counted) in steps:
            os.kill(os.getpid(), number)
        step(*arguments)

    monkeypatch.setattr(loop, "train_step", stopping)


def meeting_place() -> tuple[TCPStore, dict[str, str]]:
    """A store at which ranks meet while somebody holds it, as torchrun has one, and how they are told of it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def environment(**more: str) -> dict[str, str]:
    """What a process under test gets: this package, one thread, warnings as errors."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", **more}


def ranks(size: int, *runs: list[str] | tuple[list[str], int, int]) -> None:
    """Runs each list of options in `size` processes, one after the other, each under a number of its own: ranks_job.py."""
    plans = json.dumps([each if isinstance(each, tuple) else (each, -1, 0) for each in runs])
    done = job(size, "tests/train/ranks_job.py", plans)
    assert done.returncode == 0, done.stdout + done.stderr


def bare(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without `module.`, done here by hand, since the code under test does it too."""
    return {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Weights and momentum equal, tensor by tensor, whatever the wrapper."""
    weights, others = bare(one["model"]), bare(other["model"])
    momentum, momenta = one["optimizer"]["state"], other["optimizer"]["state"]
    return (
        list(weights) == list(others)
        and all(torch.equal(weights[name], others[name]) for name in weights)
        and momentum.keys() == momenta.keys()
        and all(torch.equal(momentum[key]["momentum_buffer"], momenta[key]["momentum_buffer"]) for key in momentum)
    )


def close(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-4) -> bool:
    weights, others = bare(one["model"]), bare(other["model"])
    return all(torch.allclose(weights[name], others[name], atol=tolerance) for name in weights)
