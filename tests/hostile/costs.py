"""What a file costs each command, as a whole process: CPU seconds, megabytes. `python -m tests.hostile.costs [NAME...]`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ckpt_tools

ROOT = Path(ckpt_tools.__file__).parent.parent
CPU_SECONDS, MEGABYTES = 5, 300
PACE = 0.04  # seconds that a core takes for the loop of `pace` where it is alone; a shared one takes up to three times as long
COMMANDS: dict[str, Sequence[str]] = {
    "inspect": ("inspect", "IN"),
    "inspect --json": ("inspect", "--json", "IN"),
    "check": ("check", "IN"),
    "check --values": ("check", "--values", "IN"),
    "stats": ("stats", "IN"),
    "repair": ("repair", "IN", "out.pth"),
    "convert": ("convert", "IN", "out.pth"),
    "plain": ("convert", "IN", "out.pth", "--objects", "plain"),
    "to safetensors": ("convert", "IN", "out.safetensors", "--objects", "plain"),
    "scan": ("scan", "IN"),
    "diff --values": ("diff", "--values", "IN", "IN"),
    "match": ("match", "IN", "--like", "IN"),
    "show": ("show", "IN", "a.w"),
    "report": ("report", "IN", "-o", "out.html"),
}

PACED = textwrap.dedent("""
    import json, resource, sys, time
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    def pace():
        start, kept = time.process_time(), {}
        for number in range(500_000):
            kept[number & 1023] = (number,)
        return time.process_time() - start

    before = pace()
""")
_MEASURED = PACED + textwrap.dedent("""
    from ckpt_tools.cli import main
    try:
        main(sys.argv[2:], prog_name="ckpt")
    except SystemExit as stop:
        code = stop.code
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(sys.argv[1], "w") as file:
        json.dump([code, used.ru_utime + used.ru_stime - before, used.ru_maxrss >> 10, (before + pace()) / 2], file)
""")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one command took for one file, and what it said. Seconds of a core that has nothing else to do."""

    code: int | None
    seconds: float
    megabytes: int
    told: str

    @property
    def within(self) -> bool:
        """Whether it is what a file under ten megabytes may cost."""
        return self.code in (0, 1, 3) and self.seconds < CPU_SECONDS and self.megabytes < MEGABYTES


def cost(path: Path, command: Sequence[str]) -> Cost:
    """Run a command of `COMMANDS` on a file, in a process of its own and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(path) if part == "IN" else part for part in command]
        # By way of a shell: a child's largest size begins with that of the process that it was forked from.
        line = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", _MEASURED, os.path.join(folder, "cost"), *arguments]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        with open(os.path.join(folder, "told"), "w+b") as told:
            subprocess.run(line, stdout=told, stderr=subprocess.STDOUT, cwd=folder, env=environment, check=True)
            told.seek(max(0, told.tell() - 2000))
            last = told.read().decode(errors="replace")
        found = Path(folder, "cost")
        if not found.exists():  # killed, or our own limits were hit
            return Cost(None, 60, 2048, last)
        code, seconds, megabytes, pace = json.loads(found.read_text())
        return Cost(code, alone(seconds, pace), megabytes, last)


def alone(seconds: float, pace: float) -> float:
    """What took so many CPU seconds, on a core that has nothing else to do."""
    return seconds * min(1, PACE / pace)


def main() -> None:
    """Print a line for every bomb and command; `!` marks what is over the limit."""
    from tests.hostile import (
        bombs,
        formats,
        long_names,
        many_nodes,
        small_files,
        tars,
    )

    assert long_names.bomb is many_nodes.bomb is formats.bomb is tars.bomb is bombs.bomb  # their builders are in the table
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.costs", description=__doc__)
    parser.add_argument("names", nargs="*", help="only bombs with one of these in their names")
    parser.add_argument("--size", type=int, default=9_900_000, help="bytes of a file (9900000)")
    parser.add_argument("--commands", nargs="*", default=list(COMMANDS), help="only these of its commands")
    parser.add_argument("--over", action="store_true", help="print only what is over the limit, or within a fifth of it")
    options = parser.parse_args()
    bombs.SIZE = options.size
    for name, make in (bombs.BOMBS | small_files.SMALL).items():
        if options.names and not any(part in name for part in options.names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "bomb.pth")
            path.write_bytes(make())
            for what in options.commands:
                found = cost(path, COMMANDS[what])
                if (
                    not options.over
                    or not found.within
                    or found.seconds > CPU_SECONDS * 0.8
                    or found.megabytes > MEGABYTES * 0.8
                ):
                    mark = " " if found.within else "!"
                    told = " ".join(found.told.split())[-80:]
                    print(
                        f"{mark} {name:45} {what:15} {found.seconds:5.1f} s {found.megabytes:5} MB {found.code} {told}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
