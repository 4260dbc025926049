"""The README is executed: every command prints what the README says it prints, every Python block runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints that the README talks about."""
    for name in ("ddp.pth", "training.pth"):
        shutil.copy(ROOT / "fixtures" / name, tmp_path / name)
    return tmp_path


def run(command: str, folder: Path) -> str:
    """What a command prints."""
    arguments = command.replace("ckpt ", f"{sys.executable} -m ckpt_tools ", 1).split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, capture_output=True, text=True, cwd=folder, check=True, env=environment).stdout


def without_time(text: str) -> str:
    """The output but for how long it took."""
    return re.sub(r"^(time +).*$", r"\1", text, flags=re.MULTILINE).strip()


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_readme_commands_print_what_is_shown(block: str, folder: Path) -> None:
    """A console block of the README is what its command really prints."""
    command, _, shown = block.removeprefix("$ ").partition("\n")
    assert without_time(run(command, folder)) == without_time(shown)


def test_readme_python_runs(folder: Path) -> None:
    """The README's load code runs as written."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['features.0.weight', 'features.0.bias']\n"
    assert (folder / "weights.pth").exists()


def test_links_lead_somewhere() -> None:
    """Every relative link of the README and the docs names a file that is there."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
