"""Mutations of a safetensors file: its length, its JSON as a tree, its JSON as text, its data."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from tests.fuzz import raw
from tests.fuzz.values import number, text

_JUNK: tuple[Any, ...] = (
    None, True, False, -1, 1.5, 1e400, "", "F32", "F4", "F8_E4M3", "BOOL", "X9", [], [0], [0, 0], [0, 4], [1, 2, 3], {},
    {"a": 1}, [[0]], "\ud800", 2**63, 2**64, -0.0,
)  # fmt: skip
_WORDS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"NaN",
    b"-0",
    b"1e999",
    b" ",
    b"\0",
    b"\xff",
    b"//",
)


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A mutation of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    pick = rng.random()
    if pick < 0.55:
        header = _tree(rng, header)
    elif pick < 0.8:
        header = _text(rng, header)
    elif pick < 0.9:
        body = raw.mutate(rng, body, other)
    size = len(header)
    if rng.random() < 0.1:
        size = number(rng, size) % 2**64
    return size.to_bytes(8, "little") + header + body


def mutate_json(rng: Random, data: bytes) -> bytes:
    """A mutation of JSON, as a tree or as text."""
    return _tree(rng, data) if rng.random() < 0.7 else _text(rng, data)


def _tree(rng: Random, header: bytes) -> bytes:
    tree: dict[str, Any] = json.loads(header)
    for _ in range(rng.choice((1, 1, 2))):
        _change(rng, tree)
    dumped = json.dumps(tree, ensure_ascii=rng.random() < 0.5, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return dumped + b" " * (-len(dumped) % 8 if rng.random() < 0.5 else 0)


def _change(rng: Random, tree: dict[str, Any]) -> None:
    """One change somewhere in the tree."""
    node: Any = tree
    while node:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        below = node[key]
        if isinstance(below, dict | list) and below and rng.random() < 0.85:
            node = below
            continue
        _put(rng, node, key)
        return
    tree[text(rng)] = _junk(rng)


def _junk(rng: Random) -> Any:
    """Something of another kind, each time anew: a later change must not reach into this table."""
    return copy.deepcopy(rng.choice(_JUNK))


def _put(rng: Random, node: Any, key: Any) -> None:
    pick = rng.random()
    if pick < 0.15:
        del node[key]
    elif pick < 0.3 and isinstance(node, dict):
        node[text(rng)] = node.pop(key)
    elif type(node[key]) is int and pick < 0.8:
        node[key] = number(rng, node[key])
    elif pick < 0.4 and isinstance(node, list):
        node.insert(key, node[key])
    else:
        node[key] = _junk(rng)


def _text(rng: Random, header: bytes) -> bytes:
    """A change below the level of JSON: tokens put in, a row twice, bytes."""
    pick = rng.random()
    at = rng.randrange(len(header) + 1)
    if pick < 0.4:
        return header[:at] + rng.choice(_WORDS) + header[at + rng.choice((0, 1)) :]
    if pick < 0.7:
        rows = header.strip()[1:-1].split(b"},")
        row = rng.choice(rows)
        return b"{" + b"},".join([*rows[:-1], row.rstrip(b"}"), rows[-1]]) + b"}"
    return raw.mutate(rng, header, header)
