"""Work in processes of its own: what is said where they end before it is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools.errors import LimitError
from ckpt_tools.io.processes import in_processes

ROOT = Path(ckpt_tools.__file__).parent.parent
SCRIPT = """
from ckpt_tools.errors import CkptError
from ckpt_tools.io.processes import in_processes
try:
    print(list(in_processes(len, ["a", "bb"], 2)))
except CkptError as error:
    print(type(error).__name__, error)
"""

WRITING = """
import signal, sys, time
from ckpt_tools.io.output import replacing
from ckpt_tools.io.processes import in_processes

def hold(path):
    with replacing(path):
        print("writing", flush=True)
        for _ in range(600):  # a signal in the instant before a sleep is heard only behind it
            time.sleep(0.1)

def stop(number, frame):
    raise KeyboardInterrupt

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        list(in_processes(hold, ["one", "two", "three", "four"], 2))
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "whom"), [(signal.SIGKILL, os.kill), (signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)])
def test_workers_end_with_their_parent(number: signal.Signals, whom: Callable[[int, int], None], tmp_path: Path) -> None:
    """Killed, terminated or interrupted: no worker lives on, none leaves a temporary, and nobody prints a traceback."""
    (tmp_path / "script.py").write_text(WRITING)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, perhaps, by what started the tests
    process = subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}, start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["writing\n"] * 2
    whom(process.pid, number)
    said, _ = process.communicate(timeout=20)  # which every worker holds open
    if number == signal.SIGKILL:  # Python's own resource tracker says that semaphores were left
        assert "Traceback" not in said
    else:
        assert said == "stopped\n"
    assert os.listdir(tmp_path) == ["script.py"]


def test_a_process_that_is_killed() -> None:
    """A worker that the system kills is said to have been killed."""
    with pytest.raises(LimitError, match="was killed"):
        list(in_processes(signal.raise_signal, [signal.SIGKILL], 1))


@pytest.mark.parametrize("guard", ["", "if __name__ == '__main__':"])
def test_a_script_that_is_imported_again(guard: str, tmp_path: Path) -> None:
    """A script without its guard was told that a process was killed for want of memory; nothing was."""
    body = SCRIPT.replace("\n", "\n    ") if guard else SCRIPT
    (tmp_path / "script.py").write_text(guard + body)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    said = done.stdout.splitlines()
    if guard:
        assert said == ["[1, 2]"]
    else:
        assert said[0] == "UsageError The processes that should work on the files could not begin."
        assert "__main__" in said[-1]
