"""No checkpoint is lost: to a clock, to another run in the folder, to flipped bits, to a loss that is not a number."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ckpt_tools.torch import load
from tests.train.runs import last, run, same
from train import train as loop
from train.__main__ import command, main
from train.checkpoint import checkpoints, newest, prune
from train.config import Config
from train.parallel import leave

# Takes the lock as a run does, says so, and keeps it until it is told to end.
HOLDER = """
import sys, threading
from pathlib import Path
from torch import device
from train.checkpoint import owned
from train.parallel import World
with owned(Path(sys.argv[1]), World((device("cpu"),))):
    print("locked", flush=True)
    sys.stdin.read()
"""


def called(*options: object) -> Result:
    """The command line."""
    return CliRunner().invoke(command, [str(option) for option in options])


def names(folder: Path) -> list[str]:
    """The checkpoints that lie there."""
    return sorted(path.name for path in folder.glob("epoch_*"))


def flip(path: Path, at: bytes) -> None:
    """Turns one bit of the file, in the bytes `at`."""
    content = bytearray(path.read_bytes())
    content[content.index(at) + 3] ^= 0x40
    path.write_bytes(content)


def weights(path: Path) -> bytes:
    """Bytes that are in the middle of the weights of a file."""
    values: torch.Tensor = torch.load(path, weights_only=True)["model"]["fc1.weight"]
    return values.numpy().tobytes()[4000:4100]


def test_keep_goes_by_epoch_and_not_by_the_clock(tmp_path: Path) -> None:
    """Files that were copied, or written before the clock was turned back, have later times than the newest."""
    run(tmp_path, epochs=2)
    for path in tmp_path.glob("epoch_*"):
        os.utime(path, (4e9, 4e9))
    run(tmp_path, epochs=3, keep=1, resume="latest")
    assert names(tmp_path) == ["epoch_003.pth"]
    assert last(tmp_path)["epoch"] == 3


def test_keep_takes_nothing_that_comes_after_what_was_written(tmp_path: Path) -> None:
    """Who goes back to an earlier epoch loses neither what is written now nor what was there."""
    run(tmp_path, epochs=3)
    (tmp_path / "epoch_best.pth").touch()
    run(tmp_path, epochs=2, keep=1, resume=str(tmp_path / "epoch_001.pth"))
    assert names(tmp_path) == ["epoch_002.pth", "epoch_003.pth", "epoch_best.pth"]
    assert last(tmp_path)["epoch"] == 2


def test_steps_come_after_their_epoch_and_thousands_after_hundreds(tmp_path: Path) -> None:
    ordered = ["epoch_009.pth", "epoch_009_step_00002.pth", "epoch_009_step_00010.pth", "epoch_999", "epoch_1000.pth"]
    for name in sorted(ordered):
        (tmp_path / name).touch()
    assert [path.name for path in checkpoints(tmp_path)] == ordered


def test_a_checkpoint_does_not_go_on_in_the_folder_of_another_run(tmp_path: Path) -> None:
    run(tmp_path / "a", epochs=1)
    run(tmp_path / "b", epochs=2, seed=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    refused = called("--resume", tmp_path / "a" / "epoch_001.pth", "--out", tmp_path / "b", "--epochs", 2)
    assert refused.exit_code == 2
    assert "holds another run" in refused.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before | {".lock": before[".lock"]}


def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        refused = called("--out", tmp_path, "--epochs", 1)
        assert refused.exit_code == 2
        assert f"another run writes into {tmp_path}: wait for its end" in refused.output
        assert names(tmp_path) == []
        holder.kill()
    assert called("--out", tmp_path, "--epochs", 1).exit_code == 0


def test_a_run_without_locks_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert run(tmp_path, epochs=0)["epoch"] == 0


def test_a_flipped_bit_makes_latest_go_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", epochs=3)
    shutil.copytree(tmp_path / "whole", tmp_path / "flipped")
    newest = tmp_path / "flipped" / "epoch_003.pth"
    flip(newest, weights(newest))
    resumed = called("--out", newest.parent, "--resume", "latest")
    assert resumed.exit_code == 0, resumed.output
    assert f"cannot read {newest}, which is damaged" in resumed.stderr
    assert f"going on from {newest.parent / 'epoch_002.pth'}" in resumed.stderr
    assert same(whole, last(newest.parent))


def test_a_flipped_bit_in_a_named_file_is_refused(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    flip(tmp_path / "epoch_001.pth", weights(tmp_path / "epoch_001.pth"))
    refused = called("--resume", tmp_path / "epoch_001.pth", "--epochs", 2)
    assert refused.exit_code == 2
    assert "which is damaged: the record" in refused.output


def test_a_flipped_bit_in_a_folder_is_noticed(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    only_rank()
    options: dict[str, Any] = {"parallel": "fsdp", "save": "dcp", "epochs": 2}
    assert loop.train(Config(out=tmp_path, **options), frozenset(options)) == 0
    part = next(path for path in (tmp_path / "epoch_002").iterdir() if path.name != ".metadata")
    flip(part, load(tmp_path / "epoch_002")["model"]["fc1.weight"].numpy().tobytes()[4000:4100])
    assert newest(tmp_path).name == "epoch_001"


def test_what_links_lead_to_is_not_overwritten(tmp_path: Path) -> None:
    """`latest` as others have it, and a checkpoint of another run: a link goes, its target stays."""
    run(tmp_path / "a", epochs=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "latest").unlink()
    (tmp_path / "b" / "latest").symlink_to("epoch_001.pth")
    (tmp_path / "b" / "epoch_002.pth").unlink()
    (tmp_path / "b" / "epoch_002.pth").symlink_to(tmp_path / "a" / "epoch_002.pth")
    before = {path: path.read_bytes() for path in (tmp_path / "a" / "epoch_002.pth", tmp_path / "b" / "epoch_001.pth")}
    resumed = called("--out", tmp_path / "b", "--resume", "latest", "--epochs", 2)
    assert resumed.exit_code == 0, resumed.output
    assert "going on" not in resumed.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert (last(tmp_path / "b")["epoch"], (tmp_path / "b" / "epoch_002.pth").is_symlink()) == (2, False)


def test_keep_removes_a_link_and_not_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "epoch_000").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out" / "epoch_001.pth").touch()
    prune(tmp_path / "out" / "epoch_001.pth", keep=1)
    assert names(tmp_path / "out") == ["epoch_001.pth"]
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize("kind", ["a checkpoint", "a folder"])
def test_a_latest_that_no_run_wrote_is_left_alone(kind: str, tmp_path: Path) -> None:
    """Some call the checkpoint itself so: it is said before the first epoch, and stays."""
    run(tmp_path, epochs=1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir() if kind == "a folder" else shutil.copy(tmp_path / "epoch_001.pth", tmp_path / "latest")
    refused = called("--out", tmp_path, "--resume", "auto", "--epochs", 2)
    assert refused.exit_code == 2
    assert "latest is not the name of a checkpoint" in refused.output
    assert names(tmp_path) == ["epoch_001.pth"]
    assert (tmp_path / "latest").is_dir() or (tmp_path / "latest").stat().st_size > 100_000


@contextmanager
def nearly_full(room: int) -> Iterator[None]:
    """No file grows beyond `room` bytes: the system says EFBIG, as on a full disk ENOSPC."""
    resource = pytest.importorskip("resource")  # Windows has none
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize(
    ("room", "options", "unwritten"),
    [(0, [], "metrics.jsonl"), (1_000, [], "epoch_001.pth"), (1_000, ["--parallel", "fsdp", "--save", "dcp"], "epoch_001")],
)
def test_a_full_disk_is_one_sentence_and_exit_code_3(
    room: int, options: list[str], unwritten: str, tmp_path: Path, only_rank: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whatever is being written; the next run takes away what is left of it, and saves."""
    few = ["--data", "synthetic", "--samples", "100", "--epochs", "1", "--out", str(tmp_path / "out"), *options]
    monkeypatch.setattr(sys, "argv", ["train", *few])
    for code, limit in ((3, nearly_full(room)), (0, nullcontext())):
        if "fsdp" in options:
            only_rank()
        with limit, pytest.raises(SystemExit) as exit:
            main()
        leave()  # a rank that failed just ends, which this process does not
        assert exit.value.code == code
        assert (f"{unwritten} cannot be written" in capsys.readouterr().err) is (code == 3)
        assert (tmp_path / "out" / "latest").exists() is (code == 0)
    assert not list((tmp_path / "out").glob(".epoch*"))


