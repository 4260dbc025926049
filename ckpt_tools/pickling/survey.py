"""What has to be known of a tree before it is written as a pickle: what is shared, its storages, the protocol."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_tools.pickling.machine import python3_name
from ckpt_tools.tree.nodes import CONTAINERS, PLAIN, ByteString, Entry, Global, Node, Storage
from ckpt_tools.tree.visit import parts

_LONG = 64  # bytes, or characters, of a value that goes through the memo
_SHORT = frozenset((type(None), bool, float))


class Survey:
    def __init__(self, root: Node) -> None:
        self.seen: set[int] = set()
        self.shared: set[int] = set()
        self.protocol = 2
        found: dict[int, Storage] = {}
        seen, shared, todo = self.seen, self.shared, [root]
        while todo:
            node = todo.pop()
            if type(node) is Global:
                self._note_global(node)
            elif type(node) is Storage:
                found[id(node)] = node
            elif type(node) in CONTAINERS or type(node) is Entry or is_long(node):
                if id(node) in seen:
                    shared.add(id(node))
                    continue
                seen.add(id(node))
                if type(node) is Entry and node.extras is None:  # the many
                    found[id(node.storage)] = node.storage
                else:
                    below = parts(node)
                    if not are_short(below):
                        todo += [part for part in below if type(part) not in PLAIN or is_long(part)]
        self.storages = list(found.values())

    def _note_global(self, node: Global) -> None:
        if "." in node.name or "\n" in node.module + node.name or python3_name(*_pair(node)) != _pair(node):
            self.protocol = 4


def are_short(items: Sequence[Node]) -> bool:
    """Whether these are plain values that are written as they are, each time, found without a loop in Python."""
    kinds = set(map(type, items)) - _SHORT
    if not kinds <= {int, str}:
        return False
    if not kinds:
        return True
    numbers = [item for item in items if type(item) is int] if int in kinds else [0]
    texts = [item for item in items if type(item) is str] if str in kinds else [""]
    return max(map(len, texts)) <= _LONG and max(max(numbers).bit_length(), min(numbers).bit_length()) <= 8 * _LONG


def is_long(node: Node) -> bool:
    """Whether a value is so long that writing it twice would matter: a file may use one text a million times."""
    if type(node) is str or type(node) is bytes:
        return len(node) > _LONG
    return (type(node) is int and node.bit_length() > 8 * _LONG) or (type(node) is ByteString and len(node.data) > _LONG)


def _pair(node: Global) -> tuple[str, str]:
    return node.module, node.name


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
