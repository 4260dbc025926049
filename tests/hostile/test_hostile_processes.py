"""Real processes: two that write one output, outputs that are not files, Ctrl-C in the middle of long work. Rows 90, 91, 94."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpt_tools
from tests.hostile import pickles as p
from tests.hostile.refusals import INTERRUPTIBLE, info, safetensors, write
from tests.hostile.zips import torch_zip
from tests.support.terminal import wait_for

ROOT = Path(ckpt_tools.__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TRIES = 3  # a machine that is busy with other tests may be late once

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes, process groups and /proc of POSIX systems")


def start(folder: Path, *arguments: str, slow: bool = False) -> subprocess.Popen[bytes]:
    """`ckpt`, in a process group of its own, as a shell starts it; `slow` waits before it puts the output in its place."""
    code = f"{INTERRUPTIBLE}\nfrom ckpt_tools.cli import main\n"
    if slow:
        code += "import os, time\n"
        for call in ("os.link", "os.replace", "os.rename"):
            code += f"{call} = lambda *a, real={call}, **k: (time.sleep(1), real(*a, **k))[1]\n"
    command = [sys.executable, "-c", f"{code}main(prog_name='ckpt')", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    STARTED.append(process)
    return process


STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """What a test that failed has started ends with it."""
    yield
    while STARTED:
        process = STARTED.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and standard error, which has no traceback."""
    _, told = process.communicate(timeout=60)
    assert b"Traceback" not in told, told.decode()
    return process.returncode, told.decode()


def hidden(folder: Path) -> list[str]:
    """What is left of temporaries."""
    return sorted(path.name for path in folder.rglob(".*"))


# --- two at once


@pytest.mark.parametrize("options", [["out.pth"], ["out.safetensors", "--overwrite"], ["out", "--shard-size", "800KB"]])
def test_90_two_converts_to_one_output(options: list[str], tmp_path: Path) -> None:
    """Both are about to put their result in place: it is one of the two, whole; without --overwrite the other is refused."""
    for key in "ab":
        state = {f"module.{key}.{index}": torch.full((100_000,), float(ord(key))) for index in range(4)}
        torch.save(state, tmp_path / f"{key}.pth")
    both = [start(tmp_path, "convert", f"{key}.pth", *options, "--strip-module", slow=True) for key in "ab"]
    results = [ended(process) for process in both]
    codes = [code for code, _ in results]
    assert sorted(codes) == ([0, 0] if "--overwrite" in options else [0, 3]), results
    assert codes == [0, 0] or "already exists" in results[codes.index(3)][1] or "not empty" in results[codes.index(3)][1]
    found = [row["name"] for row in ckpt_tools.inspect(tmp_path / options[0]).tensors]
    assert found in ([f"{key}.{index}" for index in range(4)] for key in "ab" if codes["ab".index(key)] == 0)
    assert ckpt_tools.check(tmp_path / options[0]).verdict == "healthy"
    assert hidden(tmp_path) == []


# --- Ctrl-C


def check_interrupt(started: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Ctrl-C as a terminal sends it, to every process of the group: all of them end within a second, with exit code 130.

    Args:
        started: starts a command and waits until it is in the middle of its work. It is called again where all was right but
            the time, since that depends on what else the machine does: the best of the tries counts.
    """
    took: list[float] = []
    while len(took) < TRIES and min(took, default=60) >= 1:
        process = started()
        os.killpg(process.pid, signal.SIGINT)
        at = time.monotonic()
        code, told = ended(process)
        assert (code, told.strip()) == (130, "Interrupted."), told
        wait_for(lambda group=process.pid: not alive(group))  # type: ignore[misc]
        took.append(time.monotonic() - at)
    assert min(took) < 1, took


def members(group: int) -> Iterator[list[str]]:
    """What /proc tells of every process of a group that runs, from its state on; not of those that have ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                yield fields


def alive(group: int) -> bool:
    """Whether any process of a group still runs."""
    return any(members(group))


def working(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process and its workers have taken so much CPU time."""
    spent = sum(int(fields[11]) + int(fields[12]) for fields in members(process.pid))
    return spent / os.sysconf("SC_CLK_TCK") > seconds


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc how far a process is")


def sparse(path: Path, nbytes: int) -> None:
    """A safetensors file with one tensor of so many zeros, which take no room on the disk."""
    path.write_bytes(safetensors({"a": info("U8", [nbytes], [0, nbytes])}))
    os.truncate(path, path.stat().st_size + nbytes)


@needs_proc
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_94_interrupt_while_checking(jobs: str, tmp_path: Path) -> None:
    """In one process and in several, while each reads a file of a terabyte."""
    for name in ("one", "two"):
        sparse(tmp_path / f"{name}.safetensors", 1 << 40)

    def started() -> subprocess.Popen[bytes]:
        process = start(tmp_path, "check", "--jobs", jobs, "one.safetensors", "two.safetensors")
        wait_for(lambda: working(process, 2.5 if jobs == "2" else 0.8))
        return process

    check_interrupt(started)


@needs_proc
@pytest.mark.parametrize("command", [["check", "in.pth"], ["convert", "in.pth", "out.pth"]])
def test_94_interrupt_in_a_long_pickle(command: list[str], tmp_path: Path) -> None:
    """While a pickle of forty megabytes is read."""
    pickle = p.pickle(p.dict_of(w=p.tensor(), x=p.list_of(b"J\1\2\3\4" * 8_000_000)))
    write(tmp_path, torch_zip(pickle, {"0": bytes(24)}), "in.pth")

    def started() -> subprocess.Popen[bytes]:
        process = start(tmp_path, *command)
        wait_for(lambda: working(process, 0.8))
        return process

    check_interrupt(started)
    assert sorted(os.listdir(tmp_path)) == ["in.pth"]


@needs_proc
@pytest.mark.parametrize("options", [["--dtype", "fp16"], ["--shard-size", "100MB"]])
def test_94_interrupt_while_writing(options: list[str], tmp_path: Path) -> None:
    """In a cast, which computes in threads, and in a folder of shards: neither leaves a temporary."""
    nbytes = 4 << 30
    path = tmp_path / "in.safetensors"
    rows = {str(index): info("F32", [nbytes >> 5], [nbytes // 8 * index, nbytes // 8 * (index + 1)]) for index in range(8)}
    path.write_bytes(safetensors(rows))
    os.truncate(path, path.stat().st_size + nbytes)
    target = "out" if "--shard-size" in options else "out.safetensors"
    temporaries = ".*/*" if target == "out" else ".*"

    def started() -> subprocess.Popen[bytes]:
        process = start(tmp_path, "convert", "in.safetensors", target, *options)
        wait_for(lambda: any(row.is_file() and row.stat().st_size > 1 << 20 for row in tmp_path.rglob(temporaries)))
        return process

    check_interrupt(started)
    assert os.listdir(tmp_path) == ["in.safetensors"]
