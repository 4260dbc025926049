"""A resumed run is the run that stopped: its options, its images, its signals; and one command starts and restarts it."""

import json
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

import click
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tests.train.runs import ROOT, close, environment, last, run, same, signalled, spelled
from train import data
from train import train as loop
from train.__main__ import command, main
from train.config import Config, continued


def called(*options: object) -> Result:
    """The command line."""
    return CliRunner().invoke(command, [str(option) for option in options])


def stopped(out: Path, monkeypatch: pytest.MonkeyPatch, *, after: int, number: int = signal.SIGTERM, **options: Any) -> None:
    """A run that was sent a signal in one of its steps."""
    with monkeypatch.context() as patch:
        signalled(patch, number, after)
        assert loop.train(Config(out=out, **options), frozenset(options)) == 128 + number


def test_how_a_run_runs_and_saves_is_kept(tmp_path: Path) -> None:
    """All that --help lists, but for where it is; and each can be changed."""
    run(tmp_path, epochs=1, parallel="dp", save="wrapped", grad_accum=2, keep=2)
    assert called("--out", tmp_path, "--resume", "latest", "--epochs", 2).exit_code == 0
    config = last(tmp_path)["config"]
    assert [config[name] for name in ("parallel", "save", "grad_accum", "keep")] == ["dp", "wrapped", 2, 2]
    assert next(iter(last(tmp_path)["model"])).startswith("module.")
    assert called("--out", tmp_path, "--resume", "latest", "--epochs", 3, "--grad-accum", 1, "--keep", 1).exit_code == 0
    assert (last(tmp_path)["config"]["grad_accum"], last(tmp_path)["config"]["keep"]) == (1, 1)
    assert [path.name for path in tmp_path.glob("*.pth")] == ["epoch_003.pth"]


def test_another_mode_leaves_what_belongs_to_the_mode() -> None:
    saved = Config(parallel="ddp", sync_bn=True, save="wrapped", keep=3).plain()
    assert continued(Config(), saved, frozenset()).sync_bn
    single = continued(Config(parallel="single"), saved, frozenset({"parallel"}))
    assert (single.parallel, single.sync_bn, single.save, single.keep) == ("single", False, "unwrapped", 3)
    assert not continued(Config(sync_bn=False), saved, frozenset({"sync_bn"})).sync_bn


def test_a_run_of_ranks_says_how_it_goes_on(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    only_rank()
    run(tmp_path, epochs=1, parallel="ddp")
    only_rank()
    run(tmp_path, epochs=2, resume="latest")
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    refused = called("--out", tmp_path, "--resume", "latest", "--epochs", 3)
    assert refused.exit_code == 2
    assert "start it with torchrun --nproc-per-node 2 -m train --parallel ddp" in refused.output
    assert "or leave the checkpoint's mode with --parallel single" in refused.output
    assert called("--out", tmp_path, "--resume", "latest", "--epochs", 3, "--parallel", "single").exit_code == 0


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
    sets = data.load("digits")
    monkeypatch.setattr(data, "load", lambda *_, **options: tuple(map(Noisy, sets)))
    whole = run(tmp_path / "whole", epochs=2)
    stopped(tmp_path / "parts", monkeypatch, after=20, epochs=2, workers=2)
    assert not multiprocessing.active_children()
    assert same(whole, run(tmp_path / "parts", resume="latest"))
    assert not same(whole, run(tmp_path / "other", epochs=2, seed=1))


@pytest.mark.parametrize(
    ("part", "value", "sentence"),
    [
        ("step", 44, "epoch 0, step 44 is nowhere in epochs of 44 steps"), ("step", -1, "step -1 is nowhere"),
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
    refused = called("--out", tmp_path, "--resume", "latest", "--epochs", 2)
    assert refused.exit_code == 2, refused.output
    assert sentence in refused.output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("model", "vgg"), ("data", None), ("batch_size", 0), ("batch_size", "32"), ("lr", float("nan")), ("lr", "fast")),
        *(("parallel", "many"), ("epochs", -1), ("grad_accum", 1.5), ("sync_bn", 1), ("data_dir", 3), ("keep", 0)),
        *(
            ("keep", 1.5), ("model", ["mlp"]), ("lr", float("inf")), ("workers", True), ("shape", None), ("seed", [1]),
            ("epochs", float("inf")),
        ),
    ],
)  # fmt: skip
def test_a_broken_config_is_one_sentence(name: str, value: object, tmp_path: Path) -> None:
    saved = Config().plain() | {name: value}
    with pytest.raises(click.UsageError, match=f"the checkpoint's config has {name} = "):
        continued(Config(), saved, frozenset())


