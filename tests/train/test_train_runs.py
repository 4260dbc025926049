"""The modes of one process agree exactly, in passes and in mixed precision too; what a run draws and writes beside."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import ckpt
from tests.train.runs import FEW, RESNET, close, last, run, same
from train.config import Config
from train.train import train

CNN: dict[str, Any] = {"model": "cnn", "width": 0.015, "epochs": 2, **FEW}


@pytest.mark.parametrize("options", [RESNET, CNN], ids=["resnet", "cnn"])
def test_single_dp_and_one_rank_are_equal(options: dict[str, Any], tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """Bit for bit, and each goes on from the other's checkpoint."""
    single = run(tmp_path / "single", **options)
    wrapped = run(tmp_path / "dp", **options, parallel="dp", save="wrapped")
    assert same(single, run(tmp_path / "resumed", parallel="single", resume=str(tmp_path / "dp" / "epoch_001.pth")))
    only_rank()
    ranked = run(tmp_path / "ddp", **options, parallel="ddp", save="wrapped")
    assert all(name.startswith("module.") for saved in (wrapped, ranked) for name in saved["model"])
    assert same(single, wrapped)
    assert same(single, ranked)


def test_a_batch_in_passes_trains_like_a_batch_at_once(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    whole = run(tmp_path / "whole", epochs=1)
    assert close(whole, run(tmp_path / "passes", epochs=1, grad_accum=4))
    only_rank()
    assert close(whole, run(tmp_path / "ddp", epochs=1, grad_accum=4, parallel="ddp"))
    only_rank()
    assert close(whole, run(tmp_path / "fsdp", epochs=1, grad_accum=4, parallel="fsdp"))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_and_keeps_its_scaler(amp: str, tmp_path: Path) -> None:
    saved = run(tmp_path, epochs=2, amp=amp)
    assert ("scale" in saved["scaler"]) is (amp == "fp16")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"] > 0.9


def test_a_cosine_ends_at_0_also_where_fp16_leaves_steps_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler starts so high that the first gradients overflow, and halves itself until they do not."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    saved = run(tmp_path, epochs=2, amp="fp16", schedule="cosine")
    assert 0 < 40 - int(math.log2(saved["scaler"]["scale"])) < 44
    assert [row["lr"] for row in saved["metrics"]] == [pytest.approx(0.025), 0]


def test_converting_the_wrapper_away_gives_the_unwrapped_save(tmp_path: Path) -> None:
    """`ckpt convert --strip-module`, whole checkpoint: weights, optimizer, and all else."""
    plain = run(tmp_path / "plain", epochs=1, parallel="dp")
    run(tmp_path / "wrapped", epochs=1, parallel="dp", save="wrapped")
    target = tmp_path / "converted.pth"
    ckpt("convert", tmp_path / "wrapped" / "epoch_001.pth", target, "--strip-module")
    converted = torch.load(target, weights_only=True)
    assert list(converted["model"]) == list(plain["model"])
    assert same(converted, plain)


def test_tensorboard_events_are_written_where_the_package_is(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, epochs=1, tensorboard=True)
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses what torch itself deprecates
def test_a_compiled_network_saves_both_wrappers_names_and_resumes(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """What torch.compile makes of it is torch's matter: here it runs as it is written."""
    options: dict[str, Any] = {"model": "mlp", "compile": True}
    with torch.compiler.set_stance("force_eager"):
        only_rank()
        assert train(Config(out=tmp_path, epochs=1, parallel="ddp", save="wrapped", **options)) == 0
        assert next(iter(last(tmp_path)["model"])) == "_orig_mod.module.fc1.weight"
        only_rank()
        resumed = run(tmp_path, epochs=2, parallel="ddp", resume="latest", **options)
    plain = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # `save` is the checkpoint's, as it was not given anew
    assert list(resumed["model"]) == [f"_orig_mod.module.{name}" for name in plain]
