"""Modes agree: one process and one rank bit for bit, several ranks within float tolerance, FSDP2 as DDP bit for bit."""

import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.torch import load, load_state_dict
from tests.support.commands import ckpt
from tests.train.runs import FEW, LENET, RESNET, bare, called, close, last, ranks, rows, run, same, spelled
from train import data
from train.models import ResNet18

CNN: dict[str, Any] = {"model": "cnn", "width": 0.015, "epochs": 2, **FEW, "samples": 90}


@pytest.mark.parametrize("options", [RESNET, CNN], ids=["resnet", "cnn"])
def test_single_dp_and_one_rank_are_equal(options: dict[str, Any], tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """Bit for bit, each goes on from the other's checkpoint, and `ckpt convert --strip-module` takes the wrapper away."""
    single = run(tmp_path / "single", **options)
    wrapped = run(tmp_path / "dp", **options, parallel="dp", save="wrapped")
    assert same(single, run(tmp_path / "resumed", parallel="single", resume=str(tmp_path / "dp" / "epoch_001.pth")))
    only_rank()
    ranked = run(tmp_path / "ddp", **options, parallel="ddp", save="wrapped")
    assert all(name.startswith("module.") for saved in (wrapped, ranked) for name in saved["model"])
    assert same(single, wrapped)
    assert same(single, ranked)
    ckpt("convert", tmp_path / "dp" / "epoch_002.pth", tmp_path / "plain.pth", "--strip-module")
    converted = torch.load(tmp_path / "plain.pth", weights_only=True)
    assert list(converted["model"]) == list(single["model"])
    assert same(converted, single)


def test_a_batch_in_passes_trains_like_a_batch_at_once(
    whole: tuple[Path, Any], tmp_path: Path, only_rank: Callable[[], None]
) -> None:
    for mode in ("single", "ddp", "fsdp"):
        if mode != "single":
            only_rank()
        assert close(whole[1], run(tmp_path / mode, epochs=2, grad_accum=4, parallel=mode))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_and_keeps_its_scaler(amp: str, tmp_path: Path) -> None:
    saved = run(tmp_path, epochs=2, amp=amp)
    assert ("scale" in saved["scaler"]) is (amp == "fp16")
    assert rows(tmp_path)[-1]["test_accuracy"] > 0.9


def test_a_cosine_ends_at_0_also_where_fp16_leaves_steps_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler starts so high that the first gradients overflow, and halves itself until they do not."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**21))
    saved = run(tmp_path, epochs=2, amp="fp16", schedule="cosine")
    assert 0 < 21 - int(math.log2(saved["scaler"]["scale"])) < 12
    assert [row["lr"] for row in saved["metrics"]] == [pytest.approx(0.025), 0]


def test_tensorboard_events_are_written_where_the_package_is(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, epochs=1, tensorboard=True)
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses what torch itself deprecates
def test_a_compiled_network_saves_both_wrappers_names_and_resumes(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """What torch.compile makes of it is torch's matter: here it runs as it is written."""
    plain = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # `save` is the checkpoint's, as it is not given anew
    with torch.compiler.set_stance("force_eager"):
        for epochs, options in ((1, {"model": "mlp", "save": "wrapped"}), (2, {"resume": "latest"})):
            only_rank()
            saved = run(tmp_path, epochs=epochs, parallel="ddp", compile=True, **options)
            assert list(saved["model"]) == [f"_orig_mod.module.{name}" for name in plain]


# --- several ranks

SAVES = ("unwrapped", "dcp")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two gloo ranks leave behind, one run after the other: starting them takes longer than all of it."""
    out = tmp_path_factory.mktemp("two")
    run(out / "single", epochs=1, **LENET)
    shutil.copytree(out / "single", out / "from_single")
    lenet, short, resnet = spelled(LENET), ["--epochs", "2"], spelled(RESNET)
    fsdp, whole = ["--parallel", "fsdp"], ["--save", "unwrapped"]
    ranks(
        2,
        [*lenet, *short, "--save", "wrapped", "--out", f"{out}/whole"],
        ["--resume", f"{out}/whole/epoch_001.pth", "--out", f"{out}/resumed"],
        ([*lenet, *short, "--out", f"{out}/stopped"], 1, 11),
        ["--resume", "latest", "--out", f"{out}/stopped"],
        ["--resume", "latest", *short, "--out", f"{out}/from_single"],
        [*resnet, "--out", f"{out}/ddp"],
        [*lenet, *short, "--batch-size", "30", "--out", f"{out}/thirty"],
        *([*resnet, *fsdp, "--out", f"{out}/{save}", "--save", save] for save in SAVES),
        [*fsdp, "--resume", f"{out}/dcp/epoch_001", "--out", f"{out}/from_dcp", *whole],
        [*fsdp, "--resume", f"{out}/ddp/epoch_001.pth", "--out", f"{out}/from_ddp"],
        ["--resume", f"{out}/dcp/epoch_001", "--out", f"{out}/ddp_from_dcp"],
        ([*resnet, *fsdp, "--out", f"{out}/fsdp_stopped", "--save", "dcp"], 1, 4),
        [*fsdp, "--resume", "latest", "--out", f"{out}/fsdp_stopped", *whole],
    )
    return out


def test_two_ranks_agree_with_a_single_process(two: Path, tmp_path: Path) -> None:
    """On the same global batches, and where one goes on from the other's checkpoint."""
    single = run(tmp_path / "single", epochs=2, **LENET)
    assert close(single, last(two / "whole"), tolerance=1e-5)
    one, both = rows(tmp_path / "single")[-1], rows(two / "whole")[-1]
    assert one["loss"] == pytest.approx(both["loss"], abs=1e-4)
    assert one["test_accuracy"] == pytest.approx(both["test_accuracy"], abs=2 / 62)
    assert close(single, last(two / "from_single"))
    resume = str(two / "whole" / "epoch_001.pth")
    from_two = run(tmp_path / "from_two", parallel="single", resume=resume)
    assert close(single, from_two)
    assert same(from_two, run(tmp_path / "dp", resume=resume, parallel="dp", save="wrapped"))


def test_two_ranks_resume_exactly(two: Path) -> None:
    """From a save under the wrapper's names; after a signal to one, which stops both, after the fourth step at most."""
    whole = last(two / "whole")
    assert all(name.startswith("module.") for name in whole["model"])
    assert same(whole, last(two / "resumed"))
    assert (two / "stopped" / "epoch_001_step_00005.pth").exists()
    assert same(whole, last(two / "stopped"))


def test_two_ranks_measure_what_they_save(two: Path) -> None:
    """Each has batch statistics of its own; the accuracy is that of rank 0's, which are in the file."""
    network = ResNet18(1, width=0.05)
    network.load_state_dict(bare(last(two / "ddp")["model"]))
    network.eval()
    _, test = data.load("synthetic", shape=FEW["shape"], samples=RESNET["samples"])
    images, labels = data.fitted(test.tensors[0], None), test.tensors[1]
    accuracy = (network(images).argmax(1) == labels).double().mean().item()
    assert rows(two / "ddp")[-1]["test_accuracy"] == pytest.approx(accuracy)


def test_three_ranks_go_on_from_two(two: Path, tmp_path: Path) -> None:
    """Under ddp, and in the other mode: to the end, where weights are those of two within rounding, and the test loss too."""
    modes = {"ddp": [], "fsdp": ["--parallel", "fsdp"]}
    ranks(3, *(["--resume", f"{two}/thirty/epoch_001.pth", "--out", str(tmp_path / mode), *modes[mode]] for mode in modes))
    for mode in modes:
        assert close(last(two / "thirty"), last(tmp_path / mode), tolerance=1e-5)
        assert rows(tmp_path / mode)[1]["test_loss"] == pytest.approx(rows(two / "thirty")[1]["test_loss"], abs=1e-5)


def test_fsdp_is_equal_to_distributed_data_parallel(two: Path) -> None:
    """Bit for bit, since a sum of two has one order: weights, momentum, batch statistics of the first rank; and metrics."""
    assert same(last(two / "ddp"), last(two / "unwrapped"))
    for ours, theirs in zip(rows(two / "unwrapped"), rows(two / "ddp"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("save", ["from_dcp", "fsdp_stopped"])
def test_two_ranks_resume_exactly_from_every_save(save: str, two: Path) -> None:
    """From the dcp, and the dcp that a signal to one rank left in the middle of an epoch."""
    assert save != "fsdp_stopped" or (two / save / "epoch_001_step_00001" / ".metadata").exists()
    assert same(last(two / "unwrapped"), last(two / save))


def test_every_save_holds_the_same(two: Path) -> None:
    whole = last(two / "unwrapped")
    assert sorted(os.listdir(two / "dcp" / "epoch_002")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert (two / "dcp" / "latest").read_text() == "epoch_002\n"
    assert rows(two / "dcp") == rows(two / "unwrapped")
    other = load(two / "dcp" / "epoch_002")
    other["optimizer"]["state"] = {int(place): state for place, state in other["optimizer"]["state"].items()}
    other["model"] = {name: other["model"][name] for name in whole["model"]}  # torch writes a dcp in an order of its own
    assert same(whole, other)
    assert {key: other[key] for key in ("epoch", "step")} == {key: whole[key] for key in ("epoch", "step")}


def test_other_modes_go_on_from_every_save(two: Path, tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """A single process, DataParallel and another number of ranks, from the parts of two ranks or one file of them, and back."""
    whole = last(two / "unwrapped")
    assert close(whole, last(two / "from_ddp"))
    assert close(whole, last(two / "ddp_from_dcp"))
    one = run(tmp_path / "one", parallel="single", resume=str(two / "unwrapped" / "epoch_001.pth"))
    assert same(one, run(tmp_path / "dp", parallel="dp", resume=str(two / "dcp" / "epoch_001")))
    ckpt_tools.convert(two / "dcp" / "epoch_001", tmp_path / "epoch_001.pth")
    assert same(one, run(tmp_path / "converted", parallel="single", resume=str(tmp_path / "epoch_001.pth")))
    only_rank()
    fsdp = run(tmp_path / "fsdp", parallel="fsdp", save="unwrapped", resume=str(two / "dcp" / "epoch_001"))
    assert same(one, fsdp)


def test_one_rank_is_equal_to_a_single_process(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """In mixed precision too, bit for bit: batch statistics, momentum, and the scaler, which looks for overflow."""
    single = run(tmp_path / "single", amp="fp16", **RESNET)
    only_rank()
    one = run(tmp_path / "fsdp", parallel="fsdp", amp="fp16", **RESNET)
    assert same(single, one)
    assert single["scaler"] == one["scaler"]


def test_folders_are_pruned_and_the_weights_gathered(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    (tmp_path / "epoch_001_step_00003").mkdir()
    only_rank()
    called(*spelled({"parallel": "fsdp", "epochs": 2, "out": tmp_path, "save": "dcp", "keep": 1, **FEW, "samples": 40}))
    names = ["epoch_002", "epoch_002.weights.pth"]
    assert sorted(path.name for path in tmp_path.glob("epoch_*")) == names
    assert load_state_dict(tmp_path / "epoch_002.weights.pth")["fc1.weight"].shape == (128, 784)
