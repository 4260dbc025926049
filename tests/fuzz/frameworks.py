"""Mutations of what other frameworks write: fields of a GGUF, items of msgpack, messages of ONNX, blocks of HDF5."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.fuzz import raw
from tests.fuzz.raw import number, places, put_number, some_bytes, text

Token = tuple[str, bytes]  # "number", "text" (without its length), "bytes", or the head of something
_WIDTHS = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)  # of GGUF's types of values; 8 is text, 9 an array
_TEXT, _ARRAY = 8, 9
_MOST = 5000  # numbers and texts in a sample
_SIGNATURES = (b"TREE", b"SNOD", b"HEAP", b"GCOL", b"\x89HDF\r\n\x1a\n", b"\x01\0\x01\0")


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A mutation of a file that begins as one of these."""
    if data.startswith(b"GGUF"):
        return _gguf(rng, data)
    if data.startswith(b"\x89HDF"):
        return _blocks(rng, data)
    return _message(rng, data) if data.startswith(b"\x08") else _items(rng, data)


def is_one(data: bytes, name: str) -> bool:
    """Whether a sample is one of these."""
    return data.startswith((b"GGUF", b"\x89HDF")) or name.endswith((".onnx", ".msgpack"))


# --- GGUF: numbers of known widths, texts behind their lengths


