"""What is made of --help and of the pages: man pages and docs/llms.txt; and what users read is ordinary English."""

import ast
import functools
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


def test_llms_txt_is_up_to_date() -> None:
    assert llms.PLACE.read_text("utf-8") == llms.document()


def test_llms_txt_names_everything() -> None:
    text = llms.PLACE.read_text("utf-8")
    assert all(f"- `ckpt {name}`: " in text for name in COMMANDS)
    linked = set(re.findall(r"\]\(([^)]+)\)", text))
    assert linked == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert text.startswith("# ckpt_tools\n\n> ")


PACKAGE = Path(__file__).parents[2] / "ckpt_tools"

# What is not written, and what is in its place.
AVOIDED = {
    r"\b[Nn]obody\b": "say what is missing: no option says so, no process has it",
    r"\boutside of\b": "outside",
    r"\b(?:is|are) none of\b": "is not one of",
    r"(?<![Tt]here )(?<!Whether there )\b(?:is|are) no (?!longer|more|room|way|need|such)[a-z]": "is not a, are not",
    r"\b[Ww]ho is who\b": "which tensor is which",
    r"\blooked through\b": "examined",
}


@functools.cache
def texts() -> list[tuple[Path, str]]:
    """Every text of the package with its module, docstrings and the fixed parts of f-strings among them."""
    return [
        (path.relative_to(PACKAGE), " ".join(node.value.split()))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("pattern", AVOIDED)
def test_plain_english(pattern: str) -> None:
    found = [
        f"{path}: {text[max(0, match.start() - 40) : match.end() + 40]}"
        for path, text in texts()
        for match in re.finditer(pattern, text)
    ]
    assert not found, f"write: {AVOIDED[pattern]}"


@pytest.mark.parametrize(
    "text", ["nobody said how", "lies outside of it", "'x' is none of a, b", "a file that is no checkpoint", "who is who"]
)
def test_the_patterns_match(text: str) -> None:
    assert any(re.search(pattern, text) for pattern in AVOIDED)
    assert not any(re.search(pattern, "there is no such file; it is no longer here") for pattern in AVOIDED)
