"""A part of the fault matrix (`make faults`) in the test suite: every job, every hundredth fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_tools
from tests.faults.jobs import JOBS
from tests.faults.layer import Fault, kinds
from tests.faults.runs import Rig, TornError, rigs
from tests.support.commands import import_all

ROOT = Path(ckpt_tools.__file__).parent.parent


def test_no_fault_tears_anything() -> None:
    """Killed, interrupted, EIO, ENOSPC, a short write, at one call after the other: the old files or the new ones."""
    command = [sys.executable, "-m", "tests.faults", "--every", "100"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 torn" in done.stdout
    assert int(done.stdout.rpartition("\n")[0].rpartition("\n")[2].split()[0]) > 40


def test_edits_in_place_at_each_call_that_writes() -> None:
    """Killed there or without room: the old file or the new one, and the next edit succeeds and tidies up."""
    import_all()
    for rig in rigs([job for job in JOBS if "in place" in job.name]):
        faults = [fault for fault in rig.faults() if "enospc" in kinds(fault.function) and fault.kind in ("kill", "enospc")]
        assert len(faults) > 10
        for fault in faults:
            if fault.function not in ("close", "dup"):
                rig.run(fault)


OLD, NEW = {"in": b"in", "out": b"old"}, {"in": b"in", "out": b"new"}
EIO, KILL = Fault("write", 1, "eio"), Fault("write", 1, "kill")


@pytest.mark.parametrize(
    ("fault", "code", "told", "files"),
    [
        (EIO, 1, "Traceback ...", OLD), (EIO, 3, "", OLD), (EIO, 0, "", OLD), (EIO, 3, "Error: x", OLD | {"out": b"ne"}),
        (EIO, 3, "Error: x", OLD | {".out.0.ckpt-tmp": b""}), (EIO, 3, "Error: x", NEW | {"in": b""}), (KILL, 0, "", NEW),
        (Fault("write", 1, "short"), 3, "Error: x", OLD), (Fault("write", 1, "interrupt"), 1, "Error: x", OLD),
    ],
)  # fmt: skip
def test_the_matrix_sees_something(fault: Fault, code: int, told: str, files: dict[str, bytes], tmp_path: Path) -> None:
    """The test above can fail: each kind of damage is seen."""
    rig = Rig.__new__(Rig)
    rig.job, rig.folder, rig.before, rig.after = JOBS[0], tmp_path, OLD, NEW
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TornError):
        rig.check(fault, code, told)
