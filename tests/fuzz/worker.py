"""A process that tries cases one after another. The parent sees how far it came even when it dies."""

from __future__ import annotations

import codecs
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import beside, folders, samples
from tests.fuzz.cases import Cases
from tests.fuzz.guard import FindingError, Guard
from tests.support.commands import import_all

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def said(module: str, *arguments: object) -> Iterator[dict[str, Any]]:
    """What a worker says, line by line, until it ends in one way or the other."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # else every thread takes 64 MB of the address space that it may have
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as worker,
    ):
        assert worker.stdout is not None
        yield from map(json.loads, worker.stdout)
        errors.seek(0)
        yield {"ended": worker.wait(), "trace": errors.read()[-2000:]}


def say(row: dict[str, object]) -> None:
    """A line of it."""
    print(json.dumps(row), flush=True)


def main(seed: int, first: int, count: int, seconds: float, convert_every: int, only: str) -> None:
    """Try cases. JSON lines say which case is next, who is given the file, what was found, and at the end how many."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        folders.samples()
        beside.signed()
        cases = Cases(samples.make(folder), seed, folder, Guard(name), lambda who: say({"asking": who}), only)
        import_all()
        gc.set_threshold(700, 10, 10)  # the command line makes it rare, for a process of one file
        for library in ("h5py", "gguf"):  # they read what Keras writes, and GGML's blocks
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
        for codec in ("utf-32-le", "utf-32-be", "idna"):  # of text in arrays, of names of hosts; one module each
            codecs.lookup(codec)
        for number in range(-300, 0):  # whatever is imported late is imported now
            with contextlib.suppress(FindingError):
                cases.try_one(number, convert=True)
        cases.guard.armed = True
        cases.guard.limit_memory()
        cases.counts.clear()
        stop, number = time.monotonic() + seconds, first
        while number < first + count and time.monotonic() < stop:
            say({"at": number})
            try:
                cases.try_one(number, convert=number % convert_every == 0)
            except FindingError as error:
                trace = "".join(traceback.format_exception(error.__cause__)[-3:]) if error.__cause__ else ""
                say({"found": str(error)[:1000], "case": number, "trace": trace})
            number += 1
        say({"done": number - first, "counts": cases.counts})


if __name__ == "__main__":
    numbers = [float(argument) for argument in sys.argv[1:6]]
    main(int(numbers[0]), int(numbers[1]), int(numbers[2]), numbers[3], int(numbers[4]), sys.argv[6])
