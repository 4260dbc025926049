"""Sharded conversion by several processes, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_tools import convert
from ckpt_tools.errors import OutputError
from ckpt_tools.ranks import Ranks

ROOT = Path(__file__).parent.parent


def launch(count: int, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m ckpt_tools ARGUMENTS` in so many processes under PyTorch's launcher; `before` is run in each first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    code = f"import os, sys; sys.argv[0] = 'ckpt'; {before}\nfrom ckpt_tools.cli import main; main()"
    job = [*command, "--no-python", sys.executable, "-c", code] if before else [*command, "-m", "ckpt_tools"]
    return subprocess.run([*job, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=180)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Tensors for half a dozen shards."""
    torch.manual_seed(0)
    state = {f"layers.{i}.weight": torch.randn(50 + i, 10) for i in range(6)}
    torch.save(state | {"tied": state["layers.0.weight"]}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("count", [2, 4])
def test_the_same_bytes_as_one_process(source: Path, tmp_path: Path, count: int) -> None:
    """Two and four processes write what one writes, and one of them reports; a cast counts across all."""
    options = ["--shard-size", "1200", "--dtype", "fp16"]
    done = launch(count, "convert", str(source), str(tmp_path / "many"), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    convert(source, tmp_path / "one", shard_size="1200", dtype="fp16")
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert len(content(tmp_path / "one")) > count


def test_a_process_that_is_killed(source: Path, tmp_path: Path) -> None:
    """When one process is killed while it writes, the job fails and there is neither index nor folder."""
    dies = "import ckpt_tools.folder_conversion as f; write = f._write_own; "
    dies += "f._write_own = lambda *a: os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else write(*a)"
    done = launch(2, "convert", str(source), str(tmp_path / "out"), "--shard-size", "2500", before=dies)
    assert done.returncode != 0
    assert os.listdir(tmp_path) == ["in.pth"]


def test_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes fail with the error of the one that failed, which says whose it is."""
    results: list[object] = [("fine", None), (None, OutputError("The disk is full."))]
    monkeypatch.setattr(Ranks, "_gather", lambda *_: results)
    work: Callable[[], str] = lambda: "fine"  # noqa: E731
    with pytest.raises(OutputError, match=r"Process 1 of the job failed: The disk is full\."):
        Ranks(0, 2).agree(work)
    results[1] = ("also", None)
    assert Ranks(0, 2).agree(work) == ["fine", "also"]
    assert Ranks().agree(work) == ["fine"]