class _Cursor:
    """Reads tokens of a GGUF, and remembers them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 8
        self.order: Any = "little" if data[4:6] != b"\0\0" else "big"
        self.tokens: list[Token] = [("bytes", data[:4]), ("number", data[4:8])]

    def number(self, width: int) -> int:
        found = self.data[self.at : self.at + width]
        self.at += width
        self.tokens.append(("number", found))
        if not found or len(self.tokens) > _MOST:
            raise ValueError("a mutated file, whose counts lie")
        return int.from_bytes(found, self.order)

    def text(self) -> None:
        length = int.from_bytes(self.data[self.at : self.at + 8], self.order)
        self.tokens.append(("text", self.data[self.at + 8 : self.at + 8 + length]))
        self.at += 8 + length

    def value(self, kind: int) -> None:
        if kind == _TEXT:
            self.text()
        elif kind == _ARRAY:
            kind = self.number(4)
            for _ in range(self.number(8)):
                self.value(kind)
        else:
            self.number(_WIDTHS[kind])


def _gguf(rng: Random, data: bytes) -> bytes:
    cursor = _Cursor(data)
    tensors, values = cursor.number(8), cursor.number(8)
    for _ in range(values):
        cursor.text()
        cursor.value(cursor.number(4))
    for _ in range(tensors):
        cursor.text()
        for width in (*[8] * cursor.number(4), 4, 8):
            cursor.number(width)
    tokens = cursor.tokens
    for _ in range(rng.choice((1, 1, 2))):
        at, pick = rng.randrange(len(tokens)), rng.random()
        kind, found = tokens[at]
        if pick < 0.2:
            tokens[at : at + 1] = [] if pick < 0.1 else [rng.choice(tokens), tokens[at]]
        elif kind == "number":
            of_a_type = len(found) == 4 and pick < 0.5
            changed = (
                rng.randrange(45).to_bytes(4, cursor.order)
                if of_a_type
                else put_number(rng, found, 0, len(found), cursor.order)
            )
            tokens[at] = kind, changed
        else:
            tokens[at] = kind, text(rng).encode("utf-8", "surrogatepass") if pick < 0.8 else raw.mutate(rng, found, found)
    out = b""
    for kind, found in tokens:
        length = len(found).to_bytes(8, cursor.order) if kind == "text" else b""
        out += (length if rng.random() < 0.99 else put_number(rng, length, 0, len(length), cursor.order)) + found
    return out + data[cursor.at :]


# --- msgpack: items, each a head and what belongs to it

_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FIXED = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xDC: 2, 0xDD: 4,
    0xDE: 2, 0xDF: 4, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_HEADS = (
    b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\x80", b"\x81", b"\x90", b"\x91", b"\x9f", b"\xdf\xff\xff\xff\xff", b"\xdd\0\1\0\0",
    b"\xdc\0\1", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xd3\x80\0\0\0\0\0\0\0", b"\xcf" + b"\xff" * 8, b"\x01", b"\xff", b"\x91" * 500,
    b"\xa1\xff", b"\xd4\1\0", b"\xc7\0\1", b"\xc6\xff\xff\xff\xff", b"\x81\xa1k\x01",
)  # fmt: skip


def _split(data: bytes) -> Iterator[Token]:
    at = 0
    while at < len(data):
        head, kind, start = data[at], "head", at + 1
        length = _FIXED.get(head, 0)
        if head in _LENGTHS:
            start += _LENGTHS[head]
            length = int.from_bytes(data[at + 1 : start], "big")
            kind = "text" if head >= 0xD9 else "bytes" if head < 0xC7 else "ext"
            start += kind == "ext"
        elif 0xA0 <= head < 0xC0:
            kind, length = "text", head - 0xA0
        if kind == "ext":
            yield kind, data[start - 1 : start + length]
        else:
            yield kind, data[at if kind == "head" else start : start + length]
        at = start + length


def _items(rng: Random, data: bytes) -> bytes:
    tokens = list(_split(data))
    for _ in range(rng.choice((1, 1, 2))):
        at, pick = rng.randrange(len(tokens)), rng.random()
        kind, found = tokens[at]
        if pick < 0.1 and len(tokens) > 1:
            del tokens[at]
        elif pick < 0.2:
            tokens.insert(at, rng.choice(tokens))
        elif pick < 0.35 or kind == "head":
            tokens[at] = "head", rng.choice(_HEADS)
        elif kind == "ext":
            code = bytes((rng.choice((1, 2, 3, 9, 255)),)) if pick < 0.45 else found[:1]
            tokens[at] = kind, code + _items(rng, found[1:])
        else:
            changed = text(rng).encode("utf-8", "surrogatepass") if kind == "text" else raw.mutate(rng, found, data)
            tokens[at] = kind, rng.choice((changed, b"<f4", b"object", b"bfloat16", b"__msgpack_chunked_array__", b"V8"))
    return b"".join(_packed(*token) for token in tokens)


def _packed(kind: str, data: bytes) -> bytes:
    if kind == "head":
        return data
    if kind == "ext":
        return b"\xc9" + (len(data) - 1).to_bytes(4, "big") + data
    if kind == "text" and len(data) < 32:
        return bytes((0xA0 | len(data),)) + data
    return {"text": b"\xdb", "bytes": b"\xc6"}[kind] + len(data).to_bytes(4, "big") + data


# --- ONNX: messages in messages


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes((value & 0x7F | 0x80,)), value >> 7
    return out + bytes((value,))


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def _fields(data: bytes) -> list[tuple[int, bytes]]:
    """The fields of a message: tag, and the bytes behind it without their length."""
    found, at = [], 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag & 7 == 2:
            length, at = _read_varint(data, at)
            end = at + length
        else:
            end = _read_varint(data, at)[1] if tag & 7 == 0 else at + (8 if tag & 7 == 1 else 4)
        if end > len(data) or tag & 7 not in (0, 1, 2, 5) or not tag >> 3:
            raise ValueError("no message")
        found.append((tag, data[at:end]))
        at = end
    return found


def _message(rng: Random, data: bytes) -> bytes:
    rows = _fields(data)
    at, pick = rng.randrange(len(rows)), rng.random()
    tag, found = rows[at]
    if pick < 0.1:
        del rows[at]
    elif pick < 0.2:
        rows.insert(rng.randrange(len(rows) + 1), rng.choice(rows))
    elif pick < 0.25:
        rows[at] = (rng.randrange(1, 30) << 3 | tag & 7), found
    elif tag & 7 == 2:
        rows[at] = tag, _inner(rng, found)
    else:
        value = number(rng, _read_varint(found, 0)[0]) % 2**64 if tag & 7 == 0 else 0
        rows[at] = tag, _varint(value if rng.random() < 0.5 else rng.randrange(25)) if tag & 7 == 0 else some_bytes(rng)
    return b"".join(_field(rng, *row) for row in rows)


def _inner(rng: Random, data: bytes) -> bytes:
    """A message with a change in it; else text or bytes."""
    try:
        if data and rng.random() < 0.9:
            return _message(rng, data)
    except (ValueError, IndexError):
        pass
    return text(rng).encode("utf-8", "surrogatepass") if rng.random() < 0.5 else raw.mutate(rng, data, data)


def _field(rng: Random, tag: int, data: bytes) -> bytes:
    length = len(data) if rng.random() < 0.995 else number(rng, len(data)) % 2**64
    return _varint(tag) + (_varint(length) if tag & 7 == 2 else b"") + data


# --- HDF5: numbers behind the signatures of its blocks


def _blocks(rng: Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4))):
        found = places(data, rng.choice(_SIGNATURES))
        at = (rng.choice(found) if found else 0) + rng.randrange(96)
        data = put_number(rng, data, at, rng.choice((1, 1, 2, 4, 8)))
    return data
