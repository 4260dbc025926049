"""Regular expressions over text from a file take time that grows with the text, not with its square."""

from __future__ import annotations

import ast
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import ckpt_tools

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_MANY = 64  # repeated as often as this at most, it is no matter


def nested(pattern: str | bytes) -> list[str]:
    """The repeats in an expression that hold another one and may go back into it."""
    found = []

    def walk(parsed: Any, *, inside: bool) -> None:
        for opcode, argument in parsed:
            if str(opcode) in _REPEATS:
                endless = argument[1] > _MANY
                if inside and endless and str(opcode) != "POSSESSIVE_REPEAT":
                    found.append(f"{opcode} {argument}")
                walk(argument[2], inside=inside or endless)
            elif isinstance(argument, tuple | list):
                for part in argument:
                    for branch in part if isinstance(part, list) else [part]:
                        if isinstance(branch, _parser.SubPattern):
                            walk(branch, inside=inside)

    walk(_parser.parse(pattern), inside=False)
    return found


def test_no_repeat_within_a_repeat() -> None:
    """A repeat in a repeat tries every way to part a text among the two, unless the inner one never gives back."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(ckpt_tools.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                pattern = node.args[0]  # what a user gives (globs, --rename) is their own
                if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str | bytes):
                    found[f"{path.name}:{node.lineno}"] = nested(pattern.value)
    assert len(found) > 30
    assert {place: repeats for place, repeats in found.items() if repeats} == {}


@pytest.mark.parametrize("pattern", [r"(a+)+", r"(?:x|a*b?)*", r"(?:[^\\]+|\\.)*", r"(?:(?:a+)b)+"])
def test_the_rule_sees_them(pattern: str) -> None:
    """The rule above can fail."""
    assert nested(pattern)
    assert not nested(pattern.replace("+", "++").replace("a*", "a*+").replace(")*", ")*+").replace(")+++", ")++"))
