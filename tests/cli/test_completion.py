"""What a shell offers, through click's own completion protocol."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.samples import FIXTURES


def offered(words: str, folder: Path = FIXTURES, shell: str = "bash") -> list[str]:
    """The completions of the last word."""
    number = len(words.split(" ")) - 1
    last = words.split(" ")[-1]
    environment = {
        "_CKPT_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": last if shell == "fish" else str(number),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools"], capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(FIXTURES.parent), **environment},
    )  # fmt: skip
    assert done.stderr == ""
    lines = done.stdout.split()
    return [line.partition(",")[2] for line in lines] if shell == "bash" else lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ckpt dif", ["diff"]),
        ("ckpt help dif", ["diff"]),
        ("ckpt sing", ["sing"]),
        ("ckpt single.pth --filter fc1", ["fc1.weight", "fc1.bias"]),
        ("ckpt convert training.pth out.pth --select mo", ["model"]),
        ("ckpt convert --strip-module training.pth out.pth --drop opt", ["optimizer", "optimizer.state"]),
        ("ckpt inspect single.pth --filter fc1", ["fc1.weight", "fc1.bias"]),
        ("ckpt stats single.safetensors --filter fc2.", ["fc2.weight", "fc2.bias"]),
        ("ckpt convert single.pth out.pth --keep features.0.w", ["features.0.weight"]),
        ("ckpt diff training.pth single.pth --select mod", ["model"]),
    ],
    ids=str,
)
def test_names_and_paths_come_from_the_file(words: str, expected: list[str]) -> None:
    """Commands, tensor names and paths of state dicts, whatever comes before the option."""
    found = offered(words)
    assert set(expected) <= set(found)
    assert all(text.startswith(words.split(" ")[-1]) for text in found)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells(shell: str) -> None:
    """zsh and fish get the same names in their own format."""
    assert any("fc1.weight" in line for line in offered("ckpt inspect single.pth --filter fc1", shell=shell))


def test_silence_when_there_is_nothing_to_offer(tmp_path: Path) -> None:
    """No file, a file that is none, a damaged one, a folder: no completion, and not a word."""
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "cut.pth").write_bytes((FIXTURES / "single.pth").read_bytes()[:999])
    for name in ("none.pth", "text.pth", "cut.pth", "."):
        assert offered(f"ckpt inspect {name} --filter f", tmp_path) == []


def test_names_that_a_shell_would_run_are_not_offered(tmp_path: Path) -> None:
    """A completion goes onto the command line as it is: only plain characters do."""
    names = ["a.$(touch evil).w", "a.`id`.w", "a.b;rm.w", "a.'q'.w", "a.\nplain,x.w", "a.fine.w", "-rf.w"]
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "a.pth")
    assert offered("ckpt inspect a.pth --filter ", tmp_path) == ["a.fine.w"]


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is needed")
def test_the_line_for_bash_works(tmp_path: Path) -> None:
    """The line of the README, in a bash: completing `--select mo` gives `model`."""
    tool = tmp_path / "ckpt"
    tool.write_text(f'#!/bin/sh\nPYTHONPATH={FIXTURES.parent} exec {sys.executable} -m ckpt_tools "$@"\n')
    tool.chmod(0o755)
    line = 'eval "$(_CKPT_COMPLETE=bash_source ckpt)"'
    assert line in (FIXTURES.parent / "README.md").read_text()
    script = (
        f"{line}; COMP_WORDS=(ckpt stats training.pth --select mo) COMP_CWORD=4; _ckpt_completion ckpt; echo ${{COMPREPLY[@]}}"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=FIXTURES, env=environment)
    assert done.stdout.split() == ["model"], done.stderr
