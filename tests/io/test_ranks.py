"""Sharded conversion by several processes, as torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_tools import convert
from ckpt_tools.errors import OutputError
from ckpt_tools.io.ranks import Ranks

ROOT = Path(__file__).parents[2]


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
    dies = "import ckpt_tools.operations.convert.folder as f; write = f._write_own; "
    dies += "f._write_own = lambda *a: os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else write(*a)"
    done = launch(2, "convert", str(source), str(tmp_path / "out"), "--shard-size", "2500", before=dies)
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


def test_a_job_that_fails_writes_one_document(source: Path, tmp_path: Path) -> None:
    """What all processes fail with is one JSON document."""
    gone = source.with_name("gone.pth")
    done = launch(2, "convert", str(gone), str(tmp_path / "out"), "--shard-size", "1KB", "--json")
    document = json.loads(done.stdout)
    assert (document["error"], document["what"]) == ("MissingFileError", f"{gone} cannot be read.")


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_distributed_checkpoint_that_fails(source: Path, tmp_path: Path, how: str) -> None:
    """When one of two processes fails or is killed while it writes, the job fails and no .metadata is left."""
    act = "os.kill(os.getpid(), 9)" if how == "killed" else "(_ for _ in ()).throw(f.OutputError('The disk has gone.'))"
    dies = "import ckpt_tools.operations.convert.folder as f, ckpt_tools.operations.convert.dcp_saving as d; make = d._tensor; "
    dies += f"d._tensor = lambda item: {act} if os.environ['RANK'] == '1' else make(item)"
    done = launch(2, "convert", str(source), str(tmp_path / "out"), "--format", "dcp", before=dies)
    assert done.returncode != 0
    assert os.listdir(tmp_path) == ["in.pth"]
    if how == "raises":
        assert "Process 1 of the job failed: The disk has gone." in done.stderr
        assert "Traceback" not in done.stderr.partition("elastic")[0]


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


RANKS = ("fsdp2", "hsdp", "tp", "fsdp-tp", "dcp", "consolidated", "loose")
FOLDERS = (*(f"parts/{name}" for name in RANKS), "deepspeed/hop")
PARTS_JOB = """
import os, sys
from ckpt_tools.io.ranks import launched
from ckpt_tools.operations.convert.run import convert

with launched() as ranks:
    for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
        convert(source, target, shard_size="300", dtype="fp16", ranks=ranks)
os._exit(0)
"""


def test_the_parts_of_every_family_are_shared_too(tmp_path: Path) -> None:
    """Two processes that merge parts of ranks into shards write what one writes; one job does family after family."""
    places = {ROOT / "fixtures" / name: tmp_path / "two" / name.replace("/", "-") for name in FOLDERS}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "job.py").write_text(PARTS_JOB)
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "job.py")]
    arguments = [str(place) for pair in places.items() for place in pair]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*job, *arguments], capture_output=True, text=True, env=env, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    for source, target in places.items():
        report = convert(source, tmp_path / "one" / target.name, shard_size="300", dtype="fp16")
        assert report.files >= 2
        assert content(target) == content(tmp_path / "one" / target.name)
