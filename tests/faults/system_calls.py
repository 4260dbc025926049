"""The same faults below Python: `strace -e inject` makes the system calls of a real `ckpt` fail. Only where strace is there.

This sees what the injectable layer cannot: writes by C code, and by threads of torch. Calls are counted from the start of the
process, so only those are taken of which Python itself makes few.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

from tests.faults.layer import Fault
from tests.faults.runs import ROOT, Rig

CALLS = (
    "write", "pwrite64", "copy_file_range", "fsync", "fdatasync", "ftruncate", "rename", "link", "unlink", "fchmod", "flock",
)  # fmt: skip
_MOST = 30
_INJECTIONS = {"kill": "signal=KILL", "eio": "error=EIO", "enospc": "error=ENOSPC"}


def available() -> bool:
    """Whether strace is there and may trace."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0


def run_all(rig: Rig) -> Iterator[tuple[Fault, int, str]]:
    """Every fault at every one of these calls, one run after the other; gives it with what `Rig.judge` takes."""
    for call in CALLS:
        for kind in _INJECTIONS:
            for count in range(1, _MOST):
                fault = Fault(call, count, kind)
                code, told, hit = _run(rig, fault)
                if not hit:
                    break
                yield fault, code, told


def _run(rig: Rig, fault: Fault) -> tuple[int, str, bool]:
    """Exit code, output, and whether there was such a call at all."""
    rig.restore()
    log = rig.folder.with_name("strace")
    inject = f"inject={fault.function}:{_INJECTIONS[fault.kind]}:when={fault.count}"
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={fault.function}", "-e", inject]
    command += [sys.executable, "-m", "ckpt_tools", *rig.job.arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=rig.folder, env=environment, capture_output=True, text=True, check=False)
    lines = log.read_text(errors="replace").splitlines()
    told = done.stderr + done.stdout
    if any("write(2," in line and "INJECTED" in line for line in lines):  # strace counts by threads: the message was hit too
        told = told or "Error: "
    return done.returncode, told, any("INJECTED" in line or "killed by SIGKILL" in line for line in lines)
