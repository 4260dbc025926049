"""A part of the fuzzer (`make fuzz`) in the test suite, and the cases that once found something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import ZipError
from fuzz.guard import ForbiddenError, TooSlowError
from tests.hostile import pickles as p
from tests.hostile.refusals import write
from tests.hostile.zips import Rec, build, torch_zip

ROOT = Path(ckpt_tools.__file__).parent.parent


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    """A run of the fuzzer."""
    command = [sys.executable, "-m", "fuzz", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_fuzz_finds_nothing(tmp_path: Path) -> None:
    """Some hundred mutated files: our own error, or what torch and safetensors read too."""
    done = fuzz("--cases", "800", "--seconds", "60", "--seed", "7", "--save", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "800 cases" in done.stdout


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import this", ForbiddenError), ("open('x', 'w')", ForbiddenError), ("exec('1')", ForbiddenError),
        ("import socket; socket.socket()", ForbiddenError), ("import os; os.system('true')", ForbiddenError),
        ("for _ in iter(int, 1): pass", TooSlowError), ("__import__('os').rename('a', 'b')", ForbiddenError),
    ],
)  # fmt: skip
def test_the_guard_sees_something(code: str, error: type[BaseException]) -> None:
    """The fuzzer can fail: what a file must not make happen is caught, also where the code catches everything."""
    script = (
        "import sys, os, socket\nfrom fuzz import guard\nguard.CPU_SECONDS = 0.2\nwatch = guard.Guard('/nowhere')\n"
        "watch.armed = True\ntry:\n    with watch.watching():\n        try:\n"
        f"            {code}\n        except Exception:\n            pass\n"
        "except (guard.ForbiddenError, guard.TooSlowError) as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == error.__name__, done.stderr


def test_empty_tensor_cast(tmp_path: Path) -> None:
    """Found by the fuzzer: a cast of no elements at all."""
    torch.save({"a.w": torch.zeros(0), "b.w": torch.ones(2)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="fp16")
    loaded = torch.load(tmp_path / "out.pth")
    assert (loaded["a.w"].dtype, loaded["a.w"].shape, loaded["b.w"].tolist()) == (torch.float16, (0,), [1, 1])


def test_text_with_escapes_imports_nothing(tmp_path: Path) -> None:
    """Found by the fuzzer: the codec of opcode V was imported by its name while the file was read."""
    path = write(tmp_path, torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=b"V\\u00e9\n")), {"0": bytes(24)}))
    script = (
        f"import sys, ckpt_tools\nfrom ckpt_tools import inspect\nseen = set(sys.modules)\nfound = inspect({str(path)!r})\n"
        "assert found.values['x'] == '\\u00e9'\nassert 'encodings.raw_unicode_escape' not in set(sys.modules) - seen"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_long_names_make_no_long_messages(tmp_path: Path) -> None:
    """Found by the fuzzer: a name of kilobytes was quoted whole."""
    path = write(tmp_path, build([Rec(b"archive/" + b"\xff" * 60_000, b"x")]))
    with pytest.raises(ZipError, match="not UTF-8") as caught:
        ckpt_tools.inspect(path)
    assert len(str(caught.value)) < 3000
