"""What a run says of itself, and `--evaluate`, which says what a checkpoint is worth."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.runs import called, rows, run, spelled
from train import train as loop
from train.config import Config
from train.parallel import World
from train.wrap import wrap

SMALL: dict[str, Any] = {"data": "synthetic", "samples": 320, "batch_size": 32}  # eight steps an epoch
NETWORK: dict[str, Any] = {"model": "lenet", "width": 2.0, "shape": "3x9x7", "data": "synthetic", "samples": 320}


def test_a_run_says_what_trains_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, epochs=2, log_every=3, **SMALL)
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "mlp, 101,770 parameters; single on cpu; batches of 32, 32 on each"
    assert re.fullmatch(r"average .* s an epoch", said.splitlines()[-1])
    assert re.findall(r"step (\d/8)  loss \d\.\d{4}  \d\.\d{3} s a step", said) == ["3/8", "6/8"] * 2


def test_log_every_stops_in_the_epoch_where_the_loss_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, done = loop.train_step, []

    def diverging(run: loop.Run, *batch: Tensor) -> None:
        done.append(run.step)
        step(run, *batch)
        run.loss.fill_(torch.nan)

    monkeypatch.setattr(loop, "train_step", diverging)
    assert loop.train(Config(out=tmp_path, epochs=1, log_every=2, **SMALL)) == 1
    assert done == [0, 1]


def evaluated(*options: object, code: int = 0) -> str:
    """What the command line says of a checkpoint."""
    return called("--evaluate", *options, code=code).output


def measured(path: Path, folder: Path) -> str:
    """What it says of a checkpoint of NETWORK: the file, the network, and the accuracy that the run measured."""
    row = rows(folder)[-1]
    return (
        f"{path}: lenet, 244,962 parameters; 64 test images of synthetic, on cpu\n"
        f"test loss {row['test_loss']:.4f}  test accuracy {row['test_accuracy']:.2%}\n"
    )


@pytest.mark.parametrize("kind", ["unwrapped", "wrapped", "module", "dcp"])
def test_evaluate_measures_a_file_of_any_mode(
    kind: str, tmp_path: Path, only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, network and images from the file, which is named; OUT and OUT/latest are what `latest` names."""
    options: dict[str, Any] = {**SMALL, **NETWORK, "save": kind}
    if kind == "dcp":
        only_rank()
    options["parallel"] = "fsdp" if kind == "dcp" else "dp"
    assert loop.train(Config(out=tmp_path, epochs=1, **options)) == 0
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / (tmp_path / "latest").read_text().strip()
    before = sorted(tmp_path.rglob("*"))
    # A network that was pickled whole says nothing of its run.
    more = spelled(NETWORK) if kind == "module" else []
    for given in (path, tmp_path, tmp_path / "latest") if kind == "unwrapped" else (path,):
        assert evaluated(given, *more) == measured(path, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_evaluate_takes_from_the_command_line_what_no_file_says(tmp_path: Path) -> None:
    """Other images, where they are named; of another's file, whose config is not ours, and of weights alone the network."""
    saved = run(tmp_path, epochs=1, **SMALL, model="lenet", weights="plain")
    assert "lenet, 61,706 parameters; 359 test images of digits" in evaluated(tmp_path, "--data", "digits")
    torch.save({"model": saved["model"], "config": {"model": "vgg", "lr": "fast"}}, tmp_path / "other.pth")
    for name in ("other.pth", "epoch_001.weights.pth"):
        assert "lenet, 61,706 parameters" in evaluated(tmp_path / name, "--model", "lenet", "--data", "synthetic")
    for given in ([tmp_path, "--model", "mlp"], [tmp_path / "other.pth"], [tmp_path / "epoch_001.weights.pth"]):
        told = evaluated(*given, code=2)
        assert ", into mlp: " in told
        assert "does not fit" in told
    torch.save(saved | {"config": saved["config"] | {"width": -1}}, tmp_path / "epoch_001.pth")
    assert "the checkpoint's config has width = -1" in evaluated(tmp_path, code=2)


@pytest.mark.parametrize("content", [b"", None, "flipped"])
def test_evaluate_of_what_does_not_fit_is_one_sentence(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    torch.save(nn.Linear(3, 2).state_dict(), path)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path = Path(__file__).parents[2] / "fixtures" / "found" / "flipped.pth"
    said = evaluated(path, "--data", "synthetic", code=2)
    assert (f"cannot read {path}, which is damaged" if content == "flipped" else "other.pth") in said


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
