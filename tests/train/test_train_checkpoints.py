"""A checkpoint is whole, plain, and goes on to the very weights of a run that never stopped."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from ckpt_tools.torch import load_state_dict
from tests.train.runs import ROOT, environment, last, run, same, signalled
from train import checkpoint
from train import train as loop
from train.__main__ import command
from train.config import Config

CPU = (torch.device("cpu"),)


@pytest.mark.usefixtures("curves")
def test_a_run_leaves_a_checkpoint_an_epoch_and_a_pointer_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And curves, where matplotlib is."""
    pytest.importorskip("matplotlib")
    run(tmp_path, epochs=2)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "best", "curves.png", "epoch_001.pth", "epoch_002.pth", "latest", "metrics.jsonl"]
    assert (tmp_path / "latest").read_text() == "epoch_002.pth\n"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["test_accuracy"] > rows[0]["test_accuracy"] > 0.7
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path / "without", epochs=1)
    assert "no curves.png: pip install matplotlib" in capsys.readouterr().out


def test_a_checkpoint_is_plain_data_with_everything_a_run_needs(tmp_path: Path) -> None:
    saved = run(tmp_path, epochs=1, schedule="cosine")
    assert list(saved) == [*checkpoint.PARTS, "metrics", "torch"]
    assert list(saved["model"]) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert load_state_dict(tmp_path / "epoch_001.pth", select="model").keys() == saved["model"].keys()


def test_a_run_that_goes_on_elsewhere_is_the_whole_run(tmp_path: Path) -> None:
    """Bit for bit, with everything that has a state in use, a schedule among it; three steps are an epoch."""
    images: dict[str, Any] = {"data": "synthetic", "shape": "1x8x8", "samples": 240, "schedule": "cosine"}
    options: dict[str, Any] = {"model": "resnet18", "width": 0.05, "seed": 3, "batch_size": 64, "amp": "bf16", **images}
    whole = run(tmp_path / "whole", epochs=4, **options)
    parts = run(tmp_path / "parts", resume=str(tmp_path / "whole" / "epoch_002.pth"))
    assert same(whole, parts)
    for part in ("scaler", "epoch", "step", "totals"):
        assert whole[part] == parts[part]
    rows = [(tmp_path / each / "metrics.jsonl").read_text().splitlines() for each in ("whole", "parts")]
    timed = ("seconds", "samples_per_second")
    pairs = [[{k: v for k, v in json.loads(row).items() if k not in timed} for row in each] for each in rows]
    assert pairs[0] == pairs[1]
    assert [round(row["lr"], 4) for row in pairs[0]] == [0.0427, 0.025, 0.0073, 0]


@pytest.mark.parametrize(
    ("number", "after", "name"),
    [(signal.SIGINT, 60, "epoch_001_step_00016.pth"), (signal.SIGTERM, 44, "epoch_001.pth"),
     (signal.SIGTERM, 45, "epoch_001_step_00001.pth")],
)  # fmt: skip
def test_a_signal_saves_after_the_step_and_the_run_goes_on_exactly(
    number: int, after: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """44 steps are an epoch: a signal in the last of them ends the epoch, and the run."""
    with monkeypatch.context() as patch:
        signalled(patch, number, after)
        assert loop.train(Config(out=tmp_path / "parts", epochs=2)) == 128 + number
    assert (tmp_path / "parts" / "latest").read_text().strip() == name
    parts = run(tmp_path / "parts", resume="latest")
    assert same(run(tmp_path / "whole", epochs=2), parts)
    rows = [(tmp_path / each / "metrics.jsonl").read_text().splitlines() for each in ("whole", "parts")]
    assert json.loads(rows[0][1])["loss"] == json.loads(rows[1][1])["loss"]


def test_signals_are_as_before_after_a_run(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tmp_path, epochs=0)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_resumed_run_takes_its_recipe_from_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, epochs=1, model="lenet", width=2.0, lr=0.02, batch_size=64)
    result = CliRunner().invoke(command, ["--out", str(tmp_path), "--resume", "latest", "--epochs", "2"])
    assert result.exit_code == 0, result.output
    config = last(tmp_path)["config"]
    assert (config["model"], config["width"], config["lr"], config["batch_size"]) == ("lenet", 2.0, 0.02, 64)


def test_an_option_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    run(tmp_path, epochs=0)
    for option in ("--model lenet", "--seed 1", "--batch-size 64", "--lr 0.1"):
        result = CliRunner().invoke(command, ["--out", str(tmp_path), "--resume", "latest", *option.split()])
        assert (result.exit_code, f"{option} contradicts the checkpoint" in result.output) == (2, True), result.output


def test_resuming_a_path_goes_on_in_its_folder(tmp_path: Path) -> None:
    run(tmp_path, epochs=2)
    result = CliRunner().invoke(command, ["--resume", str(tmp_path / "epoch_001.pth"), "--epochs", "2"])
    assert result.exit_code == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_is_done_says_so(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    before = (tmp_path / "epoch_001.pth").stat().st_mtime_ns
    result = CliRunner().invoke(command, ["--out", str(tmp_path), "--resume", "latest"])
    assert result.exit_code == 0
    assert "nothing to do: 1 epochs are done; --epochs 2 would go on" in result.output
    assert (tmp_path / "epoch_001.pth").stat().st_mtime_ns == before


def test_a_new_run_does_not_write_into_the_folder_of_another(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    with pytest.raises(click.UsageError, match=r"holds checkpoints: go on from them with --resume latest"):
        run(tmp_path, epochs=1)


def test_a_pickled_module_holds_the_network_and_cannot_be_resumed(tmp_path: Path) -> None:
    loop.train(Config(out=tmp_path, epochs=1, save="module"))
    network = torch.load(tmp_path / "epoch_001.pth", weights_only=False)
    assert type(network).__name__ == "MLP"
    with pytest.raises(click.UsageError, match="cannot resume from"):
        run(tmp_path, resume="latest")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a checkpoint"])
def test_a_damaged_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "epoch_001.pth").write_bytes(content)
    result = CliRunner().invoke(command, ["--resume", str(tmp_path / "epoch_001.pth")])
    assert result.exit_code == 2
    assert "which is damaged" in result.output


@pytest.mark.parametrize(
    "content",
    [
        *({"model": {}}, {"config": {}}, [1, 2], {}),
        *(
            {**dict.fromkeys(checkpoint.PARTS), "config": config}
            for config in (None, 7, "model width", ["model"], {"model": "mlp"})
        ),
    ],
)
def test_a_file_that_is_no_training_checkpoint_is_one_sentence(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pth")
    result = CliRunner().invoke(command, ["--resume", str(tmp_path / "other.pth")])
    assert result.exit_code == 2
    assert "it has no" in result.output


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "file" / "out")])
    assert result.exit_code == 2
    assert "cannot write into the folder" in result.output


KILLED = """
import os, signal
from train.__main__ import main
replace, done = os.replace, []
def killed(*names):
    done.append(names)
    if any(str(name).endswith("epoch_002.pth") for name in names):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
os.replace = killed
main()
"""


def test_kill_9_in_the_middle_of_a_save_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    """What is written is there under another name: the run goes on from the epoch before, and takes it away."""
    options = ["--data", "synthetic", "--samples", "50", "--epochs", "3", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", KILLED, *options], env=environment(), cwd=ROOT, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if "002" in path.name]
    assert len(left) == 1
    assert left[0].name != "epoch_002.pth"
    assert last(tmp_path)["epoch"] == 1
    assert run(tmp_path, resume="latest", epochs=2)["epoch"] == 2
    assert not left[0].exists()