@pytest.mark.parametrize("content", [None, b"epoch_007.pth\n", b"../epoch_001.pth\n", b"\xff\xfe\x00\n"])
def test_a_broken_latest_is_one_sentence_and_the_newest_is_taken(content: bytes | None, tmp_path: Path) -> None:
    run(tmp_path, epochs=2)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    resumed = called("--out", tmp_path, "--resume", "latest", "--epochs", 3)
    assert resumed.exit_code == 0, resumed.output
    assert f"latest names no checkpoint; going on from {tmp_path / 'epoch_002.pth'}" in resumed.stderr
    assert last(tmp_path)["epoch"] == 3


@pytest.mark.parametrize("first", ["loss", "weights"])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the weights are lost in the last step, whose own loss was still a number."""
    step = loop.train_step

    def diverging(run: loop.Run, *batch: torch.Tensor) -> None:
        step(run, *batch)
        if run.epoch == 1 and run.step == (20 if first == "loss" else 43):
            next(run.network.parameters()).data[0, 0] = torch.nan

    monkeypatch.setattr(loop, "train_step", diverging)
    assert loop.train(Config(out=tmp_path, epochs=3, keep=1)) == 1
    assert "the loss is not finite, 44 steps into epoch 2: stopped" in capsys.readouterr().out
    assert last(tmp_path)["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in last(tmp_path)["model"].values())
