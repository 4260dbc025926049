"""Regular expressions over text from a file take time that grows with the text, not with its square."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.io.parsers import _JSON_STRING, _TOML_STRING

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_MANY = 64  # repeated as often as this at most, it is no matter


def compiled() -> dict[str, re.Pattern[Any]]:
    """Every expression that a module of ckpt_tools keeps, by its name."""
    found: dict[str, re.Pattern[Any]] = {}
    for module in pkgutil.walk_packages(ckpt_tools.__path__, "ckpt_tools."):
        if module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            rows = value.items() if isinstance(value, dict) else [("", value)]
            found |= {f"{module.name}.{name}{key}": row for key, row in rows if isinstance(row, re.Pattern)}
    return found


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
                    if isinstance(part, _parser.SubPattern):
                        walk(part, inside=inside)
                    elif isinstance(part, list):
                        for branch in part:
                            if isinstance(branch, _parser.SubPattern):
                                walk(branch, inside=inside)

    walk(_parser.parse(pattern), inside=False)
    return found


def test_no_repeat_within_a_repeat() -> None:
    """A repeat in a repeat tries every way to part a text among the two, unless the inner one never gives back."""
    found = {name: nested(pattern.pattern) for name, pattern in compiled().items()}
    assert len(found) > 30
    assert {name: repeats for name, repeats in found.items() if repeats} == {}


@pytest.mark.parametrize("pattern", [r"(a+)+", r"(?:x|a*b?)*", r"(?:[^\\]+|\\.)*", r"(?:(?:a+)b)+"])
def test_the_rule_sees_them(pattern: str) -> None:
    """The rule above can fail."""
    assert nested(pattern)
    assert not nested(pattern.replace("+", "++").replace("a*", "a*+").replace(")*", ")*+").replace(")+++", ")++"))


def written() -> dict[str, str | bytes]:
    """Every expression that is written out where it is used, by its place."""
    found: dict[str, str | bytes] = {}
    for path in sorted(Path(ckpt_tools.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                pattern = node.args[0]
                if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str | bytes):
                    found[f"{path.name}:{node.lineno}"] = pattern.value
    return found


def test_no_repeat_within_a_repeat_inside_functions() -> None:
    """The same for those that no module keeps; what a user gives (globs, --rename) is their own."""
    assert {place: nested(pattern) for place, pattern in written().items() if nested(pattern)} == {}
    assert len(written()) > 30


@pytest.mark.parametrize(
    ("expression", "unit"),
    [(_JSON_STRING, '\\"'), (_TOML_STRING, '\\"'), (_TOML_STRING, "\\\\")],
)
def test_strings_that_do_not_end(expression: re.Pattern[str], unit: str) -> None:
    """One that does not end is taken up to the end of the text, so that nothing in it is gone over again."""
    for text in ('"' + unit * 100, '"' + unit * 100 + "\\"):
        assert [match.span() for match in expression.finditer(text)] == [(0, len(text))]
