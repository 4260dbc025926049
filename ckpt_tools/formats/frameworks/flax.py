"""Flax: `flax.serialization.to_bytes`, msgpack of nested maps with arrays in them, which become one map.

An array is extension 1, itself msgpack of (shape, dtype, bytes); one over 2**30 bytes a map of `__msgpack_chunked_array__`.
Source: flax/serialization.py (`_msgpack_ext_pack`, `_chunk`), the msgpack specification.
"""

from __future__ import annotations

import re
import struct

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, NotACheckpointError, UnsupportedContainerError
from ckpt_tools.formats.base import Cursor, repeated, row_major, trailing
from ckpt_tools.formats.checkpoint import Checkpoint, state_dict
from ckpt_tools.io.content import Content, Joined, Literal, Range
from ckpt_tools.io.source import Source
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Dict, Entry, List, Node

# A map, and the text of its first key.
_START = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.|\xda..)[\w/.-]", re.DOTALL)
_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_DTYPES = {dtype.name: dtype for dtype in DTYPES.values() if dtype.safetensors and dtype.itemsize and dtype.packed == 1}
_DTYPES |= {"complex128": DTYPES["complex128"], "V2": DTYPES["bfloat16"], "bool_": DTYPES["bool"]}  # V2: without ml_dtypes
_CONSTANTS: dict[int, Node] = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA: "f", 0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
# What a byte begins, and its size or the number that says it.
_SIZED: dict[int, tuple[str, int | str]] = {
    **{0x80 + size: ("map", size) for size in range(16)}, **{0x90 + size: ("list", size) for size in range(16)},
    **{0xA0 + size: ("text", size) for size in range(32)}, **{0xD4 + power: ("extension", 1 << power) for power in range(5)},
    0xC4: ("bytes", "B"), 0xC5: ("bytes", "H"), 0xC6: ("bytes", "I"), 0xC7: ("extension", "B"), 0xC8: ("extension", "H"),
    0xC9: ("extension", "I"), 0xD9: ("text", "B"), 0xDA: ("text", "H"), 0xDB: ("text", "I"), 0xDC: ("list", "H"),
    0xDD: ("list", "I"), 0xDE: ("map", "H"), 0xDF: ("map", "I"),
}  # fmt: skip
_NODES_OF_MAP, _VALUES_PER_NODE = 5, 4


def sniff(head: bytes) -> bool:
    return _START.match(head) is not None


def decode(source: Source) -> Checkpoint:
    reader = _Reader(source)
    root = reader.value(0)
    if type(root) is not Dict:
        raise DamagedFileError("The msgpack file does not hold a map.")
    made = state_dict("flax", source, _flat(root, reader.cursor))
    if not reader.count:
        raise NotACheckpointError(f"{source.path} is not a checkpoint.", why="It is msgpack, and no array of Flax is in it.")
    made.warnings += trailing(source.size - reader.cursor.at, "the map")
    return made


