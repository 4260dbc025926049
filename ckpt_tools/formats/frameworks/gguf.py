"""GGUF: llama.cpp's format. A header of typed texts and numbers, then tensors, most of them in blocks of a quantised type.

Quantised tensors are read as the float32 numbers that they mean, a few blocks at a time. A model in several files
(`NAME-00001-of-00003.gguf`) is one. Source: ggml's docs/gguf.md, gguf-py's `gguf_reader.py` and `constants.py`.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError, DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Cursor, Warned, row_major
from ckpt_tools.formats.checkpoint import Checkpoint, state_dict
from ckpt_tools.formats.safetensors import GGUF_TYPES, restore_aliases, restore_state_dict_metadata
from ckpt_tools.io.content import Computed, Content, Literal, Piece, Range
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS, Entry, as_dict
from ckpt_tools.values.ggml import BY_NAME, BY_NUMBER, Q8_0, UNREAD, BlockType, numbers_of, quantised
from ckpt_tools.values.numeric import swapped
from ckpt_tools.values.pytorch import need_torch

MAGIC = b"GGUF"
_MAX_NAME = 1 << 16
STRING, ARRAY = 8, 9
# A key's type -> its name and the code of `struct`.
NUMBERS = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"), 6: ("f32", "f"),
    7: ("bool", "?"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip


def sniff(head: bytes) -> bool:
    return head.startswith(MAGIC)


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    kind: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.kind.elements * self.kind.nbytes


def decode(source: Source) -> Checkpoint:
    cursor = Cursor(source, len(MAGIC), source.size, "GGUF file")
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        cursor.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise UnsupportedContainerError(f"The GGUF file is of version {version}; ckpt reads 2 and 3.")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    limits.NODES.check(limits.LISTED * tensors, f"The file lists {tensors} tensors in {source.size} bytes.", source.size)
    warnings: list[Warned] = []
    metadata = _Values(cursor, warnings).read(keys)
    infos = [_info(cursor) for _ in range(tensors)]
    text = metadata.get("general.alignment", "32")
    alignment = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
    if alignment < 1 or alignment & (alignment - 1):
        raise DamagedFileError(f"The GGUF file has the alignment {text[:20]}, which is not a power of two.")
    start = -(-cursor.at // alignment) * alignment
    _check_places(infos, start, source.size, alignment)
    items = [(info.name, _entry(str(number), info, source, start, cursor.order)) for number, info in enumerate(infos)]
    made = state_dict("gguf", source, items)
    root = as_dict(made.root)
    root.items = restore_aliases(root.items, metadata)
    root.attributes = restore_state_dict_metadata(metadata)
    made.metadata, made.storage_bytes = metadata, sum(info.nbytes for info in infos)
    made.encodings = {info.name: info.kind.name for info in infos if info.kind.dtype is None}
    made.warnings = warnings + stored_types(made.encodings)
    return made


class _Values:
    """The keys and their values, as text: what is not text as JSON, with its type noted under GGUF_TYPES."""

    def __init__(self, cursor: Cursor, warnings: list[Warned]) -> None:
        self.cursor, self.warnings = cursor, warnings

    def read(self, count: int) -> dict[str, str]:
        metadata: dict[str, str] = {}
        types: dict[str, str] = {}
        self.cursor.count(2 * count)  # and its type
        for _ in range(count):
            key = _name(self.cursor, "key")
            if key in metadata:
                raise DamagedFileError(f"The GGUF file has the key {key!r} twice.", why="Two programs would read two values.")
            kind, value = self._value(self.cursor.number("I"), key)
            metadata[key] = value if kind == "string" else json.dumps(value)
            if kind != "string":
                types[key] = kind
        return metadata | ({GGUF_TYPES: json.dumps(types, separators=(",", ":"))} if types else {})

    def _value(self, kind: int, key: str) -> tuple[str, Any]:
        if kind == STRING:
            return "string", self._text(key)
        if kind == ARRAY:
            kind, count = self.cursor.number("I"), self.cursor.number("Q")
            self.cursor.check(count)  # an item takes a byte at least
            self.cursor.hold(count)
            self.cursor.count(count // _ITEMS_PER_NODE)
            if kind == STRING:
                return "[string]", [self._text(key) for _ in range(count)]
            if kind in NUMBERS:
                name, code = NUMBERS[kind]
                return f"[{name}]", list(self.cursor.numbers(code, count))
        if kind not in NUMBERS:
            raise UnsupportedContainerError(f"The key {key!r} of the GGUF file has the type {kind}, which ckpt does not read.")
        name, code = NUMBERS[kind]
        return name, self.cursor.numbers(code, 1)[0]

    def _text(self, key: str) -> str:
        length = self.cursor.number("Q")
        self.cursor.check(length)
        self.cursor.hold(length)
        raw = self.cursor.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            if not any(warned.code == "not-utf-8" for warned in self.warnings):
                self.warnings.append(Warned("not-utf-8", f"the text under {key!r} is not UTF-8; its odd bytes are escaped"))
            return raw.decode(errors="backslashreplace")


_ITEMS_PER_NODE = 4


def _name(cursor: Cursor, what: str) -> str:
    length = cursor.number("Q")
    if length > _MAX_NAME:
        raise DamagedFileError(f"A {what} of the GGUF file claims a name of {length} bytes.")
    try:
        return cursor.take(length).decode()
    except UnicodeDecodeError:
        raise DamagedFileError(f"A {what} of the GGUF file has a name that is not UTF-8.") from None


def _info(cursor: Cursor) -> _Info:
    name, dimensions = _name(cursor, "tensor"), cursor.number("I")
    if dimensions > MAX_DIMENSIONS:
        raise DamagedFileError(f"The tensor {name!r} claims {dimensions} dimensions.")
    shape = tuple(int(size) for size in reversed(cursor.numbers("Q", dimensions)))
    number, offset = cursor.number("I"), cursor.number("Q")
    kind = BY_NUMBER.get(number)
    if kind is None:
        known = UNREAD.get(number, f"of the unknown type {number}")
        raise UnsupportedContainerError(f"The tensor {name!r} is {known}, which ckpt does not read.")
    if prod(size or 1 for size in shape) > MAX_ELEMENTS:  # before it is asked whether so much is in the file
        raise TensorError(f"The tensor {name!r} has impossible sizes.")
    if kind.elements > 1 and (not shape or shape[-1] % kind.elements):
        raise DamagedFileError(f"The tensor {name!r} is {kind.name}, and its rows are not whole blocks of {kind.elements}.")
    return _Info(name, shape, kind, offset)


def _check_places(infos: Sequence[_Info], start: int, size: int, alignment: int) -> None:
    at = 0
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset % alignment:
            raise DamagedFileError(f"The tensor {info.name!r} is at {info.offset}, which is not a multiple of {alignment}.")
        if info.offset < at and info.nbytes:
            raise DamagedFileError(f"The tensor {info.name!r} overlaps another: it is at {info.offset}, and {at} is free.")
        at = max(at, info.offset + info.nbytes)
    if start + at > size and infos:
        whole = sum(start + info.offset + info.nbytes <= size for info in infos)
        raise DamagedFileError(
            f"The GGUF file is cut off: {whole} of {len(infos)} tensors complete.",
            why=f"Its tensors end at byte {start + at}, the file at {size}.", whole=whole,
        )  # fmt: skip


def _entry(key: str, info: _Info, source: Source, start: int, order: str) -> Entry:
    content: Content = Range(source, start + info.offset, info.nbytes)
    dtype = info.kind.dtype
    if dtype is None:
        if order == ">":
            raise UnsupportedContainerError(
                f"{info.name!r} is {info.kind.name} in a big-endian file, which ckpt does not read."
            )
        dtype, content = DTYPES["float32"], numbers_of(content, info.kind)
    elif order == ">":
        content = swapped(content, dtype.swap_width)
    return row_major(key, dtype, info.shape, content, repr(info.name))


def types_in(metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        found = load_json(metadata.get(GGUF_TYPES, "{}"))
    except ValueError:
        return {}
    return {key: kind for key, kind in found.items() if isinstance(kind, str)} if isinstance(found, dict) else {}


def stored_types(encodings: Mapping[str, str]) -> list[Warned]:
    if not encodings:
        return []
    counts = Counter(encodings.values())
    shown = ", ".join(f"{kind} x {count}" for kind, count in counts.most_common())
    text = f"{len(encodings)} tensors are quantised ({shown}); they are read as the float32 numbers that these mean"
    return [Warned("stored-types", text, severity="info")]


def schemes(decoded: Checkpoint) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, entry in as_dict(decoded.root).named.items():
        kind = decoded.encodings.get(name)
        if kind is None or type(entry) is not Entry or not isinstance(entry.storage.content, Computed):
            continue
        raw = entry.storage.content.of
        row = found.setdefault(kind, {"scheme": f"ggml {kind}", "tensors": 0, "elements": 0, "bytes": 0, "bf16_bytes": 0})
        row["tensors"] += 1
        row["elements"] += entry.numel
        row["bytes"] += raw.length if isinstance(raw, Range) else 0
        row["bf16_bytes"] += 2 * entry.numel
    return list(found.values())


# --- laying out: one flat state dict in plain types or Q8_0, its metadata as typed keys

_ALIGNMENT = 32
_LONGEST_NAME, _MOST_DIMENSIONS = 63, 4  # ggml's own: GGML_LONGEST_NAME with its end, GGML_MAX_DIMS
_BY_DTYPE = {row.dtype: row for row in BY_NAME.values() if row.dtype is not None}
_CODES = {name: (number, code) for number, (name, code) in NUMBERS.items()}
OF_THE_INPUT = "general.file_type"  # says of which types the tensors of the input were


def lay_out(
    tensors: Mapping[str, tuple[Entry, Content]], metadata: Mapping[str, str], *, quantise: bool = False
) -> list[Piece]:
    types = types_in(metadata)
    keys = [
        _text(key, key) + _value(types.get(key, "string"), key, text)
        for key, text in metadata.items()
        if key not in (GGUF_TYPES, OF_THE_INPUT) and (key, text) != ("format", "pt")  # which a safetensors header needs
    ]
    said = metadata.get("general.alignment", "")
    alignment = int(said) if said.isascii() and said.isdecimal() and len(said) < 6 else _ALIGNMENT
    if alignment < 1 or alignment & (alignment - 1):
        raise ConvertError(f"The metadata 'general.alignment' is {alignment}, which is not a power of two.")
    infos, pieces, at = [], list[Piece](), 0
    for name, (entry, content) in tensors.items():
        kind, made = _stored(name, entry, content, quantise=quantise)
        infos.append(_info_bytes(name, entry, kind, at))
        padding = -made.length % alignment
        pieces += [Piece(made), Piece(Literal(bytes(padding)))]
        at += made.length + padding
    head = MAGIC + struct.pack("<I2Q", 3, len(infos), len(keys)) + b"".join([*keys, *infos])
    return [Piece(Literal(head + bytes(-len(head) % alignment))), *pieces]


def becomes_q8_0(entry: Entry) -> bool:
    size = Q8_0.elements
    known = entry.dtype.family == "float" and entry.dtype.packed == 1 and entry.dtype.in_torch
    return known and len(entry.shape) > 1 and entry.numel > 0 and entry.shape[-1] % size == 0


def _stored(name: str, entry: Entry, content: Content, *, quantise: bool) -> tuple[BlockType, Content]:
    dtype = entry.dtype
    if quantise and becomes_q8_0(entry):
        need_torch("`dtype='q8_0'` works blocks out with it.")
        return Q8_0, quantised(content, dtype, name)
    kind = _BY_DTYPE.get(dtype)
    if kind is None:
        raise ConvertError(
            f"{name!r} is {dtype.name}, which GGUF has no type for.",
            fix="`dtype` casts floats; or write a .pth, which holds any tensor.",
        )
    return kind, content


def _info_bytes(name: str, entry: Entry, kind: BlockType, at: int) -> bytes:
    raw = _text(name, name)
    if len(raw) - 8 > _LONGEST_NAME:
        raise ConvertError(f"The name {name!r} is longer than the {_LONGEST_NAME} bytes that GGUF has.", fix="Use `rename`.")
    if len(entry.shape) > _MOST_DIMENSIONS:
        raise ConvertError(f"{name!r} has {len(entry.shape)} dimensions, and GGUF has {_MOST_DIMENSIONS} at most.")
    sizes = reversed(entry.shape)
    return raw + struct.pack(f"<I{len(entry.shape)}QIQ", len(entry.shape), *sizes, kind.number, at)


def _value(kind: str, key: str, text: str) -> bytes:
    if kind == "string":
        return struct.pack("<I", STRING) + _text(key, text)
    try:
        number, raw = _encoded(kind, key, json.loads(text))
    except (ValueError, TypeError, KeyError, struct.error, RecursionError):
        raise ConvertError(f"The metadata {key!r} is not of the type {kind[:20]}, which it has in GGUF.") from None
    return struct.pack("<I", number) + raw


def _encoded(kind: str, key: str, value: Any) -> tuple[int, bytes]:
    if not kind.startswith("["):
        number, code = _CODES[kind]
        return number, struct.pack(f"<{code}", value)
    if kind == "[string]":
        return ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(_text(key, text) for text in value)
    number, code = _CODES[kind[1:-1]]
    return ARRAY, struct.pack(f"<IQ{len(value)}{code}", number, len(value), *value)


def _text(key: str, text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise ConvertError(f"{key!r} holds a lone surrogate, which a GGUF cannot.") from None
    return struct.pack("<Q", len(raw)) + raw
