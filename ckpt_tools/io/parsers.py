"""The one door to parsers that are not ours: JSON and TOML. What they would make of a text is bounded before they see it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ckpt_tools import limits

_MOST_TOML = 4 << 20  # bytes of a plan
# tomllib goes through all parts of a dotted key for each of them.
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+(?:{_PART}){{4}}", re.MULTILINE)


def load_json(
    text: str | bytes,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
    whole: Callable[[str], Any] | None = None,
) -> Any:
    text = text if isinstance(text, str) else text.decode("utf-8")
    what = "The JSON in the file describes more than a checkpoint of its size can hold."
    budget = limits.budget(len(text))
    budget.take(limits.MEMORY, len(text), what)
    budget.take(limits.NODES, text.count("{") + text.count("["), what)
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=whole)
    except RecursionError:
        raise ValueError("It is nested too deep") from None


def load_toml(text: str) -> dict[str, Any]:
    import tomllib

    if len(text) > _MOST_TOML:
        raise ValueError(f"A plan has at most {_MOST_TOML} bytes")
    if _LONG_KEY.search(text):
        raise ValueError("A key has more parts than any plan's")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("It is nested too deep") from None


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
