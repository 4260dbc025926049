"""One run of a job with one fault, in a process of its own, and what must hold afterwards."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckpt_tools import CkptError
from tests.faults.jobs import Job
from tests.faults.layer import Fault, Layer, kinds
from tests.support.commands import main

ROOT = Path(__file__).parents[2]
Snapshot = dict[str, bytes]
_SAVE_ID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # torch.distributed.checkpoint draws one for each save


class TornError(Exception):
    """Something is left torn, untold or lying about."""


class Rig:
    """A job, ready to be run again and again from the same state.

    Attributes:
        before, after: the files before the job and after it went well.
        calls: function -> how often the job calls it.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder / "work"
        self.template, self.output = folder / "template", folder / "output"
        self.template.mkdir()
        job.prepare(self.template)
        self.before = snapshot(self.template)
        counts = folder / "counts"
        self.restore()
        code = _in_child(lambda: self._count(counts), self.output)
        self.after = snapshot(self.folder)
        if code != job.code or self.after == self.before or _temporaries(self.after):
            raise TornError(f"{job.name}: exit code {code} without any fault: {self.output.read_text()}")
        self.calls = {name: int(count) for name, count in map(str.split, counts.read_text().splitlines())}

    def faults(self) -> Iterator[Fault]:
        """Every call with everything that can happen to it."""
        for function, count in self.calls.items():
            for number in range(1, count + 1):
                yield from (Fault(function, number, kind) for kind in kinds(function))

    def restore(self) -> None:
        """The files as they were before the job."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.template, self.folder)

    def run(self, fault: Fault) -> None:
        """Run the job with a fault; TornError says what is wrong with what it leaves."""
        self.restore()
        code = _in_child(lambda: self._work(Layer(fault)), self.output)
        self.judge(fault, code, self.output.read_text(errors="replace"))

    def judge(self, fault: Fault, code: int, told: str) -> None:
        """Look at what a run has left; TornError has the fault, and what is wrong."""
        try:
            self.check(fault, code, told)
        except TornError as error:
            raise TornError(f"{self.job.name}, {fault}: {error}\nexit code {code}: {told[-1500:]}") from None

    def check(self, fault: Fault, code: int, told: str) -> None:
        """Exit code, message and files after a run."""
        if "Traceback" in told:
            raise TornError("a traceback")
        if fault.kind in ("kill", "killed"):
            _expect(code == -signal.SIGKILL, "it was to be killed")
            self._old_or_new(snapshot(self.folder), orphans=True)
            self._again()
            return
        found = snapshot(self.folder)
        left = {name for name in _temporaries(found) if not name.endswith("/")}
        lost_cleaning = fault.function in ("unlink", "remove", "rmdir") or not left  # a folder without files is no harm
        self._old_or_new(found, orphans=lost_cleaning)
        if fault.kind == "interrupt":
            _expect(code in (130, self.job.code), "Ctrl-C exits 130, or came too late")
        elif fault.kind == "short":
            _expect(code == self.job.code and found == self.after, "a part of the bytes is no failure")
        else:
            _expect(code in (self.job.code, 3), "a failure exits 3, or does not matter")
            _expect(code == 3 or _without_temporaries(found) == self.after, "it says 0 and has not done it")
            _expect(code != 3 or told.startswith("Error: "), "no message")

    def _old_or_new(self, found: Snapshot, *, orphans: bool) -> None:
        rest = _without_temporaries(found)
        if rest not in (self.before, self.after) and not self._without_index(rest):
            sizes = {name: len(data) for name, data in rest.items()}
            raise TornError(f"neither the old files nor the new ones: {sizes}")
        _expect(orphans or rest == found, f"left behind: {sorted(_temporaries(found))}")

    def _without_index(self, files: Snapshot) -> bool:
        """Whether these are files of a folder on its way from the old to the new: no index says that it is a checkpoint.

        Or they are the new ones, the index included, and some old ones that are to be removed last.
        """
        known = [*self.before.items(), *self.after.items()]
        on_its_way = f"out/{self.job.index}" not in files or self.after.items() <= files.items()
        return bool(self.job.index) and on_its_way and all(row in known for row in files.items())

    def _again(self) -> None:
        """The next run finds what a killed one left, and removes it; it may be refused because the job is done."""
        code = _in_child(lambda: self._work(None), self.output)
        done = snapshot(self.folder)
        told = self.output.read_text(errors="replace")
        _expect(not _temporaries(done), f"the next run leaves {sorted(_temporaries(done))}: {told}")
        _expect(code in (self.job.code, 3) and done == self.after, f"the next run: {told}")

    def _count(self, counts: Path) -> None:
        layer = Layer()
        try:
            self._work(layer)
        finally:
            found = "".join(f"{name} {count}\n" for name, count in layer.counts.items())
            counts.write_text(found)

    def _work(self, _layer: Layer | None) -> None:
        """`ckpt` in the folder, or a function with the exit codes and messages of the command line; ends by SystemExit."""
        os.chdir(self.folder)
        if self.job.work is None:
            main(list(self.job.arguments), prog_name="ckpt")
            return
        try:
            self.job.work()
        except CkptError as error:
            print(f"Error: {error}")
            raise SystemExit(3) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise TornError(what)


def snapshot(folder: Path) -> Snapshot:
    """Every file below a folder with its bytes; a `/` behind the names of folders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        found[f"{path.relative_to(folder)}{'' if path.is_file() else '/'}"] = _SAVE_ID.sub(b"", data)
    return found


def _temporaries(files: Snapshot) -> set[str]:
    return {name for name in files if ".ckpt-tmp" in name}


def _without_temporaries(files: Snapshot) -> Snapshot:
    return {name: data for name, data in files.items() if ".ckpt-tmp" not in name}


def _in_child(work: Callable[[], None], output: Path) -> int:
    """Run in a forked process, its output into a file; the exit code, negative for a signal."""
    pid, leave = os.fork(), os._exit
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output.write_bytes(b"")
    code, sys.stdout, sys.stderr = 0, output.open("a"), output.open("a")  # two: ckpt closes the one that cannot be written
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        leave(code)
    return 0  # not reached


def rigs(jobs: Sequence[Job]) -> Iterator[Rig]:
    """A rig for each job, in a folder in memory where there is one."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for job in jobs:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            yield Rig(job, Path(folder))
