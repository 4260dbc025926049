"""A resumed run is the run that stopped: its images, its signals; and one command starts and restarts it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tests.train.runs import FEW, ROOT, called, close, environment, last, rows, run, same, signalled, spelled
from train import data
from train import train as loop
from train.__main__ import command, main
from train.config import Config


def stopped(out: Path, monkeypatch: pytest.MonkeyPatch, *, after: int, number: int = signal.SIGTERM, **options: Any) -> None:
    """A run that was sent a signal in one of its steps, of which seven are an epoch."""
    options = {**FEW, "weights": "none", **options}
    with monkeypatch.context() as patch:
        signalled(patch, number, after)
        assert loop.train(Config(out=out, **options), frozenset(options)) == 128 + number


@pytest.mark.parametrize(
    ("number", "after", "name"),
    [(signal.SIGINT, 9, "epoch_001_step_00002.pth"), (signal.SIGTERM, 7, "epoch_001.pth"),
     (signal.SIGTERM, 8, "epoch_001_step_00001.pth")],
)  # fmt: skip
def test_a_signal_saves_after_the_step_and_the_run_goes_on_exactly(
    number: int, after: int, name: str, whole: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the last step of an epoch ends the epoch, and the run; signals are as before it."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopped(tmp_path, monkeypatch, after=after, number=number, epochs=2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert (tmp_path / "latest").read_text().strip() == name
    assert same(whole[1], run(tmp_path, resume="latest"))
    assert rows(tmp_path)[1]["loss"] == rows(whole[0])[1]["loss"]


def test_a_run_of_ranks_says_how_it_goes_on(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    only_rank()
    run(tmp_path, epochs=1, parallel="ddp")
    only_rank()
    run(tmp_path, epochs=2, resume="latest")
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    refused = called("--out", tmp_path, "--resume", "latest", "--epochs", 3, code=2).output
    assert "start it with torchrun --nproc-per-node 2 -m train --parallel ddp" in refused
    assert "or leave the checkpoint's mode with --parallel single" in refused
    called("--out", tmp_path, "--resume", "latest", "--epochs", 3, "--parallel", "single")


class Noisy(Dataset[Any]):
    """Images under noise that is drawn as each is made."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, label = self.samples[index]
        return (pixels + torch.rand(pixels.shape) * 64) / 255, label


def test_what_is_drawn_for_a_batch_is_the_same_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Augmentation: random numbers drawn while a batch is made, by any number of workers, also in the middle of an epoch."""
    sets = data.load("synthetic", shape=FEW["shape"], samples=FEW["samples"])
    monkeypatch.setattr(data, "load", lambda *_, **options: tuple(map(Noisy, sets)))
    whole = run(tmp_path / "whole", epochs=2)
    stopped(tmp_path / "parts", monkeypatch, after=3, epochs=2, workers=2)
    assert not multiprocessing.active_children()
    assert same(whole, run(tmp_path / "parts", resume="latest"))
    assert not same(whole, run(tmp_path / "other", epochs=2, seed=1))


def test_auto_starts_anew_and_goes_on(whole: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = spelled({"out": tmp_path, "resume": "auto", "model": "mlp", "epochs": 2, **FEW})
    signalled(monkeypatch, signal.SIGTERM, 3, 9)
    assert [command(options, standalone_mode=False) for _ in range(4)] == [143, 143, 0, 0]
    assert same(last(tmp_path), whole[1])


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_lost_terminal_and_a_scheduler_s_warning_save(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP; and what Slurm's --signal and a limit on CPU time send. What nohup ignores stays ignored."""
    stopped(tmp_path, monkeypatch, after=3, number=number, epochs=1)
    assert (tmp_path / "latest").read_text() == "epoch_000_step_00003.pth\n"
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
        with pytest.raises(AssertionError):
            stopped(tmp_path / "nohup", monkeypatch, after=3, number=number, epochs=1)
        assert (tmp_path / "nohup" / "latest").read_text() == "epoch_001.pth\n"


def test_a_second_ctrl_c_quits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same step: nothing is saved, nothing of a save is left, and the exit code is that of Ctrl-C."""

    def twice(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(loop, "train_step", twice)
    monkeypatch.setattr("sys.argv", ["train", *spelled({**FEW, "out": tmp_path / "out"})])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 130
    assert not (tmp_path / "out").exists()


def test_ctrl_c_before_training_is_130_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-v", "-m", "train", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("import 'torch._utils"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


KILLED = """
import os, signal
from train import train as loop
from train.__main__ import main
step = loop.train_step
def killed(run, *batch):
    if (run.epoch, run.step, os.environ["TORCHELASTIC_RESTART_COUNT"], run.world.rank) == (1, 2, "0", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(run, *batch)
loop.train_step = killed
main()
"""


def ppid(stat: Path) -> int:
    """Who started a process; 0 for one that has ended."""
    with suppress(OSError):
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        return 0 if state == "Z" else int(parent)
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_restarts_a_run_which_saves_where_the_launcher_dies(tmp_path: Path) -> None:
    """`--max-restarts` and `--resume auto`, with a rank that is killed in the second epoch: nothing is lost, one rank speaks.

    And where torchrun itself is killed the ranks save and end, and another run goes on from there: the lock is free.
    """
    script, out, said = tmp_path / "killed.py", tmp_path / "out", tmp_path / "said"
    script.write_text(KILLED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    options = spelled({**FEW, "resume": "auto", "parallel": "fsdp", "epochs": 10_000, "out": out})
    plain = environment(PYTHONWARNINGS="", PYTHONUNBUFFERED="1")
    with said.open("w") as file, subprocess.Popen([*launch, script, *options], env=plain, cwd=ROOT, stdout=file) as launcher:
        wait_until(lambda: (out / "latest").exists() and (out / "latest").read_text() >= "epoch_003")
        stats = [path for path in Path("/proc").glob("[0-9]*/stat") if ppid(path) == launcher.pid]
        launcher.kill()
    assert len(stats) == 2
    wait_until(lambda: not any(map(ppid, stats)))
    assert said.read_text().count("epoch   2/10000") == 1
    assert [row["epoch"] for row in rows(out)] == [*range(1, len(rows(out)) + 1)]
    epoch_2: Any = torch.load(out / "epoch_002.pth", weights_only=True)
    assert close(epoch_2, run(tmp_path / "whole", epochs=2), tolerance=1e-5)
    saved = last(out)
    assert run(out, resume="auto", parallel="single", epochs=saved["epoch"] + 1)["epoch"] == saved["epoch"] + 1


def wait_until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)
