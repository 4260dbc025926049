"""The modes agree: DataParallel and one rank with a single process exactly, several ranks within float tolerance."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckpt_tools.cli import main as ckpt
from tests.train.runs import (
    ROOT,
    bare,
    close,
    environment,
    last,
    ranks,
    run,
    same,
)
from train import data
from train.config import Config
from train.models import build
from train.train import train

# Eight steps an epoch, the last of them with 25 of 32 images, which two ranks cannot share evenly.
FEW: dict[str, Any] = {"data": "synthetic", "shape": "1x8x8", "samples": 311}
LENET: dict[str, Any] = {"model": "lenet", "lr": 0.01, **FEW}


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_single_dp_and_one_rank_are_equal(model: str, tmp_path: Path, only_rank: Callable[[], None]) -> None:
    single = run(tmp_path / "single", model=model, epochs=2)
    wrapped = run(tmp_path / "dp", model=model, epochs=2, parallel="dp", save="wrapped")
    only_rank()
    ranked = run(tmp_path / "ddp", model=model, epochs=2, parallel="ddp", save="wrapped")
    assert all(name.startswith("module.") for saved in (wrapped, ranked) for name in saved["model"])
    assert same(single, wrapped)
    assert same(single, ranked)


def test_a_batch_in_passes_trains_like_a_batch_at_once(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    whole = run(tmp_path / "whole", epochs=1)
    assert close(whole, run(tmp_path / "passes", epochs=1, grad_accum=4))
    only_rank()
    assert close(whole, run(tmp_path / "ddp", epochs=1, grad_accum=4, parallel="ddp"))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_and_keeps_its_scaler(amp: str, tmp_path: Path) -> None:
    saved = run(tmp_path, epochs=2, amp=amp)
    assert ("scale" in saved["scaler"]) is (amp == "fp16")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"] > 0.9


def test_steps_that_fp16_leaves_out_do_not_move_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler starts so high that the first gradients overflow, and halves itself until they do not."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    saved = run(tmp_path, epochs=1, amp="fp16", schedule="cosine")
    halved = 40 - int(math.log2(saved["scaler"]["scale"]))
    assert 0 < halved < 45
    assert saved["scheduler"]["last_epoch"] == 45 - halved


def test_workers_change_nothing(tmp_path: Path) -> None:
    assert same(run(tmp_path / "none", epochs=1), run(tmp_path / "two", epochs=1, workers=2))


def test_synthetic_images_of_any_shape_can_be_learned(tmp_path: Path) -> None:
    run(tmp_path, epochs=3, data="synthetic", shape="3x9x7", samples=600)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"] > 0.9


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two gloo ranks leave behind. The learning rate is low: a higher one makes rounding grow to anything."""
    out = tmp_path_factory.mktemp("two")
    run(out / "single", epochs=1, **LENET)
    shutil.copytree(out / "single", out / "from_single")
    few = ["--data", "synthetic", "--shape", "1x8x8", "--samples", "311"]
    lenet, short = ["--model", "lenet", "--lr", "0.01", *few], ["--epochs", "2"]
    resnet = ["--model", "resnet18", "--width", "0.05", "--batch-size", "64", *few]
    ranks(
        2,
        [*lenet, *short, "--save", "wrapped", "--out", f"{out}/whole"],
        [*lenet, *short, "--grad-accum", "4", "--out", f"{out}/passes"],
        ["--resume", f"{out}/whole/epoch_001.pth", "--out", f"{out}/resumed"],
        ["--resume", f"{out}/whole/epoch_001.pth", "--out", f"{out}/read", "--read", "all"],
        ([*lenet, *short, "--out", f"{out}/stopped"], 1, 11),
        ["--resume", "latest", "--out", f"{out}/stopped"],
        ["--resume", "latest", *short, "--out", f"{out}/from_single"],
        [*resnet, *short, "--out", f"{out}/resnet"],
        [*resnet, *short, "--out", f"{out}/resnet_resumed", "--resume", f"{out}/resnet/epoch_001.pth"],
    )
    return out


def test_two_ranks_agree_with_a_single_process(two: Path, tmp_path: Path) -> None:
    """On the same global batches, of which the last has 25 of 32 images."""
    single = run(tmp_path, epochs=2, **LENET)
    assert close(single, last(two / "whole"), tolerance=1e-5)
    assert close(single, last(two / "passes"), tolerance=1e-5)
    rows = [json.loads((out / "metrics.jsonl").read_text().splitlines()[-1]) for out in (tmp_path, two / "whole")]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-4)
    assert rows[0]["test_accuracy"] == pytest.approx(rows[1]["test_accuracy"], abs=2 / 62)


