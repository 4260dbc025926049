"""What a run says of itself, and `--evaluate`, which says what a checkpoint is worth."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from tests.train.runs import run, spelled
from train import train as loop
from train.__main__ import command
from train.config import Config
from train.parallel import World
from train.wrap import wrap

SMALL: dict[str, Any] = {"data": "synthetic", "samples": 320, "batch_size": 32}  # eight steps an epoch


def test_a_run_says_what_trains_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, epochs=2, **SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mlp, 101,770 parameters; single on cpu; batches of 32, 32 on each"
    assert lines[-1].startswith("average ")
    assert lines[-1].endswith(" s an epoch")


def test_log_every_tells_the_loss_and_the_time_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, epochs=1, log_every=3, **SMALL)
    assert re.findall(r"step (\d/8)  loss \d\.\d{4}  \d\.\d{3} s a step", capsys.readouterr().out) == ["3/8", "6/8"]


def test_log_every_stops_in_the_epoch_where_the_loss_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, done = loop.train_step, []

    def diverging(run: loop.Run, *batch: Tensor) -> None:
        done.append(run.step)
        step(run, *batch)
        run.loss.fill_(torch.nan)

    monkeypatch.setattr(loop, "train_step", diverging)
    assert loop.train(Config(out=tmp_path, epochs=1, log_every=2, **SMALL)) == 1
    assert done == [0, 1]


def evaluated(*options: object) -> str:
    """What the command line says of a checkpoint; raises what it refuses with."""
    done = CliRunner().invoke(command, [str(option) for option in ("--evaluate", *options)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.output


@pytest.mark.parametrize("name", ["", "latest", "epoch_002.pth"])
def test_evaluate_takes_the_network_and_the_images_from_the_file(name: str, tmp_path: Path) -> None:
    """And names both; OUT and OUT/latest are the checkpoint that `latest` names."""
    run(tmp_path, epochs=2, model="lenet", width=2.0, shape="3x9x7", **SMALL)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluated(tmp_path / name) == (
        f"{tmp_path / 'epoch_002.pth'}: lenet, 244,962 parameters; 64 test images of synthetic, on cpu\n"
        f"test loss {row['test_loss']:.4f}  test accuracy {row['test_accuracy']:.2%}\n"
    )


def test_evaluate_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun it is refused before anything is read."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(click.UsageError, match="leave torchrun out"):
        evaluated(tmp_path)


def test_evaluate_lets_the_user_name_other_images(tmp_path: Path) -> None:
    run(tmp_path, epochs=1, model="lenet", shape="1x9x7", **SMALL)
    assert "lenet, 61,706 parameters; 359 test images of digits" in evaluated(tmp_path, "--data", "digits")
    with pytest.raises(click.UsageError, match="does not fit the model"):
        evaluated(tmp_path, "--model", "mlp")


def test_evaluate_of_another_s_file_takes_the_network_from_the_command_line(tmp_path: Path) -> None:
    """Also where the file has a config, which is not one of ours; and says what was tried."""
    run(tmp_path, epochs=1, model="lenet", **SMALL)
    weights = torch.load(tmp_path / "epoch_001.pth", weights_only=True)["model"]
    torch.save({"model": weights, "config": {"model": "vgg", "lr": "fast"}}, tmp_path / "other.pth")
    assert "lenet, 61,706 parameters" in evaluated(tmp_path / "other.pth", "--model", "lenet")
    with pytest.raises(click.UsageError, match=r"other.pth, into mlp: .*does not fit"):
        evaluated(tmp_path / "other.pth")


def test_evaluate_of_weights_alone_takes_the_network_from_the_command_line(tmp_path: Path) -> None:
    run(tmp_path, epochs=1, **SMALL, model="lenet", weights="plain")
    assert "lenet, " in evaluated(tmp_path / "epoch_001.weights.pth", "--model", "lenet")
    with pytest.raises(click.UsageError, match="into mlp: "):
        evaluated(tmp_path / "epoch_001.weights.pth")


def test_evaluate_of_a_broken_config_is_one_sentence(tmp_path: Path) -> None:
    saved = run(tmp_path, epochs=1, **SMALL)
    torch.save(saved | {"config": saved["config"] | {"width": -1}}, tmp_path / "epoch_001.pth")
    with pytest.raises(click.UsageError, match="the checkpoint's config has width = -1"):
        evaluated(tmp_path)


def test_evaluate_of_a_flipped_bit_is_refused() -> None:
    with pytest.raises(click.UsageError, match=r"cannot read .*flipped.pth, which is damaged"):
        evaluated(Path(__file__).parents[2] / "fixtures" / "found" / "flipped.pth")


@pytest.mark.parametrize("kind", ["wrapped", "module", "dcp"])
def test_evaluate_measures_a_file_of_any_mode(
    kind: str, tmp_path: Path, only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process on the CPU, without a further option: the network, and the accuracy that the run measured."""
    network = {"model": "lenet", "width": 2.0, "shape": "3x9x7", "data": "synthetic", "samples": 320}
    options: dict[str, Any] = {**SMALL, **network, "save": kind}
    if kind == "dcp":
        only_rank()
    options["parallel"] = "fsdp" if kind == "dcp" else "dp"
    assert loop.train(Config(out=tmp_path, epochs=1, **options)) == 0
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / (tmp_path / "latest").read_text().strip()
    before = sorted(tmp_path.rglob("*"))
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    # A network that was pickled whole says nothing of its run.
    assert evaluated(path, *(spelled(network) if kind == "module" else [])) == (
        f"{path}: lenet, 244,962 parameters; 64 test images of synthetic, on cpu\n"
        f"test loss {row['test_loss']:.4f}  test accuracy {row['test_accuracy']:.2%}\n"
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", [b"", None])
def test_evaluate_of_what_does_not_fit_is_one_sentence(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    torch.save(nn.Linear(3, 2).state_dict(), path)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(click.UsageError, match=r"other\.pth"):
        evaluated(path)


def test_distributed_data_parallel_is_told_of_unused_parameters(only_rank: Callable[[], None]) -> None:
    only_rank()
    torch.distributed.init_process_group("gloo")
    try:
        network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        config = Config(parallel="ddp", find_unused_parameters=True)
        model: Any = wrap(network, torch.zeros(1, 1, 2, 2), config, World((torch.device("cpu"),)))
        assert model.find_unused_parameters
    finally:
        torch.distributed.destroy_process_group()
