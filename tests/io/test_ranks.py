"""Sharded conversion by several processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_tools import convert

ROOT = Path(__file__).parents[2]


def launch(count: int, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m ckpt_tools ARGUMENTS` in so many processes under PyTorch's launcher; `before` is run in each first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    code = f"import os, sys; sys.argv[0] = 'ckpt'; {before}\nfrom tests.support.commands import main; main()"
    job = [*command, "--no-python", sys.executable, "-c", code] if before else [*command, "-m", "ckpt_tools"]
    return subprocess.run([*job, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=180)


def failing(kind: str) -> str:
    """Code that lets the first write of the second process fail."""
    layer = f"Layer(Fault('write', 1, {kind!r}))"
    return f"from tests.faults.layer import Fault, Layer; os.environ['RANK'] == '1' and {layer}"


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
    """Three processes write what one writes, and one of them reports; a cast counts across all."""
    options = ["--shard-size", "1200", "--dtype", "fp16"]
    done = launch(3, "convert", str(source), str(tmp_path / "many"), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    convert(source, tmp_path / "one", shard_size="1200", dtype="fp16")
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert len(content(tmp_path / "one")) > 3


def test_a_process_that_is_killed(source: Path, tmp_path: Path) -> None:
    """When one process is killed while it writes, the job fails and there is neither index nor folder."""
    done = launch(2, "convert", str(source), str(tmp_path / "out"), "--shard-size", "2500", before=failing("kill"))
    assert done.returncode != 0
    assert os.listdir(tmp_path) == ["in.pth"]


def test_a_distributed_checkpoint_by_two(source: Path, tmp_path: Path) -> None:
    """Two processes write a file each and one .metadata; what torch loads of it is what one process wrote."""
    done = launch(2, "convert", str(source), str(tmp_path / "two"), "--format", "dcp", "--dtype", "fp16")
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
    done = launch(2, "convert", str(source), str(tmp_path / "out"), "--format", "dcp", before=failing("enospc"))
    assert done.returncode != 0
    assert os.listdir(tmp_path) == ["in.pth"]
    assert "Process 1 of the job failed: " in done.stderr
    assert "Traceback" not in done.stderr.partition("elastic")[0]


def test_the_parts_of_ranks_are_shared_too(tmp_path: Path) -> None:
    """Two processes that merge parts of ranks into shards write what one writes."""
    folder = ROOT / "fixtures" / "parts" / "fsdp-tp"
    done = launch(2, "convert", str(folder), str(tmp_path / "two"), "--shard-size", "300", "--dtype", "fp16")
    assert done.returncode == 0, done.stderr
    assert convert(folder, tmp_path / "one", shard_size="300", dtype="fp16").files >= 2
    assert content(tmp_path / "two") == content(tmp_path / "one")
