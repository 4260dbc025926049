"""What a shell offers, through click's own completion protocol."""

import contextlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.support.commands import main
from tests.support.samples import FIXTURES
from tests.support.terminal import installed


def offered(words: str, folder: Path = FIXTURES, shell: str = "bash") -> list[str]:
    """The completions of the last word."""
    number = len(words.split(" ")) - 1
    last = words.split(" ")[-1]
    environment = {
        "_CKPT_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": last if shell == "fish" else str(number),
    }  # fmt: skip
    with contextlib.chdir(folder):
        done = CliRunner().invoke(main, [], prog_name="ckpt", env=environment)
    assert done.stderr == ""
    lines = done.stdout.split()
    return [line.partition(",")[2] for line in lines] if shell == "bash" else lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ckpt dif", ["diff"]), ("ckpt help dif", ["diff"]), ("ckpt sing", ["sing"]),
        ("ckpt single.pth --filter fc1", ["fc1.weight", "fc1.bias"]),
        ("ckpt convert training.pth out.pth --select mo", ["model"]),
        ("ckpt convert --strip-module training.pth out.pth --drop opt", ["optimizer", "optimizer.state"]),
        ("ckpt inspect single.pth --filter fc1", ["fc1.weight", "fc1.bias"]),
        ("ckpt stats single.safetensors --filter fc2.", ["fc2.weight", "fc2.bias"]),
        ("ckpt convert single.pth out.pth --keep features.0.w", ["features.0.weight"]),
        ("ckpt diff training.pth single.pth --select mod", ["model"]),
    ],
    ids=str,
)  # fmt: skip
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


SHELLS = {
    "bash": "COMP_WORDS=(ckpt stats training.pth --select mo) COMP_CWORD=4; _ckpt_completion ckpt; echo ${COMPREPLY[@]}",
    "zsh": "echo $_comps[ckpt]; whence -w _ckpt_completion",
    "fish": "complete -C 'ckpt stats training.pth --select mo'",
}
EXPECTED = {"bash": ["model"], "zsh": ["_ckpt_completion", "_ckpt_completion:", "function"], "fish": ["model"]}


def line_of(shell: str) -> str:
    """The line of docs/commands.md for this shell."""
    page = (FIXTURES.parent / "docs" / "commands.md").read_text()
    (line,) = re.findall(rf"^(.*ckpt completion {shell}.*?)  +# ~/", page, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_line_for_a_start_up_file_works(shell: str, tmp_path: Path) -> None:
    """In the shell itself, where it is installed: bash and fish complete `--select mo` from the file, zsh knows whom to ask."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    before = "autoload -Uz compinit; compinit -D -u; " if shell == "zsh" else ""
    environment = installed(tmp_path) | {"HOME": str(tmp_path)}
    script = f"{before}{line_of(shell)}\n{SHELLS[shell]}"
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, cwd=FIXTURES, env=environment, check=False)
    assert done.stdout.split() == EXPECTED[shell], done.stderr
