"""Runs under FSDP2: as the others in numbers, saved whole, by ranks and as dcp, and resumed from each in any mode."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.torch import load, load_state_dict
from tests.train.runs import close, last, ranks, run, same
from train.cli import command

RESNET: dict[str, Any] = {
    "model": "resnet18", "width": 0.05, "batch_size": 64, "epochs": 2, "data": "synthetic", "shape": "1x8x8", "samples": 240,
}  # three steps an epoch  # fmt: skip
SAVES = ("unwrapped", "ranks", "dcp")


def test_one_rank_is_equal_to_a_single_process(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """Bit for bit, batch statistics and momentum too."""
    single = run(tmp_path / "single", **RESNET)
    only_rank()
    assert same(single, run(tmp_path / "fsdp", parallel="fsdp", **RESNET))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks leave behind under FSDP2 and, beside it, under DistributedDataParallel."""
    out = tmp_path_factory.mktemp("fsdp")
    options = [part for key, value in RESNET.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    fsdp, whole = ["--parallel", "fsdp"], ["--save", "unwrapped"]
    ranks(
        2,
        [*options, "--out", f"{out}/ddp"],
        *([*options, *fsdp, "--out", f"{out}/{save}", "--save", save] for save in SAVES),
        *([*fsdp, "--resume", f"{out}/{save}/{first(save)}", "--out", f"{out}/from_{save}", *whole] for save in SAVES),
        [*fsdp, "--resume", f"{out}/ddp/epoch_001.pth", "--out", f"{out}/from_ddp"],
        ["--resume", f"{out}/dcp/epoch_001", "--out", f"{out}/ddp_from_dcp"],
        ([*options, *fsdp, "--out", f"{out}/stopped", "--save", "dcp"], 1, 5),
        [*fsdp, "--resume", "latest", "--out", f"{out}/stopped", *whole],
    )
    return out


def first(save: str) -> str:
    """The checkpoint after the first epoch."""
    return "epoch_001.pth" if save == "unwrapped" else "epoch_001"


def rows(out: Path) -> list[dict[str, Any]]:
    """The metrics, without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def test_two_ranks_are_equal_to_distributed_data_parallel(two: Path) -> None:
    """Bit for bit, since a sum of two has one order: weights, momentum, batch statistics of the first rank; and metrics."""
    assert same(last(two / "ddp"), last(two / "unwrapped"))
    for ours, theirs in zip(rows(two / "unwrapped"), rows(two / "ddp"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("save", SAVES)
def test_two_ranks_resume_exactly_from_every_save(save: str, two: Path) -> None:
    assert same(last(two / "unwrapped"), last(two / f"from_{save}"))


def test_every_save_holds_the_same(two: Path) -> None:
    """The file, the folder of ranks and the dcp; the latter two in parts that torch itself wrote."""
    whole = last(two / "unwrapped")
    assert sorted(os.listdir(two / "ranks" / "epoch_002")) == [f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]
    assert sorted(os.listdir(two / "dcp" / "epoch_002")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for save in ("ranks", "dcp"):
        assert (two / save / "latest").read_text() == "epoch_002\n"
        assert rows(two / save) == rows(two / "unwrapped")
        other = load(two / save / "epoch_002")
        other["optimizer"]["state"] = {int(place): state for place, state in other["optimizer"]["state"].items()}
        other["model"] = {name: other["model"][name] for name in whole["model"]}  # torch writes a dcp in an order of its own
        assert same(whole, other)
        assert {key: other[key] for key in ("epoch", "step", "scheduler")} == {
            key: whole[key] for key in ("epoch", "step", "scheduler")
        }


def test_other_modes_go_on_from_every_save(two: Path, tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """A single process, DataParallel and another number of ranks, from the parts of two ranks, and back."""
    whole = last(two / "unwrapped")
    assert close(whole, last(two / "from_ddp"))
    assert close(whole, last(two / "ddp_from_dcp"))
    one = run(tmp_path / "one", parallel="single", resume=str(two / "unwrapped" / "epoch_001.pth"))
    assert same(one, run(tmp_path / "ranks", parallel="single", resume=str(two / "ranks" / "epoch_001")))
    assert same(one, run(tmp_path / "dp", parallel="dp", resume=str(two / "dcp" / "epoch_001")))
    only_rank()
    fsdp = run(tmp_path / "fsdp", parallel="fsdp", save="unwrapped", resume=str(two / "dcp" / "epoch_001"))
    assert same(one, fsdp)


def test_a_signal_in_the_middle_of_an_epoch_leaves_a_folder_to_go_on_from(two: Path) -> None:
    assert (two / "stopped" / "epoch_001_step_00002" / ".metadata").exists()
    assert same(last(two / "unwrapped"), last(two / "stopped"))


def test_the_parts_become_one_file_that_resumes(two: Path, tmp_path: Path) -> None:
    """`ckpt convert FOLDER OUT`: the checkpoint that the gathered save would have been."""
    ckpt_tools.convert(two / "ranks" / "epoch_001", tmp_path / "epoch_001.pth")
    converted = torch.load(tmp_path / "epoch_001.pth", weights_only=True)
    assert same(converted, torch.load(two / "unwrapped" / "epoch_001.pth", weights_only=True))
    resumed = run(tmp_path, parallel="single", resume=str(tmp_path / "epoch_001.pth"))
    assert same(resumed, run(tmp_path / "one", parallel="single", resume=str(two / "unwrapped" / "epoch_001.pth")))


def test_a_batch_in_passes_trains_like_a_batch_at_once(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    whole = run(tmp_path / "whole", epochs=1)
    only_rank()
    assert close(whole, run(tmp_path / "passes", epochs=1, grad_accum=4, parallel="fsdp"))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_is_as_in_a_single_process(amp: str, tmp_path: Path, only_rank: Callable[[], None]) -> None:
    """The scaler too, which looks for overflow in each rank's parts."""
    single = run(tmp_path / "single", amp=amp, **RESNET)
    only_rank()
    one = run(tmp_path / "fsdp", parallel="fsdp", amp=amp, **RESNET)
    assert same(single, one)
    assert single["scaler"] == one["scaler"]


def test_safetensors_are_gathered_and_folders_are_pruned(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    for options in (["--format", "safetensors"], ["--save", "ranks", "--keep", "1"]):
        only_rank()
        done = CliRunner().invoke(
            command, ["--parallel", "fsdp", "--epochs", "2", "--out", str(tmp_path / options[1]), *options]
        )
        assert done.exit_code == 0, done.output
    assert list(load_state_dict(tmp_path / "safetensors" / "epoch_001.safetensors")) == [
        *("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    ]
    assert sorted(path.name for path in (tmp_path / "ranks").glob("epoch_*")) == ["epoch_002", "epoch_002.json"]
