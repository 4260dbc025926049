"""A part of `make fuzz` in the test suite, and that it sees something."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError
from tests.fuzz import frameworks, headers, oracle
from tests.fuzz.guard import ForbiddenError, TooSlowError
from tests.hostile import pickles as p
from tests.hostile.refusals import write
from tests.hostile.zips import torch_zip
from tests.support.samples import FIXTURES

ROOT = Path(ckpt_tools.__file__).parent.parent


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    """A run of the fuzzer."""
    command = [sys.executable, "-m", "tests.fuzz", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_fuzz_finds_nothing(tmp_path: Path) -> None:
    """Sixty mutated files: our own error, or what torch and safetensors read too."""
    done = fuzz("--cases", "60", "--seconds", "60", "--seed", "7", "--save", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 cases" in done.stdout


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import this", ForbiddenError), ("open('x', 'w')", ForbiddenError), ("exec('1')", ForbiddenError),
        ("import socket; socket.socket()", ForbiddenError), ("import os; os.system('true')", ForbiddenError),
        ("for _ in iter(int, 1): pass", TooSlowError), ("__import__('os').rename('a', 'b')", ForbiddenError),
        ("os.open('/var', os.O_RDWR | os.O_TMPFILE | os.O_EXCL)", ForbiddenError),
        ("os.open(tempfile.gettempdir(), os.O_RDWR | os.O_TMPFILE)", ForbiddenError),
        ("tempfile.NamedTemporaryFile()", ForbiddenError), ("tempfile.TemporaryFile().close()", None),
    ],
)  # fmt: skip
def test_the_guard_sees_something(code: str, error: type[BaseException] | None) -> None:
    """The fuzzer can fail: what a file must not make happen is caught, also where the code catches everything.

    Of temporary files it lets one pass that has no name and can get none.
    """
    script = (
        "import sys, os, socket, tempfile\nfrom tests.fuzz import guard\n"
        "guard.CPU_SECONDS = 0.2\nwatch = guard.Guard('/nowhere')\n"
        "watch.armed = True\ntry:\n    with watch.watching():\n        try:\n"
        f"            {code}\n        except Exception:\n            pass\n"
        "except (guard.ForbiddenError, guard.TooSlowError) as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == ("" if error is None else error.__name__), done.stderr
    assert done.stderr == ""


def test_the_oracle_that_unpickles_calls_nothing(tmp_path: Path) -> None:
    """It finds what weights_only finds, and no name that a file could mean harm by."""
    torch.save({"a.w": torch.ones(2), "b": [torch.zeros(3)]}, tmp_path / "good.pth")
    assert oracle.pickle_rows(tmp_path / "good.pth") == oracle.torch_rows(tmp_path / "good.pth")
    bad = write(tmp_path, torch_zip(p.pickle(p.call("os", "system", p.text(f"touch {tmp_path / 'ran'}")))))
    assert oracle.pickle_rows(bad) == "UnpicklingError: os.system"
    assert not (tmp_path / "ran").exists()


def test_a_case_does_not_depend_on_those_before() -> None:
    """What one case made of a piece of junk was junk for the next: it grew, held itself, and its numbers had 5,000 digits."""
    rows = json.dumps({"a": [], "b": {"c": [[1]]}}).encode()
    once, again = ([headers.mutate_json(Random(number), rows) for number in range(3000)] for _ in range(2))
    assert once == again
    assert max(map(len, once)) < 1000


@pytest.mark.parametrize("name", ["types.gguf", "types.onnx", "flax.msgpack", "tiny.weights.h5"])
def test_mutated_files_of_other_frameworks_reach_their_readers(name: str, tmp_path: Path) -> None:
    """Of a hundred some are read and some are refused: a mutator whose files all end at the first check tests nothing."""
    pytest.importorskip("h5py")
    data, path = (FIXTURES / "frameworks" / name).read_bytes(), tmp_path / name
    assert frameworks.is_one(data, name)
    said = Counter[str]()
    for number in range(100):
        path.write_bytes(frameworks.mutate(Random(number), data, data))
        try:
            said[ckpt_tools.inspect(path).container] += 1
        except CkptError as error:
            said[type(error).__name__] += 1
    assert len(said) > 1
    assert {"gguf", "onnx", "flax", "keras"} & set(said)
