"""What is made of --help and of the pages: man pages and docs/llms.txt."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs import llms, man
from tests.support.terminal import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All man pages."""
    made = tmp_path_factory.mktemp("man")
    man.write(made)
    return made


def test_every_command_has_a_man_page(folder: Path) -> None:
    """One each, and one for all, with the parts that man pages have; the long help is whole."""
    assert {path.name for path in folder.iterdir()} == {"ckpt.1", *(f"ckpt-{name}.1" for name in COMMANDS)}
    for path in folder.iterdir():
        text = path.read_text()
        for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"):
            assert f"\n.SH {heading}\n" in text
    assert "\n.SH EXIT STATUS\n" in (folder / "ckpt-check.1").read_text()
    assert "\n.B \\-\\-on\\-mismatch" in (folder / "ckpt-convert.1").read_text()
    assert all(f".BR ckpt\\-{name.replace('-', chr(92) + '-')} (1)" in (folder / "ckpt.1").read_text() for name in COMMANDS)


@pytest.mark.skipif(not shutil.which("man"), reason="man is needed")
def test_man_reads_them(folder: Path) -> None:
    """`man -l` shows each without a warning, and the text of an example as it is to be typed."""
    for path in folder.iterdir():
        done = subprocess.run(["man", "--warnings", "-l", str(path)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), path.name
    shown = subprocess.run(["man", "-l", str(folder / "ckpt-diff.1")], capture_output=True, text=True, check=True).stdout
    assert "    ckpt diff --values epoch_1.pth epoch_2.safetensors" in shown


def test_roff_has_no_requests_of_ours() -> None:
    """A line that begins with a dot, a backslash, quotation marks: text."""
    assert man._roff(".sh 'x' \\n-o") == "\\&.sh 'x' \\en\\-o"
    assert man._roff("'tis") == "\\&'tis"


def test_llms_txt_is_up_to_date() -> None:
    """`python -m docs.llms` would write the same."""
    assert llms.PLACE.read_text("utf-8") == llms.document()


def test_llms_txt_names_everything() -> None:
    """Every command; every page of docs, by a link that leads there."""
    text = llms.PLACE.read_text("utf-8")
    assert all(f"- `ckpt {name}`: " in text for name in COMMANDS)
    linked = set(re.findall(r"\]\(([^)]+)\)", text))
    assert linked == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert text.startswith("# ckpt_tools\n\n> ")
