"""Work in several processes: what is said where they end early; sharded conversion as torchrun starts it."""

import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_tools import convert
from tests.support.job import Done, jobs
from tests.support.samples import FIXTURES
from tests.support.terminal import ROOT, wait_for

SCRIPT = """
import ckpt_tools
try:
    print(len(ckpt_tools.scan("files", jobs=2)))
except ckpt_tools.CkptError as error:
    print(type(error).__name__, error)
"""
SIZE = 100 << 30


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def opened(pid: int, folder: Path) -> bool:
    """Whether a process has a file of this folder open."""
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}").startswith(str(folder)) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it, or a file, has gone meanwhile
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for processes")
@pytest.mark.parametrize(
    ("number", "whom"), [("SIGKILL", "parent"), ("SIGTERM", "parent"), ("SIGINT", "group"), ("SIGKILL", "worker")]
)
def test_workers_end_with_their_parent(number: str, whom: str, tmp_path: Path) -> None:
    """Killed, terminated or interrupted: no worker lives on, nothing prints a traceback; a killed worker is told."""
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (SIZE, SIZE)
    for name in "abcd":
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + SIZE)  # holes, whose reading takes a minute
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, perhaps, by what started the tests
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", "check", "--digest", "--jobs", "2", *sorted(map(str, tmp_path.iterdir()))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    # Both workers read: before that their parent may still be starting them, or they Python.
    workers: list[int] = []

    def reading() -> bool:
        assert process.poll() is None
        workers[:] = [child for child in children(process.pid) if opened(child, tmp_path)]
        return len(workers) == 2

    wait_for(reading, 300)
    sent = getattr(signal, number)
    if whom == "group":
        os.killpg(process.pid, sent)
    else:
        os.kill(process.pid if whom == "parent" else max(workers), sent)
    said, _ = process.communicate(timeout=300)  # which every worker holds open
    assert "Traceback" not in said
    assert process.returncode != 0
    assert ("was killed" in said) == (whom == "worker")


@pytest.mark.parametrize("guard", ["", "if __name__ == '__main__':"])
def test_a_script_that_is_imported_again(guard: str, tmp_path: Path) -> None:
    """A script without its guard was told that a process was killed for want of memory; nothing was."""
    body = SCRIPT.replace("\n", "\n    ") if guard else SCRIPT
    (tmp_path / "script.py").write_text(guard + body)
    (tmp_path / "files").mkdir()
    for number in range(210):  # of fewer none is worth a process
        shutil.copy(FIXTURES / "single.pth", tmp_path / "files" / f"{number}.pth")
    run = [sys.executable, "script.py"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=False)
    said = done.stdout.splitlines()
    if guard:
        assert said == ["210"]
    else:
        assert said[0] == "UsageError The processes that should work on the files could not begin."
        assert "__main__" in said[-1]


# A script that is `ckpt`, and lets the first write of the second process fail.
FAILING = """
import os, sys
from tests.faults.layer import Fault, Layer
from tests.support.commands import main
fault, *command = sys.argv[1:]
os.environ["RANK"] == "1" and Layer(Fault("write", 1, fault))
main(command, prog_name="ckpt")
"""
PARTS = ROOT / "fixtures" / "parts" / "fsdp-tp"
SHARDED = ("--shard-size", "1200", "--dtype", "fp16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    state = {f"layers.{i}.weight": torch.randn(50 + i, 10) for i in range(6)}
    torch.save(state | {"tied": state["layers.0.weight"]}, folder / "in.pth")
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    """Jobs of two processes, and what came of each."""
    (folder / "failing.py").write_text(FAILING)
    commands: dict[str, list[object]] = {
        "dcp": ["ckpt_tools", "convert", "in.pth", "dcp", "--format", "dcp", "--dtype", "fp16"],
        "merged": ["ckpt_tools", "convert", PARTS, "merged", "--shard-size", "300", "--dtype", "fp16"],
        "full": ["failing.py", "enospc", "convert", "in.pth", "full", "--format", "dcp"],
        "killed": ["failing.py", "kill", "convert", "in.pth", "killed", "--shard-size", "2500"],
    }
    return dict(zip(commands, jobs(2, *commands.values(), cwd=folder), strict=True))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_bytes_as_one_process(folder: Path, tmp_path: Path) -> None:
    """Two processes under PyTorch's launcher write what one writes, and one of them reports; a cast counts across all."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ckpt_tools"]
    command = [*torchrun, "convert", str(folder / "in.pth"), str(tmp_path / "many"), *SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    convert(folder / "in.pth", tmp_path / "one", shard_size="1200", dtype="fp16")
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert len(content(tmp_path / "one")) > 3


def test_the_parts_of_ranks_are_shared_too(folder: Path, done: dict[str, Done], tmp_path: Path) -> None:
    """Two processes that merge parts of ranks into shards write what one writes."""
    assert done["merged"].returncode == 0, done["merged"].stderr
    assert convert(PARTS, tmp_path / "one", shard_size="300", dtype="fp16").files >= 2
    assert content(folder / "merged") == content(tmp_path / "one")


def test_a_distributed_checkpoint_by_two(folder: Path, done: dict[str, Done], tmp_path: Path) -> None:
    """Two processes write a file each and one .metadata; what torch loads of it is what one process wrote."""
    assert done["dcp"].returncode == 0, done["dcp"].stderr
    assert (done["dcp"].stdout.count("wrote"), done["dcp"].stdout.count("2 files")) == (1, 1)
    assert sorted(os.listdir(folder / "dcp")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    report = convert(folder / "in.pth", tmp_path / "one", format="dcp", dtype="fp16")
    assert report.aliases == {"tied": "layers.0.weight"}
    found = []
    for written in (tmp_path / "one", folder / "dcp"):
        dcp_to_torch_save(written, tmp_path / "loaded.pth")
        found.append(torch.load(tmp_path / "loaded.pth", weights_only=True))
    one, two = found
    assert list(one) == list(two)
    assert all(torch.equal(one[name], tensor) for name, tensor in two.items())
    sizes = [(folder / "dcp" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert min(sizes) > 0.4 * sum(sizes)


def test_one_that_fails_or_is_killed(folder: Path, done: dict[str, Done]) -> None:
    """Where one process has no room, or is killed, as it writes, the job fails and nothing is left: no index, no .metadata."""
    assert 0 not in (done["full"].returncode, done["killed"].returncode)
    assert "Process 1 of the job failed: " in done["full"].stderr
    assert "Traceback" not in done["full"].stderr
    assert sorted(os.listdir(folder)) == ["dcp", "failing.py", "in.pth", "merged"]
