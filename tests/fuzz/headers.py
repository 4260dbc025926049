"""Mutations of headers that are text: of a safetensors file, of any JSON, of a .npy."""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

from tests.fuzz import pickles, raw
from tests.fuzz.raw import number, put, some_bytes, text

_JUNK: tuple[Any, ...] = (
    None, True, False, -1, 1.5, 1e400, "", "F32", "F4", "F8_E4M3", "BOOL", "X9", [], [0], [0, 0], [0, 4], [1, 2, 3], {},
    {"a": 1}, [[0]], "\ud800", 2**63, 2**64, -0.0,
)  # fmt: skip
_WORDS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\u0000", b"\\ud800", b"NaN", b"-0", b"1e999", b" ", b"\0", b"\xff", b"//",
)  # fmt: skip
_SHAPES = (
    b"()", b"(0,)", b"(2000000,1,1)", b"(1," * 40 + b")", b"(" + b"1," * 3000 + b")", b"(-1,)", b"(True,)", b"(2**9,)", b"(3",
    b"[3]", b"(4611686018427387904,4)", b"(1e3,)", b"(0x10,)", b"(1_0,)", b"(3L,)", b"(65536,65536,0)",
)  # fmt: skip
_TYPES = (b"<f4", b">f4", b"|O", b"|b1", b"<f16", b"<U9", b"|S3", b"<c8", b"<M8[s]", b"V8", b"<i8", b"|u1", b"<f2", b"", b"=f4")


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A mutation of a safetensors file: its length, its JSON as a tree, its JSON as text, its data."""
    length = int.from_bytes(data[:8], "little")
    header, body, pick = data[8 : 8 + length], data[8 + length :], rng.random()
    if pick < 0.8:
        header = _tree(rng, header) if pick < 0.55 else _text(rng, header)
    elif pick < 0.9:
        body = raw.mutate(rng, body, other)
    size = number(rng, len(header)) % 2**64 if rng.random() < 0.1 else len(header)
    return size.to_bytes(8, "little") + header + body


def mutate_json(rng: Random, data: bytes) -> bytes:
    """A mutation of JSON, as a tree or as text."""
    return _tree(rng, data) if rng.random() < 0.7 else _text(rng, data)


def mutate_npy(rng: Random, data: bytes) -> bytes:
    """A mutation of a .npy: its header's text, the header's length, the bytes behind it."""
    pick, length = rng.random(), int.from_bytes(data[8:10], "little")
    header, body = data[10 : 10 + length], data[10 + length :]
    if pick < 0.4:
        shape = rng.choice(_SHAPES) if rng.random() < 0.7 else b"(%d, %d)" % (number(rng, 3), number(rng, 2))
        header = re.sub(rb"\([^)]*\)", lambda _: shape, header, count=1)
    elif pick < 0.6:
        header = re.sub(rb"'[<>|=][\w]+'", lambda _: b"'" + rng.choice(_TYPES) + b"'", header, count=1)
    elif pick < 0.8:
        header = put(rng, header, rng.choice((b"'", b"{", b"}", b",", b":", b"(", b"#", some_bytes(rng))))
    elif pick < 0.9 and body[:1] == b"\x80":
        body = pickles.mutate(rng, body, body)
    else:
        return raw.mutate(rng, data, data)
    return data[:8] + (len(header) % 65536).to_bytes(2, "little") + header + body


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
        if not (isinstance(node[key], dict | list) and node[key] and rng.random() < 0.85):
            _put(rng, node, key)
            return
        node = node[key]
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
    if pick < 0.4:
        return put(rng, header, rng.choice(_WORDS))
    if pick < 0.7:
        rows = header.strip()[1:-1].split(b"},")
        return b"{" + b"},".join([*rows[:-1], rng.choice(rows).rstrip(b"}"), rows[-1]]) + b"}"
    return raw.mutate(rng, header, header)