def test_the_figures_of_epochs_before_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Also where the run goes on elsewhere; what an abandoned run wrote of later epochs is dropped."""
    run(tmp_path / "a", epochs=3)
    run(tmp_path / "b", epochs=2, resume=str(tmp_path / "a" / "epoch_001.pth"))
    rows = [[json.loads(line) for line in (tmp_path / each / "metrics.jsonl").read_text().splitlines()] for each in "ab"]
    assert [row["epoch"] for row in rows[1]] == [1, 2]
    assert rows[0][0] == rows[1][0]


def test_auto_starts_anew_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command each time, as a scheduler gives it."""
    options = ["--out", tmp_path / "auto", "--resume", "auto", "--model", "mlp", "--epochs", 2]
    signalled(monkeypatch, signal.SIGTERM, 20, 60)
    assert [command([str(each) for each in options], standalone_mode=False) for _ in range(4)] == [143, 143, 0, 0]
    assert same(last(tmp_path / "auto"), run(tmp_path / "whole", epochs=2))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_lost_terminal_and_a_scheduler_s_warning_save(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP; and what Slurm's --signal and a limit on CPU time send."""
    stopped(tmp_path, monkeypatch, after=20, number=number, epochs=1)
    assert (tmp_path / "latest").read_text() == "epoch_000_step_00020.pth\n"


def test_what_nohup_ignores_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(AssertionError):
            stopped(tmp_path, monkeypatch, after=20, number=signal.SIGHUP, epochs=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "latest").read_text() == "epoch_001.pth\n"


def test_a_second_ctrl_c_quits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same step: nothing is saved, nothing of a save is left, and the exit code is that of Ctrl-C."""

    def twice(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(loop, "train_step", twice)
    monkeypatch.setattr("sys.argv", ["train", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 130
    assert not (tmp_path / "out").exists()


def test_ctrl_c_before_training_is_130_without_a_traceback(tmp_path: Path) -> None:
    """While torch is imported."""
    process = subprocess.Popen(
        [sys.executable, "-v", "-m", "train", "--out", str(tmp_path / "out")],
        env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("import 'torch._utils"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = {"data": "synthetic", "samples": 200, "resume": "auto"}


def test_a_restarted_torchrun_goes_on_by_itself(tmp_path: Path) -> None:
    """`torchrun --max-restarts` and `--resume auto`, with a rank that is killed in the second epoch: nothing is lost."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\nfrom train import train as loop\nfrom train.__main__ import main\nstep = loop.train_step\n"
        "def killed(run, *batch):\n"
        "    if (run.epoch, run.step, os.environ['TORCHELASTIC_RESTART_COUNT'], run.world.rank) == (1, 2, '0', 1):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(run, *batch)\n"
        "loop.train_step = killed\nmain()\n"
    )
    options = spelled({**SMALL, "parallel": "fsdp", "epochs": 2, "out": tmp_path / "out"})
    plain, launch = environment(PYTHONWARNINGS=""), [*TORCHRUN, "--max-restarts", "1", str(script)]
    done = subprocess.run([*launch, *options], env=plain, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch   2/2") == 1  # one rank speaks
    assert last(tmp_path / "out")["epoch"] == 2
    assert [json.loads(line)["epoch"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert close(last(tmp_path / "out"), run(tmp_path / "whole", **SMALL, epochs=2), tolerance=1e-5)


def children(parent: int) -> list[int]:
    """The processes that a process started and that still run."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if ppid(path) == parent]


def ppid(stat: Path) -> int:
    """Who started a process; 0 for one that has ended."""
    with suppress(OSError):
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        return 0 if state == "Z" else int(parent)
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path) -> None:
    """And another run goes on from there: the lock is free."""
    options = spelled({**SMALL, "parallel": "ddp", "epochs": 10_000, "keep": 1, "out": tmp_path})
    with subprocess.Popen([*TORCHRUN, "-m", "train", *options], env=environment(PYTHONWARNINGS=""), cwd=ROOT) as launcher:
        wait_until(lambda: (tmp_path / "latest").exists())
        started = children(launcher.pid)
        launcher.kill()
    assert len(started) == 2
    wait_until(lambda: not any(ppid(Path(f"/proc/{process}/stat")) for process in started))
    saved = last(tmp_path)
    assert run(tmp_path, **SMALL, parallel="single", epochs=saved["epoch"] + 1)["epoch"] == saved["epoch"] + 1


def wait_until(there: Callable[[], bool]) -> None:
    """At most two minutes."""
    end = time.monotonic() + 120
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)
