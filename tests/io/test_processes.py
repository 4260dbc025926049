"""Work in processes of its own: what is said where they end before it is done."""

import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

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
    """The processes that a process has started."""
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
