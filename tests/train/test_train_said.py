"""What a run says of itself, and `--evaluate`, which says what a checkpoint is worth."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import Tensor, nn

from tests.train.runs import run
from train import metrics
from train import train as loop
from train.config import Config
from train.parallel import World, wrap

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

    def diverging(run: loop.Run, *batch: Tensor) -> Tensor:
        done.append(run.step)
        return step(run, *batch) * torch.nan

    monkeypatch.setattr(loop, "train_step", diverging)
    assert loop.train(Config(out=tmp_path, epochs=1, log_every=2, **SMALL)) == 1
    assert done == [0, 1]


def test_evaluate_of_the_latest_of_a_wide_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OUT/latest is the checkpoint that it names; the network has the width that it was trained with."""
    wide: dict[str, Any] = {"width": 2, **SMALL}
    run(tmp_path, epochs=2, **wide)
    capsys.readouterr()
    assert loop.train(Config(evaluate=tmp_path / "latest", **wide)) == 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'epoch_002.pth'}: test loss {row['test_loss']:.4f}")
    with pytest.raises(click.UsageError, match="does not fit the model"):
        loop.train(Config(evaluate=tmp_path / "latest", **SMALL))


@pytest.mark.parametrize("kind", ["unwrapped", "wrapped", "module", "safetensors", "ranks", "dcp"])
def test_evaluate_measures_a_file_of_any_mode(
    kind: str,
    tmp_path: Path,
    only_rank: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one process on the CPU: the accuracy that the run measured."""
    options: dict[str, Any] = {"parallel": "dp", "save": kind}
    if kind == "safetensors":
        options = {"format": kind}
    if kind in ("ranks", "dcp"):
        only_rank()
        options["parallel"] = "fsdp"
    assert loop.train(Config(out=tmp_path, epochs=1, **options, **SMALL)) == 0
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    capsys.readouterr()
    path = tmp_path / (tmp_path / "latest").read_text().strip()
    before = sorted(tmp_path.rglob("*"))
    assert loop.train(Config(evaluate=path, out=tmp_path, **SMALL)) == 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    expected = f"{path}: test loss {row['test_loss']:.4f}  test accuracy {row['test_accuracy']:.2%}\n"
    assert capsys.readouterr().out == expected
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", [b"", None])
def test_evaluate_of_what_does_not_fit_is_one_sentence(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    torch.save(nn.Linear(3, 2).state_dict(), path)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(click.UsageError, match=r"other\.pth"):
        loop.train(Config(evaluate=path, **SMALL))


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_distributed_data_parallel_is_told_of_unused_parameters_and_buffers(only_rank: Callable[[], None]) -> None:
    only_rank()
    torch.distributed.init_process_group("gloo")
    try:
        config = Config(parallel="ddp", find_unused_parameters=True, broadcast_buffers=False)
        network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        model: Any = wrap(network, World("ddp", (torch.device("cpu"),)), (1, 2, 2), config)
        assert (model.find_unused_parameters, model.broadcast_buffers) == (True, False)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["find_unused_parameters", "sync_bn"])
def test_what_belongs_to_ddp_is_refused_elsewhere(name: str) -> None:
    options: dict[str, Any] = {name: True}
    with pytest.raises(click.UsageError, match=f"--{name.replace('_', '-')} belongs to --parallel ddp"):
        Config(**options)


def test_epochs_are_whole_numbers_in_the_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    row = {"loss": 1.0, "test_loss": 1.0, "test_accuracy": 0.5, "lr": 0.1, "seconds": 1.0}
    drawn: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *names, **options: drawn.append(self))
        DRAW([{"epoch": 1, **row}, {"epoch": 2, **row}], tmp_path / "curves.png")
    ticks = drawn[0].axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)


DRAW = metrics.draw
