"""A wrong run is refused early, in one sentence with exit code 2."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.train.runs import called
from train.__main__ import main
from train.config import Config

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def refusal(options: str, out: Path) -> str:
    """What the command says to options that it must refuse."""
    told = called(*options.split(), "--out", out, code=2).output
    assert not out.exists()
    return told


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
        *((f"--data synthetic --shape {shape}", "is not CHANNELSxHEIGHTxWIDTH") for shape in ("28x28", "axbxc", "3x0x4")),
        ("--evaluate a.pth --resume latest", "leave --init-from and --evaluate out"), ("--lr inf", "inf is not in the range"),
        ("--sync-bn", "--sync-bn belongs to --parallel ddp"),
        ("--find-unused-parameters", "--find-unused-parameters belongs to --parallel ddp"),
        ("--compile --parallel dp", "--compile does not go with --parallel dp: take ddp or single"),
        ("--device tpu", "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        ("--data mnist --data-dir none", "none has no whole mnist: put MNIST/raw/train-images-idx3-ubyte"),
        ("--data cifar10 --data-dir none", "none has no whole cifar10: put cifar-10-batches-py/data_batch_1"),
        ("--data fashion-mnist --data-dir none", "there; --data digits works now"),
        ("--resume latest", "there is no"), ("--model none_such:net", "none_such:net cannot be used"),
        ("--resume nowhere.pth", "There is no such file"), ("--epochs -1", "-1 is not in the range"),
        pytest.param("--device cuda", "sees no GPU here", marks=no_gpu),
    ],
)  # fmt: skip
def test_a_wrong_run_is_refused(options: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(options, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--parallel single", "torchrun starts --parallel ddp and fsdp"),
        ("--parallel dp", "torchrun starts --parallel ddp and fsdp"),
        ("--evaluate nowhere.pth", "leave torchrun out"),
        pytest.param("--parallel ddp --device cpu --sync-bn", "on GPUs only", marks=no_gpu),
    ],
)
def test_what_is_refused_under_torchrun(options: str, sentence: str, tmp_path: Path, only_rank: Callable[[], None]) -> None:
    only_rank()
    assert sentence in refusal(options, tmp_path / "out")


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
    said = called("--help-all").output
    assert all(f"--{field.name.replace('_', '-')} " in said for field in fields(Config) if field.name != "local_rank")


def test_the_older_launcher_s_argument_is_taken(
    tmp_path: Path, only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_rank()
    monkeypatch.delenv("LOCAL_RANK")
    called("--parallel", "ddp", "--local_rank=0", "--epochs", 0, "--data", "synthetic", "--samples", 80, "--out", tmp_path)
