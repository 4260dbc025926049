"""What may be asked of a run beside its mode: weights alone, another start, changes on purpose, networks of one's own."""

import pickle
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt_tools
from tests.train.runs import FEW, ROOT, called, last, run, same, spelled
from tests.train.test_train_data import idx
from train import train as loop
from train.models import LeNet


def test_a_run_starts_from_another_s_weights_with_a_new_head(tmp_path: Path) -> None:
    """They lie beside its checkpoint, by plain names or wrapped ones; what a run began with is in its own checkpoint."""
    for weights, prefix in (("plain", ""), ("wrapped", "module.")):
        run(tmp_path / weights, model="lenet", parallel="dp", weights=weights, epochs=1)
        state = torch.load(tmp_path / weights / "epoch_001.weights.pth", weights_only=True)
        LeNet(1, 10, 1.0).load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()})
        assert all(name.startswith(prefix) for name in state)
    begin = tmp_path / "wrapped" / "epoch_001.weights.pth"
    options = [*spelled({**FEW, "on_mismatch": "reinit", "out": tmp_path / "b"}), "--init-from", begin]
    done = called("--model", "lenet", "--classes", 200, *options, "--epochs", 0)
    assert "8 tensors loaded" in done.output
    assert "initialised   fc3.weight" in done.output
    assert last(tmp_path / "b")["model"]["fc3.weight"].shape == (200, 84)
    begin.unlink()
    assert "tensors loaded" not in called(*options, "--resume", "auto", "--epochs", 1).output


def test_what_is_changed_on_purpose_is_said_and_the_rest_refused(tmp_path: Path) -> None:
    run(tmp_path, schedule="cosine", epochs=1)
    latest = ["--out", tmp_path, "--resume", "latest"]
    assert "--change epochs=2" in called(*latest, "--epochs", 2, code=2).output
    assert "--init-from" in called(*latest, "--change", "model=lenet", code=2).output
    done = called(*latest, "--change", "epochs=2", "--change", "lr=0.01")
    assert "resumed from step 7" in done.output
    assert "changed: epochs 1 -> 2\nchanged: lr 0.05 -> 0.01" in done.output
    assert last(tmp_path)["config"]["lr"] == 0.01


def test_an_average_is_resumed_exactly_and_found_by_convert(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "ema": 0.9, "optimizer": "adamw", "clip_norm": 1.0, "warmup": 4, "save_every": "5"}
    whole = run(tmp_path / "whole", **options)
    parts = run(tmp_path / "parts", resume=str(tmp_path / "whole" / "epoch_000_step_00005.pth"))
    assert all(torch.equal(whole[key][name], parts[key][name]) for key in ("model", "ema") for name in whole["model"])
    ckpt_tools.convert(tmp_path / "whole" / "epoch_002.pth", tmp_path / "ema.pth", ema=True)
    assert torch.load(tmp_path / "ema.pth", weights_only=True).keys() == whole["model"].keys()


def test_minutes_between_saves_go_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at this clock takes twelve seconds: a minute is over after the sixth step."""
    monkeypatch.setattr("train.parallel.time", SimpleNamespace(monotonic=count(0, 12).__next__))
    run(tmp_path, save_every="1m", epochs=1)
    assert [path.name for path in sorted(tmp_path.glob("*.pth"))] == ["epoch_000_step_00006.pth", "epoch_001.pth"]


def test_the_best_checkpoint_is_named_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.5, 0.9, 0.8, 0.9, 0.7])
    monkeypatch.setattr(loop, "evaluate", lambda run: (1.0, next(accuracies)))
    run(tmp_path, keep=2, epochs=5)
    assert (tmp_path / "best").read_text() == "epoch_002.pth\n"
    assert [path.name for path in sorted(tmp_path.glob("*.pth"))] == ["epoch_002.pth", "epoch_004.pth", "epoch_005.pth"]


def test_a_file_names_nothing_that_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run(tmp_path / "out", model="mine:net", epochs=1)
    refused = called("--out", tmp_path / "out", "--resume", "latest", "--epochs", 2, code=2)
    assert "imported only if you say it too" in refused.output
    resumed = run(tmp_path / "out", resume="latest", epochs=2, model="mine:net")
    assert same(resumed, run(tmp_path / "whole", model="mine:net", epochs=2))


def commands() -> list[str]:
    """Those of the five jobs, as docs/training.md has them."""
    page = (ROOT / "docs" / "training.md").read_text()
    return re.findall(r"`([^`]*-m train --model [^`]*)`", page.split("## Five jobs")[1].split("## ")[0])


def test_the_five_jobs_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_rank: Callable[[], None]) -> None:
    """On small data, with narrow networks, as the only rank of what torchrun starts; without SyncBN (GPUs) and TensorBoard."""
    files(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    few = ["--device", "cpu", "--epochs", "1", "--width", "0.02"]
    assert len(commands()) == 9
    for command_line in commands():
        launcher, _, options = command_line.partition("-m train ")
        line = options.replace("epoch_010", "epoch_001").replace(" --sync-bn --tensorboard", "")
        with monkeypatch.context() as patch:
            if "nproc" in launcher:
                only_rank()
            else:
                patch.delenv("RANK", raising=False)
            out = [] if "--out" in line else ["--out", f"runs/{len(list(tmp_path.glob('runs/*')))}"]
            called(*line.split(), *few, *out)
    assert torch.load(tmp_path / "runs" / "head" / "epoch_001.weights.pth")["fc3.weight"].shape[0] == 200


def files(folder: Path) -> None:
    """As many images as a batch has, or a few more, in the files of MNIST, Fashion-MNIST and CIFAR-10."""
    for name, total in (("MNIST", 40), ("FashionMNIST", 256)):
        raw = folder / name / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "t10k"):
            (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(torch.randint(256, (total, 28, 28), dtype=torch.uint8)))
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(torch.arange(total) % 10))
    batches = folder / "cifar-10-batches-py"
    batches.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = torch.randint(256, (8, 3072), dtype=torch.uint8).numpy()
        (batches / name).write_bytes(pickle.dumps({"data": rows, "labels": list(range(8))}, protocol=2))
