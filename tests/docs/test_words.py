"""What users read is ordinary English: patterns that read as a translation stay out of every text of the package."""

import ast
import functools
import re
from pathlib import Path

import pytest

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
    """No message, help text or docstring has the pattern."""
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
    """Each of these is found; what is ordinary is not."""
    assert any(re.search(pattern, text) for pattern in AVOIDED)
    assert not any(re.search(pattern, "there is no such file; it is no longer here") for pattern in AVOIDED)
