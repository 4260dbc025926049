"""A checkpoint is whole, plain, and goes on to the very weights of a run that never stopped."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from ckpt_tools.torch import load_state_dict
from tests.train.runs import FEW, RESNET, ROOT, called, environment, last, rows, run, same, spelled
from train import checkpoint
from train import train as loop
from train.config import Config, continued


@pytest.mark.usefixtures("curves")
def test_a_run_leaves_a_checkpoint_an_epoch_and_a_pointer_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain data with everything a run needs; and curves, where matplotlib is."""
    pytest.importorskip("matplotlib")
    saved = run(tmp_path, epochs=2, data="digits", schedule="cosine")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "best", "curves.png", "epoch_001.pth", "epoch_002.pth", "latest", "metrics.jsonl"]
    assert (tmp_path / "latest").read_text() == "epoch_002.pth\n"
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    assert rows(tmp_path)[1]["test_accuracy"] > rows(tmp_path)[0]["test_accuracy"] > 0.7
    assert list(saved) == [*checkpoint.PARTS, "metrics", "torch"]
    assert list(saved["model"]) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert load_state_dict(tmp_path / "epoch_001.pth", select="model").keys() == saved["model"].keys()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path / "without", epochs=1)
    assert "no curves.png: pip install matplotlib" in capsys.readouterr().out