def test_two_ranks_save_the_wrapper_s_names(two: Path) -> None:
    assert all(name.startswith("module.") for name in last(two / "whole")["model"])


@pytest.mark.parametrize("name", ["resumed", "read"])
def test_two_ranks_resume_exactly(name: str, two: Path) -> None:
    assert same(last(two / "whole"), last(two / name))


def test_two_ranks_resume_batch_statistics_exactly(two: Path) -> None:
    assert same(last(two / "resnet"), last(two / "resnet_resumed"))


def test_a_signal_to_one_rank_stops_both_after_the_same_step(two: Path) -> None:
    assert (two / "stopped" / "epoch_001_step_00003.pth").exists()
    assert same(last(two / "whole"), last(two / "stopped"))


def test_two_ranks_keep_a_random_state_each(two: Path) -> None:
    one, other = last(two / "whole")["rng"]
    assert not torch.equal(one["torch"], other["torch"])


def test_two_ranks_go_on_from_a_single_process_and_back(two: Path, tmp_path: Path) -> None:
    single = run(tmp_path / "single", epochs=2, **LENET)
    assert close(single, last(two / "from_single"))
    assert close(single, run(tmp_path / "from_two", parallel="single", resume=str(two / "whole" / "epoch_001.pth")))
    wrapped = run(tmp_path / "dp", resume=str(two / "whole" / "epoch_001.pth"), parallel="dp", save="wrapped")
    assert same(wrapped, run(tmp_path / "from_dp", parallel="single", resume=str(two / "whole" / "epoch_001.pth")))


def test_two_ranks_measure_what_they_save(two: Path) -> None:
    """Each has batch statistics of its own; the accuracy is that of rank 0's, which are in the file."""
    network = build("resnet18", 1, width=0.05)
    network.load_state_dict(bare(last(two / "resnet")["model"]))
    network.eval()
    _, test = data.load("synthetic", shape=FEW["shape"], samples=FEW["samples"])
    images, labels = test[range(len(test))]
    accuracy = (network(images).argmax(1) == labels).double().mean().item()
    row = json.loads((two / "resnet" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["test_accuracy"] == pytest.approx(accuracy)


def test_torchrun_trains_and_one_rank_speaks(tmp_path: Path) -> None:
    """The command of the README."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train"]
    options = ["--parallel", "ddp", "--model", "lenet", "--save", "wrapped", "--epochs", "1", "--out", str(tmp_path)]
    options += ["--data", "synthetic", "--samples", "100"]
    # torchrun is Python too and may warn: the training processes are held to no warnings in `two`.
    plain = environment(PYTHONWARNINGS="")
    done = subprocess.run([*torchrun, *options], env=plain, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch   1/1") == 1
    assert next(iter(last(tmp_path)["model"])) == "module.conv1.weight"


def test_converting_the_wrapper_away_gives_the_unwrapped_save(tmp_path: Path) -> None:
    """`ckpt convert --strip-module`, whole checkpoint: weights, optimizer, and all else."""
    plain = run(tmp_path / "plain", epochs=1, parallel="dp")
    run(tmp_path / "wrapped", epochs=1, parallel="dp", save="wrapped")
    target = tmp_path / "converted.pth"
    done = CliRunner().invoke(ckpt, ["convert", str(tmp_path / "wrapped/epoch_001.pth"), str(target), "--strip-module"])
    assert done.exit_code == 0, done.output
    converted = torch.load(target, weights_only=True)
    assert list(converted["model"]) == list(plain["model"])
    assert same(converted, plain)


@pytest.mark.usefixtures("curves")
def test_curves_are_drawn_only_where_matplotlib_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path / "with", epochs=1)
    assert (tmp_path / "with" / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path / "without", epochs=1)
    assert "no curves.png: pip install matplotlib" in capsys.readouterr().out


def test_tensorboard_events_are_written_where_the_package_is(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, epochs=1, tensorboard=True)
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses what torch itself deprecates
@pytest.mark.matrix
def test_a_compiled_network_saves_both_wrappers_names_and_resumes(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    options: dict[str, Any] = {"model": "mlp", "compile": True}
    only_rank()
    assert train(Config(out=tmp_path, epochs=1, parallel="ddp", save="wrapped", **options)) == 0
    assert next(iter(last(tmp_path)["model"])) == "_orig_mod.module.fc1.weight"
    only_rank()
    resumed = run(tmp_path, epochs=2, parallel="ddp", resume="latest", **options)
    plain = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # `save` is the checkpoint's, as it was not given anew
    assert list(resumed["model"]) == [f"_orig_mod.module.{name}" for name in plain]
