"""Sharded conversion by several processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_tools import convert
from tests.support.job import ROOT, job


def failing(folder: Path, kind: str) -> Path:
    """A script that is `ckpt`, and lets the first write of the second process fail."""
    script = folder.parent / "failing.py"
    script.write_text(
        "import os\nfrom tests.faults.layer import Fault, Layer\nfrom tests.support.commands import main\n"
        f"os.environ['RANK'] == '1' and Layer(Fault('write', 1, {kind!r}))\nmain(prog_name='ckpt')"
    )
    return script


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


def test_the_same_bytes_as_one_process(source: Path, tmp_path: Path) -> None:
    """Three processes under PyTorch's launcher write what one writes, and one of them reports; a cast counts across all."""
    options = ["--shard-size", "1200", "--dtype", "fp16"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "ckpt_tools"]
    command = [*torchrun, "convert", str(source), str(tmp_path / "many"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    convert(source, tmp_path / "one", shard_size="1200", dtype="fp16")
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert len(content(tmp_path / "one")) > 3


def test_a_process_that_is_killed(source: Path, tmp_path: Path) -> None:
    """When one process is killed while it writes, the job fails and there is neither index nor folder."""
    done = job(2, failing(tmp_path, "kill"), "convert", source, tmp_path / "out", "--shard-size", "2500")
    assert done.returncode != 0
    assert os.listdir(tmp_path) == ["in.pth"]


def test_a_distributed_checkpoint_by_two(source: Path, tmp_path: Path) -> None:
    """Two processes write a file each and one .metadata; what torch loads of it is what one process wrote."""
    done = job(2, "ckpt_tools", "convert", source, tmp_path / "two", "--format", "dcp", "--dtype", "fp16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    assert "2 files" in done.stdout
    assert sorted(os.listdir(tmp_path / "two")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    report = convert(source, tmp_path / "one", format="dcp", dtype="fp16")
    assert report.aliases == {"tied": "layers.0.weight"}
    found = {}
    for name in ("one", "two"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pth")
        found[name] = torch.load(tmp_path / f"{name}.pth", weights_only=True)
    assert list(found["one"]) == list(found["two"])
    assert all(torch.equal(found["one"][name], tensor) for name, tensor in found["two"].items())
    sizes = [(tmp_path / "two" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert min(sizes) > 0.4 * sum(sizes)


def test_a_distributed_checkpoint_that_fails(source: Path, tmp_path: Path) -> None:
    """When one of two processes fails while it writes, the job fails and no .metadata is left."""
    done = job(2, failing(tmp_path, "enospc"), "convert", source, tmp_path / "out", "--format", "dcp")
    assert done.returncode != 0
    assert os.listdir(tmp_path) == ["in.pth"]
    assert "Process 1 of the job failed: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_parts_of_ranks_are_shared_too(tmp_path: Path) -> None:
    """Two processes that merge parts of ranks into shards write what one writes."""
    folder = ROOT / "fixtures" / "parts" / "fsdp-tp"
    done = job(2, "ckpt_tools", "convert", folder, tmp_path / "two", "--shard-size", "300", "--dtype", "fp16")
    assert done.returncode == 0, done.stderr
    assert convert(folder, tmp_path / "one", shard_size="300", dtype="fp16").files >= 2
    assert content(tmp_path / "two") == content(tmp_path / "one")