def test_a_run_that_goes_on_elsewhere_is_the_whole_run(tmp_path: Path) -> None:
    """Bit for bit, with all that has a state in use, a schedule among it; the figures of the epochs before come along."""
    whole = run(tmp_path / "whole", **RESNET, schedule="cosine", seed=3, amp="bf16")
    parts = run(tmp_path / "parts", resume=str(tmp_path / "whole" / "epoch_001.pth"))
    assert same(whole, parts)
    assert all(whole[part] == parts[part] for part in ("scaler", "epoch", "step", "totals"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert [round(row["lr"], 4) for row in rows(tmp_path / "parts")] == [0.025, 0]


def test_a_resumed_run_takes_its_recipe_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that --help lists, but for where it is; what contradicts it is refused, and how it runs and saves can be changed."""
    monkeypatch.setattr(loop, "evaluate", lambda run: (1.0, run.epoch / 10))  # the last is the best, which stays
    recipe = {"model": "lenet", "width": 2.0, "lr": 0.02, "batch_size": 64}
    kept = {"parallel": "dp", "save": "wrapped", "grad_accum": 2, "keep": 2}
    run(tmp_path, epochs=1, **recipe, **kept)
    called("--out", tmp_path, "--resume", "latest", "--epochs", 2)
    saved = last(tmp_path)
    assert {name: saved["config"][name] for name in recipe | kept} == recipe | kept
    assert next(iter(saved["model"])).startswith("module.")
    for option in ("--model mlp", "--seed 1", "--batch-size 32", "--lr 0.1"):
        told = called("--out", tmp_path, "--resume", "latest", *option.split(), code=2).output
        assert f"{option} contradicts the checkpoint" in told
    called("--out", tmp_path, "--resume", "latest", "--epochs", 3, "--grad-accum", 1, "--keep", 1)
    assert (last(tmp_path)["config"]["grad_accum"], last(tmp_path)["config"]["keep"]) == (1, 1)
    assert [path.name for path in tmp_path.glob("*.pth")] == ["epoch_003.pth"]


def test_another_mode_leaves_what_belongs_to_the_mode() -> None:
    saved = Config(parallel="ddp", sync_bn=True, save="wrapped", keep=3).plain()
    assert continued(Config(), saved, frozenset()).sync_bn
    single = continued(Config(parallel="single"), saved, frozenset({"parallel"}))
    assert (single.parallel, single.sync_bn, single.save, single.keep) == ("single", False, "unwrapped", 3)
    assert not continued(Config(sync_bn=False), saved, frozenset({"sync_bn"})).sync_bn


def test_resuming_a_path_goes_on_in_its_folder(tmp_path: Path) -> None:
    """What an abandoned run wrote of later epochs is dropped; a run that is done says so, and no new one begins there."""
    run(tmp_path, epochs=3)
    called("--resume", tmp_path / "epoch_001.pth", "--epochs", 2)
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    before = (tmp_path / "epoch_002.pth").stat().st_mtime_ns
    done = called("--out", tmp_path, "--resume", "latest")
    assert "nothing to do: 2 epochs are done; --epochs 3 would go on" in done.output
    assert (tmp_path / "epoch_002.pth").stat().st_mtime_ns == before
    with pytest.raises(click.UsageError, match=r"holds checkpoints: go on from them with --resume latest"):
        run(tmp_path, epochs=1)


def test_a_pickled_module_holds_the_network_and_cannot_be_resumed(tmp_path: Path) -> None:
    assert loop.train(Config(out=tmp_path, epochs=1, save="module", **FEW)) == 0
    network = torch.load(tmp_path / "epoch_001.pth", weights_only=False)
    assert type(network).__name__ == "MLP"
    with pytest.raises(click.UsageError, match="cannot resume from"):
        run(tmp_path, resume="latest")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK\x03\x04", b"not a checkpoint", {"model": {}}, {"config": {}}, [1, 2], {},
        *({**dict.fromkeys(checkpoint.PARTS), "config": config}
          for config in (None, 7, "model width", ["model"], {"model": "mlp"})),
    ],
)  # fmt: skip
def test_what_is_no_training_checkpoint_is_one_sentence(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    told = called("--resume", path, code=2).output
    assert ("which is damaged" if isinstance(content, bytes) else "it has no") in told


@pytest.mark.parametrize(
    ("part", "value", "sentence"),
    [
        ("step", 7, "epoch 0, step 7 is nowhere in epochs of 7 steps"), ("step", -1, "step -1 is nowhere"),
        ("step", "ten", "step ten is nowhere"), ("epoch", -3, "epoch -3, step 0 is nowhere"),
        ("epoch", None, "epoch None, step 0 is nowhere"),
        ("model", {"fc1.weight": torch.zeros(1)}, "does not fit its own config: Error(s) in loading state_dict"),
        ("optimizer", {"state": {}, "param_groups": []}, "does not fit its own config"),
        ("seconds", None, "does not fit its own config"),
        ("totals", "none", "does not fit its own config"),
    ],
)  # fmt: skip
def test_a_broken_part_is_one_sentence(part: str, value: object, sentence: str, tmp_path: Path) -> None:
    saved = run(tmp_path, epochs=0)
    torch.save(saved | {part: value}, tmp_path / "epoch_000.pth")
    assert sentence in called("--out", tmp_path, "--resume", "latest", "--epochs", 2, code=2).output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "vgg"), ("data", None), ("batch_size", 0), ("batch_size", "32"), ("lr", float("nan")), ("lr", "fast"),
        ("parallel", "many"), ("epochs", -1), ("grad_accum", 1.5), ("sync_bn", 1), ("data_dir", 3), ("keep", 0), ("keep", 1.5),
        ("model", ["mlp"]), ("lr", float("inf")), ("workers", True), ("shape", None), ("seed", [1]), ("epochs", float("inf")),
    ],
)  # fmt: skip
def test_a_broken_config_is_one_sentence(name: str, value: object) -> None:
    saved = Config().plain() | {name: value}
    with pytest.raises(click.UsageError, match=f"the checkpoint's config has {name} = "):
        continued(Config(), saved, frozenset())


KILLED = """
import os, signal
from train.__main__ import main
replace = os.replace
def killed(*names):
    if any(str(name).endswith("epoch_002.pth") for name in names):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
os.replace = killed
main()
"""


def test_kill_9_in_the_middle_of_a_save_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    """What is written is there under another name: the run goes on from the epoch before, and takes it away."""
    options = spelled({"data": "synthetic", "samples": 50, "epochs": 3, "out": tmp_path})
    done = subprocess.run([sys.executable, "-c", KILLED, *options], env=environment(), cwd=ROOT, check=False, timeout=300)
    assert done.returncode == -9
    left = [path for path in tmp_path.iterdir() if "002" in path.name]
    assert [path.name != "epoch_002.pth" for path in left] == [True]
    assert last(tmp_path)["epoch"] == 1
    assert run(tmp_path, resume="latest", epochs=2)["epoch"] == 2
    assert not left[0].exists()
