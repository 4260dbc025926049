"""A wrong run is refused early, in one sentence with exit code 2."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from train.__main__ import command, main
from train.config import Config

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def refusal(options: str, out: Path) -> str:
    """What the command says to options that it must refuse."""
    result = CliRunner().invoke(command, [*options.split(), "--out", str(out)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert not out.exists()
    return result.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--model vgg", "'vgg' is not one of mlp, lenet"),
        ("--parallel ddp", "torchrun --nproc-per-node 2 -m train --parallel ddp"),
        ("--parallel fsdp", "torchrun --nproc-per-node 2 -m train --parallel fsdp"),
        ("--parallel fsdp --save wrapped", "FSDP2 has no wrapper"),
        ("--parallel fsdp --save module", "--save module: FSDP2 has no wrapper"),
        ("--save dcp --parallel ddp", "belongs to --parallel fsdp"),
        ("--batch-size 10 --grad-accum 4", "--batch-size 10 does not divide into 4 equal parts"),
        ("--model resnet18 --batch-size 1", "resnet18 normalises batches"), ("--batch-size 1439", "more than the 1438 images"),
        ("--change lr=1", "--change belongs to --resume"), ("--on-mismatch reinit", "--on-mismatch belongs to --init-from"),
        ("--samples 100", "--samples belongs to --data synthetic"),
        ("--shape 3x9x7", "--shape belongs to --data synthetic"),
        ("--evaluate a.pth --resume latest", "leave --init-from and --evaluate out"), ("--lr inf", "inf is not in the range"),
        ("--sync-bn", "--sync-bn belongs to --parallel ddp"),
        ("--find-unused-parameters", "--find-unused-parameters belongs to --parallel ddp"),
        ("--compile --parallel dp", "--compile does not go with --parallel dp: take ddp or single"),
        ("--device tpu", "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        ("--data mnist --data-dir none", "none has no whole mnist: put MNIST/raw/train-images-idx3-ubyte"),
        ("--data cifar10 --data-dir none", "none has no whole cifar10: put cifar-10-batches-py/data_batch_1"),
        ("--resume latest", "there is no"),
        ("--resume nowhere.pth", "There is no such file"), ("--epochs -1", "-1 is not in the range"),
        pytest.param("--device cuda", "sees no GPU here", marks=no_gpu),
    ],
)  # fmt: skip
def test_a_wrong_run_is_refused(options: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(options, tmp_path / "out")


@pytest.mark.parametrize("mode", ["single", "dp"])
def test_one_process_modes_are_refused_under_torchrun(mode: str, tmp_path: Path, only_rank: Callable[[], None]) -> None:
    only_rank()
    assert "torchrun starts --parallel ddp and fsdp" in refusal(f"--parallel {mode}", tmp_path / "out")


@no_gpu
def test_batch_statistics_over_processes_need_gpus(tmp_path: Path, only_rank: Callable[[], None]) -> None:
    only_rank()
    assert "on GPUs only" in refusal("--parallel ddp --device cpu --sync-bn", tmp_path / "out")


def test_more_processes_than_gpus_are_refused(
    tmp_path: Path, only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_rank()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "2 processes were started here and there are 1 GPUs" in refusal("--parallel ddp", tmp_path / "out")


def test_a_mistake_is_said_by_one_rank_alone(
    only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_rank()
    monkeypatch.setattr("sys.argv", ["train", "--save", "dcp"])
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == 2
        assert ("belongs to --parallel fsdp" in capsys.readouterr().err) is said


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(command, ["--help-all"])
    assert result.exit_code == 0
    names = [field.name.replace("_", "-") for field in fields(Config) if field.name != "local_rank"]
    assert all(f"--{name} " in result.output for name in names)


def test_the_older_launcher_s_argument_is_taken(
    tmp_path: Path, only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_rank()
    monkeypatch.delenv("LOCAL_RANK")
    options = ["--parallel", "ddp", "--local_rank=0", "--epochs", "0", "--out", str(tmp_path)]
    assert CliRunner().invoke(command, options).exit_code == 0
