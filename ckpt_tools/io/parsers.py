"""The one door to parsers that are not ours: JSON and TOML. What they would make of a text is counted before they see it.

A text of seven bytes can be a dict of two hundred. So brackets, commas and the like outside strings are counted first and
spent from the budget of the file that the text is from; a file that is beyond it is refused before any of it is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ckpt_tools import limits

# Possessive: what has been passed is never gone over again. A string that does not end goes up to the end of the text.
_JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_JSON_STRINGS = re.compile(
    rf'(?:[^"]++|{_JSON_STRING.pattern}){{1,10000}}', re.DOTALL
)  # `re.sub` keeps a list of all its pieces
_TOML_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"""|\\?\Z)'
    r"|'''(?:[^']|'(?!''))*+(?:'''|\Z)"
    r'|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+(?:"|\\?\Z|(?=\n))'
    r"|'[^'\n]*+(?:'|\Z|(?=\n))"
    r"|\#[^\n]*+",
    re.DOTALL,
)
_TABLE = re.compile(r"^[ \t]*+\[(?!\[)", re.MULTILINE)  # of which no plan has any; a table of many, [[tensor]], is told apart
_FRACTION = re.compile(r"(?<=\d)\.(?=\d)")
# What a character outside strings makes the parser keep, in containers of a pickle, about 200 bytes each: in JSON a dict,
# a list, a value; in TOML also what tomllib notes down about every part of a dotted key, and the time that a line takes.
_JSON_COSTS = {"{": 2.0, "[": 1.0, ",": 0.25, ":": 0.25}
_TOML_COSTS = {".": 8.0, "{": 4.0, "[": 1.5, "=": 1.0, ",": 0.5, "\n": 0.125}
_COUNTED_EXACTLY = 50_000  # containers; below it does not matter that the brackets in strings are counted too
_LEVELS_OF_A_KEY = 16  # tomllib goes through all parts of a dotted key for each of them


def load_json(
    text: str | bytes,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
    whole: Callable[[str], Any] | None = None,
) -> Any:
    """What a JSON text from a file says."""
    text = text if isinstance(text, str) else text.decode("utf-8")
    what = "The JSON in the file describes more than a checkpoint of its size can hold."
    budget = limits.budget(len(text))
    budget.take(limits.MEMORY, len(text), what)
    cost = _cost(text, _JSON_COSTS)
    if cost >= _COUNTED_EXACTLY:
        cost = sum(_cost(_JSON_STRING.sub("", part[0]), _JSON_COSTS) for part in _JSON_STRINGS.finditer(text))
    budget.take(limits.NODES, cost, what)
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=whole)
    except RecursionError:
        raise ValueError("It is nested too deep") from None


def load_toml(text: str) -> dict[str, Any]:
    """What a TOML text says."""
    import tomllib

    outside = _FRACTION.sub("", _TOML_STRING.sub("", text))
    if any(line.count(".") > _LEVELS_OF_A_KEY for line in outside.split("\n")):
        raise ValueError("A key has more parts than any plan's")
    cost = _cost(outside, _TOML_COSTS) + 3 * len(_TABLE.findall(outside)) + text.count("\\") // 4
    limits.budget(len(text)).take(limits.NODES, cost, "The plan describes more than a file of its size can.")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("It is nested too deep") from None


def _cost(text: str, costs: dict[str, float]) -> int:
    return int(sum(text.count(character) * cost for character, cost in costs.items()))


def brief(value: object) -> str:
    """What was parsed, for a message: cut, without what is nested in it, which could be deep."""
    if isinstance(value, list):
        return f"[{', '.join(map(_inner, value[:8]))}{', ...' if len(value) > 8 else ''}]"
    return "a map" if isinstance(value, dict) else _inner(value)[:40]


def _inner(value: object) -> str:
    if isinstance(value, list | dict):
        return "..."
    # TOML has hexadecimal numbers of any length; as decimal ones Python refuses to write them
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else repr(value)[:40]
