"""Work in processes of its own: what is said where they end before it is done."""

from __future__ import annotations

import signal
import subprocess
import sys
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
