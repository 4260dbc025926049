"""`ckpt` where packages are missing, or torch is broken: many commands in one process, and what came of each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = ("torch", "numpy", "safetensors", "h5py", "gguf", "isal", "cryptography", "fsspec", "zstandard")

# What Python runs before anything else, in processes that these start, too.
_HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
_RUNNING = """
import contextlib, io, json, sys, traceback

from ckpt_tools.cli import main

done = []
for arguments in json.load(sys.stdin):
    code, out, err = 0, *(io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "12")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments, prog_name="ckpt")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = -1
    done.append((code, *(stream.buffer.getvalue().decode() for stream in (out, err))))
json.dump(done, sys.stdout)
"""


@dataclass(frozen=True)
class Done:
    """One command: its exit code (-1 where it ended in a traceback), standard output, standard error."""

    code: int
    out: str
    err: str


def hide(folder: Path, names: Sequence[str] = OPTIONAL) -> dict[str, str]:
    """An environment of Python in which these packages cannot be imported; what does that lies in the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HIDING.format(names=tuple(names)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


def run(
    commands: Sequence[Sequence[str]], where: Path, environment: dict[str, str], start: Sequence[str] = (),
    before: Callable[[], None] | None = None,
) -> list[Done]:  # fmt: skip
    """Run commands one after another in a folder, in one process.

    Args:
        start: options of Python, and the path of a zip to import from.
        before: is called in the process before it begins.
    """
    path = "".join(f"import sys; sys.path.insert(0, {path!r})" for path in start[-1:])
    done = subprocess.run(
        [sys.executable, *start[:-1], "-c", path + _RUNNING], input=json.dumps(commands), capture_output=True,
        encoding="utf-8", cwd=where, env={**environment, "PYTHONIOENCODING": "utf-8"}, check=False, preexec_fn=before,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Done(*row) for row in json.loads(done.stdout)]
