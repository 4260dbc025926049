"""Plain values as the opcodes that write them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
U32 = struct.Struct("<I").pack


def integer(value: int) -> bytes:
    """A whole number, in the shortest opcode for it."""
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes((len(data),)) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data


def integers(values: Sequence[int]) -> bytes:
    """Several whole numbers, one after another; most are of one byte."""
    if not values or min(values) < 0 or max(values) > 255:
        return b"".join(map(integer, values))
    written = bytearray(b"K") * (2 * len(values))
    written[1::2] = bytes(values)
    return bytes(written)


def text_of(text: str) -> bytes:
    """Text, lone surrogates too."""
    data = text.encode("utf-8", "surrogatepass")
    return b"X%b%b" % (U32(len(data)), data)


ENCODERS: dict[type, Callable[[Any], bytes]] = {
    str: text_of,
    int: integer,
    float: lambda number: b"G" + struct.pack(">d", number),
    bool: lambda value: b"\x88" if value else b"\x89",
    type(None): lambda _: b"N",
}


def int_tuple(sizes: tuple[int, ...]) -> bytes:
    """A tuple of ints."""
    items = b"".join(map(integer, sizes))
    return items + TUPLES[len(sizes)] if len(sizes) < 4 else b"(" + items + b"t"
