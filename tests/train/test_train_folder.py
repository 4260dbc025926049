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

from ckpt_tools.torch import load
from tests.train.runs import FEW, called, last, run, same, spelled
from train import train as loop
from train.__main__ import main
from train.checkpoint import checkpoints, newest, prune
from train.config import Config
from train.parallel import leave


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("epoch_*"))


def flip(path: Path, state_dict: Any) -> None:
    """Turns one bit of the file, in the middle of its weights."""
    content, weights = bytearray(path.read_bytes()), state_dict["fc1.weight"].numpy().tobytes()
    content[content.index(weights[4000:4100]) + 3] ^= 0x40
    path.write_bytes(content)


def test_keep_goes_by_epoch_and_not_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were copied, or written before the clock was turned back, have later times than the newest.

    Who goes back to an earlier epoch loses neither what is written now nor what was there.
    """
    monkeypatch.setattr(loop, "evaluate", lambda run: (1.0, run.epoch / 10))  # the last is the best, which stays
    run(tmp_path, epochs=2)
    for path in tmp_path.glob("epoch_*"):
        os.utime(path, (4e9, 4e9))
    run(tmp_path, epochs=3, keep=1, resume="latest")
    assert (names(tmp_path), last(tmp_path)["epoch"]) == (["epoch_003.pth"], 3)
    run(tmp_path / "back", epochs=3)
    (tmp_path / "back" / "epoch_best.pth").touch()
    run(tmp_path / "back", epochs=2, keep=1, resume=str(tmp_path / "back" / "epoch_001.pth"))
    assert names(tmp_path / "back") == ["epoch_002.pth", "epoch_003.pth", "epoch_best.pth"]
    assert last(tmp_path / "back")["epoch"] == 2


def test_steps_come_after_their_epoch_and_thousands_after_hundreds(tmp_path: Path) -> None:
    ordered = ["epoch_009.pth", "epoch_009_step_00002.pth", "epoch_009_step_00010.pth", "epoch_999", "epoch_1000.pth"]
    for name in sorted(ordered):
        (tmp_path / name).touch()
    assert [path.name for path in checkpoints(tmp_path)] == ordered


def test_a_checkpoint_does_not_go_on_in_the_folder_of_another_run(tmp_path: Path) -> None:
    run(tmp_path / "a", epochs=1)
    run(tmp_path / "b", epochs=2, seed=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    refused = called("--resume", tmp_path / "a" / "epoch_001.pth", "--out", tmp_path / "b", "--epochs", 2, code=2)
    assert "holds another run" in refused.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before | {".lock": before[".lock"]}


# Another run, as far as the lock is concerned: takes it, says so, and keeps it until it is told to end.
OTHER = (
    "import fcntl, sys\nfile = open(sys.argv[1], 'a')\nfcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "print('locked', flush=True)\nsys.stdin.read()\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")
def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-S", "-c", OTHER, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        refused = called("--out", tmp_path, "--epochs", 1, code=2)
        assert f"another run writes into {tmp_path}: wait for its end" in refused.output
        assert names(tmp_path) == []
        holder.kill()
    step, codes = loop.train_step, set()

    def trying(*arguments: Any) -> None:
        codes.add(subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode)
        step(*arguments)

    monkeypatch.setattr(loop, "train_step", trying)
    called("--out", tmp_path, "--epochs", 1, "--data", "synthetic", "--samples", 80)
    assert codes == {1}
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert run(tmp_path / "without", epochs=0)["epoch"] == 0


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "cannot write into the folder" in called("--out", tmp_path / "file" / "out", code=2).output


def test_a_flipped_bit_makes_latest_go_on_from_the_checkpoint_before(whole: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "flipped")
    latest = tmp_path / "flipped" / "epoch_002.pth"
    flip(latest, whole[1]["model"])
    assert "which is damaged: the record" in called("--resume", latest, "--epochs", 3, code=2).output
    resumed = called("--out", latest.parent, "--resume", "latest")
    assert f"cannot read {latest}, which is damaged" in resumed.stderr
    assert f"going on from {latest.parent / 'epoch_001.pth'}" in resumed.stderr
    assert same(whole[1], last(latest.parent))


def test_a_flipped_bit_in_a_folder_is_noticed(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    only_rank()
    options: dict[str, Any] = {"parallel": "fsdp", "save": "dcp", "epochs": 2, **FEW}
    assert loop.train(Config(out=tmp_path, **options), frozenset(options)) == 0
    part = next(path for path in (tmp_path / "epoch_002").iterdir() if path.name != ".metadata")
    flip(part, load(tmp_path / "epoch_002")["model"])
    assert newest(tmp_path).name == "epoch_001"


def test_what_links_lead_to_is_not_overwritten(whole: tuple[Path, Any], tmp_path: Path) -> None:
    """`latest` as others have it, and a checkpoint of another run: a link goes, its target stays."""
    for name in "ab":
        shutil.copytree(whole[0], tmp_path / name)
    for name, target in (("latest", "epoch_001.pth"), ("epoch_002.pth", tmp_path / "a" / "epoch_002.pth")):
        (tmp_path / "b" / name).unlink()
        (tmp_path / "b" / name).symlink_to(target)
    before = {path: path.read_bytes() for path in (tmp_path / "a" / "epoch_002.pth", tmp_path / "b" / "epoch_001.pth")}
    assert "going on" not in called("--out", tmp_path / "b", "--resume", "latest", "--epochs", 2).stderr
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
    refused = called("--out", tmp_path, "--resume", "auto", "--epochs", 2, code=2)
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
    few = spelled({"data": "synthetic", "samples": 100, "epochs": 1, "out": tmp_path / "out"})
    monkeypatch.setattr(sys, "argv", ["train", *few, *options])
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
def test_a_broken_latest_is_one_sentence_and_the_newest_is_taken(
    content: bytes | None, whole: tuple[Path, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    (out / "latest").unlink()
    if content is not None:
        (out / "latest").write_bytes(content)
    resumed = called("--out", out, "--resume", "latest", "--epochs", 3)
    assert f"latest names no checkpoint; going on from {out / 'epoch_002.pth'}" in resumed.stderr
    assert last(out)["epoch"] == 3


@pytest.mark.parametrize("first", ["loss", "weights"])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the weights are lost in the last step, whose own loss was still a number."""
    step = loop.train_step

    def diverging(run: loop.Run, *batch: torch.Tensor) -> None:
        step(run, *batch)
        if run.epoch == 1 and run.step == (3 if first == "loss" else 6):
            next(run.network.parameters()).data[0, 0] = torch.nan

    monkeypatch.setattr(loop, "train_step", diverging)
    assert loop.train(Config(out=tmp_path, epochs=3, keep=1, **FEW)) == 1
    assert "the loss is not finite, 7 steps into epoch 2: stopped" in capsys.readouterr().out
    assert last(tmp_path)["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in last(tmp_path)["model"].values())
