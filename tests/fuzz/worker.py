"""A process that tries cases one after another. The parent sees how far it came even when it dies."""

from __future__ import annotations

import codecs
import contextlib
import faulthandler
import gc
import importlib
import json
import pkgutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import ckpt_tools
from tests.fuzz import beside, folders, samples
from tests.fuzz.cases import Cases
from tests.fuzz.guard import FindingError, Guard


def main(seed: int, first: int, count: int, seconds: float, convert_every: int, only: str) -> None:
    """Try cases. JSON lines say which case is next, who is given the file, what was found, and at the end how many."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        folders.samples()
        beside.signed()
        cases = Cases(samples.make(folder), seed, folder, Guard(name), lambda who: _say({"asking": who}), only)
        for module in pkgutil.walk_packages(ckpt_tools.__path__, "ckpt_tools."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        gc.set_threshold(700, 10, 10)  # the command line makes it rare, for a process of one file
        for library in ("h5py", "gguf"):  # they read what Keras writes, and GGML's blocks
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
        for codec in ("utf-32-le", "utf-32-be", "idna"):  # of text in arrays, of names of hosts; one module each
            codecs.lookup(codec)
        for number in range(-300, 0):  # whatever is imported late is imported now
            _try(cases, number, convert=True, quiet=True)
        cases.guard.armed = True
        cases.guard.limit_memory()
        cases.counts = dict.fromkeys(cases.counts, 0)
        stop = time.monotonic() + seconds
        number = first
        while number < first + count and time.monotonic() < stop:
            _say({"at": number})
            _try(cases, number, convert=number % convert_every == 0)
            number += 1
        _say({"done": number - first, "counts": cases.counts})


def _try(cases: Cases, number: int, *, convert: bool, quiet: bool = False) -> None:
    try:
        cases.try_one(number, convert=convert)
    except FindingError as error:
        if not quiet:
            trace = "".join(traceback.format_exception(error.__cause__)[-3:]) if error.__cause__ else ""
            _say({"found": str(error)[:1000], "case": number, "trace": trace})


def _say(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    numbers = [float(argument) for argument in sys.argv[1:6]]
    main(int(numbers[0]), int(numbers[1]), int(numbers[2]), numbers[3], int(numbers[4]), sys.argv[6])
