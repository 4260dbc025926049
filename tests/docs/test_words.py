"""What users read is ordinary English: patterns that read as a translation stay out of every text of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def texts(source: str) -> Iterator[str]:
    """Every text in a module, docstrings and the fixed parts of f-strings among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


@pytest.mark.parametrize("pattern", AVOIDED)
def test_plain_english(pattern: str) -> None:
    """No message, help text or docstring has the pattern."""
    found = [
        f"{path.relative_to(PACKAGE)}: {text[max(0, match.start() - 40) : match.end() + 40]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in texts(path.read_text())
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