def _flat(root: Dict, cursor: Cursor) -> list[tuple[str, Node]]:
    """Everything below the maps under its dotted path; an empty map stays."""
    found: list[tuple[str, Node]] = []
    pending: list[tuple[str, Node]] = [("", root)]
    while pending:
        path, node = pending.pop()
        if type(node) is Dict and (node.items or not path):
            cursor.hold(sum(map(len, node.named)) + len(path) * len(node.items))
            pending += [(f"{path}.{key}" if path else key, value) for key, value in reversed(node.named.items())]
        else:
            found.append((path, node))
    return found


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.cursor = source, Cursor(source, 0, source.size, "msgpack file", ">")
        self.count = 0

    def value(self, depth: int) -> Node:
        """The next value; bytes are read."""
        node = self._next(depth)
        if isinstance(node, Range):
            self.cursor.hold(node.length)
            return self.source.read(node.offset, node.length)
        return node

    def _next(self, depth: int) -> Node | Range:
        """The next value; bytes are passed over."""
        code = self.cursor.take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 256
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self.cursor.numbers(_NUMBERS[code], 1)[0]
        if code not in _SIZED:
            raise DamagedFileError(f"The msgpack file holds the byte {code:#x} where a value begins, at {self.cursor.at - 1}.")
        kind, width = _SIZED[code]
        size = width if isinstance(width, int) else self.cursor.number(width)
        if kind == "bytes":
            return Range(self.source, self.cursor.skip(size), size)
        self.cursor.check(size)  # what is in a map or a list takes a byte at least
        if kind == "text":
            self.cursor.hold(size)
            try:
                return self.cursor.take(size).decode()
            except UnicodeDecodeError:
                raise DamagedFileError("The msgpack file holds text that is not UTF-8.") from None
        limits.check_depth(depth, "The msgpack file is nested too deep.")
        if kind == "extension":
            return self._extension(size, depth)
        self.cursor.count(_NODES_OF_MAP + size // _VALUES_PER_NODE)
        return self._map(size, depth) if kind == "map" else List([self.value(depth + 1) for _ in range(size)])

    def _map(self, count: int, depth: int) -> Node:
        items: list[tuple[Node, Node]] = []
        for _ in range(count):
            key = self.value(depth + 1)
            if type(key) not in (str, int):
                raise DamagedFileError("The msgpack file has a key that is not text.")
            items.append((str(key), self.value(depth + 1)))
        if (name := repeated((str(key), None) for key, _ in items)) is not None:
            raise DamagedFileError(f"The msgpack file has the key {name!r} twice in one map.")
        made = Dict(items, ordered=True)
        return self._chunked(made) if _CHUNKED in made.named else made

    def _extension(self, size: int, depth: int) -> Node:
        """An array, a number of NumPy's, or a complex one."""
        kind = self.cursor.take(1)[0]
        if kind not in (_ARRAY, _COMPLEX, _SCALAR):
            raise UnsupportedContainerError(f"The msgpack file holds the extension {kind}, which Flax does not write.")
        self.cursor.check(size)
        outer, self.cursor.end = self.cursor.end, self.cursor.at + size
        code = self.cursor.take(1)[0]
        parts = [self._next(depth + 1) for _ in range(code & 15 if 0x90 <= code < 0xA0 else 0)]
        is_whole, self.cursor.end = self.cursor.at == self.cursor.end, outer
        match parts:
            case [float() | int() as real, float() | int() as imaginary] if is_whole and kind == _COMPLEX:
                return self._entry("complex128", [], Literal(struct.pack("<2d", real, imaginary)))
            case [List() as sizes, str() as name, Range() as data] if is_whole and kind != _COMPLEX:
                return self._entry(name, sizes.items, data)
        raise _malformed()

    def _entry(self, name: str, sizes: list[Node], content: Content) -> Entry:
        if name not in _DTYPES:
            raise UnsupportedContainerError(f"The msgpack file holds an array of {name[:40]!r}, which torch does not have.")
        shape = tuple(size for size in sizes if type(size) is int and size >= 0)
        if len(shape) < len(sizes):
            raise _malformed()
        self.count += 1
        limits.NODES.check(limits.LISTED * self.count, f"The file holds {self.count} arrays.", self.source.size)
        return row_major(str(self.count - 1), _DTYPES[name], shape, content, "An array of the msgpack file")

    def _chunked(self, node: Dict) -> Entry:
        pieces = _in_order(node.get("chunks"))
        entries = [piece for piece in pieces if type(piece) is Entry]
        if not entries or len(entries) < len(pieces) or len({entry.dtype for entry in entries}) > 1:
            raise _malformed()
        whole = Joined(tuple(entry.storage.content for entry in entries))
        return self._entry(entries[0].dtype.name, _in_order(node.get("shape")), whole)


def _in_order(node: Node) -> list[Node]:
    """The values of a map of places, which is how Flax writes a list."""
    rows = node.named if type(node) is Dict else {"": None}
    if list(rows) != [str(place) for place in range(len(rows))]:
        raise _malformed()
    return [*rows.values()]


def _malformed() -> DamagedFileError:
    return DamagedFileError("An array of the msgpack file is not as Flax writes it.")
