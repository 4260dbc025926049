"""GGUF: llama.cpp's format. A header of typed texts and numbers, then tensors, most of them in blocks of a quantised type.

Quantised tensors are read as the float32 numbers that they mean, a few blocks at a time. A model in several files
(`NAME-00001-of-00003.gguf`) is one. Source: ggml's docs/gguf.md, gguf-py's `gguf_reader.py` and `constants.py`.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError, DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Cursor, Warned, row_major
from ckpt_tools.formats.checkpoint import Checkpoint, state_dict
from ckpt_tools.formats.safetensors import GGUF_TYPES, restore_aliases, restore_state_dict_metadata
from ckpt_tools.io.content import Computed, Content, Literal, Piece, Range
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import Source
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS, Entry, as_dict
from ckpt_tools.values.ggml import BY_NAME, BY_NUMBER, Q8_0, UNREAD, BlockType, numbers_of, quantised
from ckpt_tools.values.numeric import swapped
from ckpt_tools.values.pytorch import need_torch

MAGIC = b"GGUF"
_MAX_NAME = 1 << 16
_ITEMS_PER_NODE = 4
STRING, ARRAY = 8, 9
# A key's type -> its name and the code of `struct`.
NUMBERS = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"), 6: ("f32", "f"),
    7: ("bool", "?"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip


def sniff(head: bytes) -> bool:
    return head.startswith(MAGIC)


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.kind.elements * self.kind.nbytes


def decode(source: Source) -> Checkpoint:
    header = _Header(source, len(MAGIC), source.size, "GGUF file")
    version = header.number("I")
    if version & 0xFFFF == 0:
        header.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise UnsupportedContainerError(f"The GGUF file is of version {version}; ckpt reads 2 and 3.")
    tensors, keys = header.number("Q"), header.number("Q")
    limits.NODES.check(limits.LISTED * tensors, f"The file lists {tensors} tensors in {source.size} bytes.", source.size)
    metadata = header.metadata(keys)
    infos = [header.info() for _ in range(tensors)]
    alignment = _alignment(metadata)
    if not alignment:
        what = f"The GGUF file has the alignment {metadata['general.alignment'][:20]}, which is not a power of two."
        raise DamagedFileError(what)
    start = -(-header.at // alignment) * alignment
    _check_places(infos, start, source.size, alignment)
    items = [(info.name, _entry(str(number), info, source, start, header.order)) for number, info in enumerate(infos)]
    made = state_dict("gguf", source, items)
    root = as_dict(made.root)
    root.items = restore_aliases(root.items, metadata)
    root.attributes = restore_state_dict_metadata(metadata)
    made.metadata, made.storage_bytes = metadata, sum(info.nbytes for info in infos)
    made.encodings = {info.name: info.kind.name for info in infos if info.kind.dtype is None}
    made.warnings = header.warnings + stored_types(made.encodings)
    return made


def _alignment(metadata: Mapping[str, str]) -> int:
    """What the offsets of tensors are multiples of; 0 where the file says something else than a power of two."""
    text = metadata.get("general.alignment", "32")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
    return 0 if number & (number - 1) else number


class _Header(Cursor):
    """What stands before the tensors."""

    def metadata(self, count: int) -> dict[str, str]:
        """The keys and their values, as text: what is not text as JSON, with its type noted under GGUF_TYPES."""
        metadata, types, self.warnings = dict[str, str](), dict[str, str](), list[Warned]()
        self.count(2 * count)  # and its type
        for _ in range(count):
            key = self._name("key")
            if key in metadata:
                raise DamagedFileError(f"The GGUF file has the key {key!r} twice.", why="Two programs would read two values.")
            kind, value = self._value(self.number("I"), key)
            metadata[key] = value if kind == "string" else json.dumps(value)
            if kind != "string":
                types[key] = kind
        return metadata | ({GGUF_TYPES: json.dumps(types, separators=(",", ":"))} if types else {})

    def info(self) -> _Info:
        name, dimensions = self._name("tensor"), self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise DamagedFileError(f"The tensor {name!r} claims {dimensions} dimensions.")
        shape = tuple(int(size) for size in reversed(self.numbers("Q", dimensions)))
        number, offset = self.number("I"), self.number("Q")
        kind = BY_NUMBER.get(number)
        if kind is None:
            known = UNREAD.get(number, f"of the unknown type {number}")
            raise UnsupportedContainerError(f"The tensor {name!r} is {known}, which ckpt does not read.")
        if prod(size or 1 for size in shape) > MAX_ELEMENTS:  # before it is asked whether so much is in the file
            raise TensorError(f"The tensor {name!r} has impossible sizes.")
        if kind.elements > 1 and (not shape or shape[-1] % kind.elements):
            what = f"The tensor {name!r} is {kind.name}, and its rows are not whole blocks of {kind.elements}."
            raise DamagedFileError(what)
        return _Info(name, shape, kind, offset)

    def _name(self, what: str) -> str:
        length = self.number("Q")
        if length > _MAX_NAME:
            raise DamagedFileError(f"A {what} of the GGUF file claims a name of {length} bytes.")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise DamagedFileError(f"A {what} of the GGUF file has a name that is not UTF-8.") from None

    def _value(self, kind: int, key: str) -> tuple[str, Any]:
        if kind == STRING:
            return "string", self._text(key)
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            self.check(count)  # an item takes a byte at least
            self.hold(count)
            self.count(count // _ITEMS_PER_NODE)
            if kind == STRING:
                return "[string]", [self._text(key) for _ in range(count)]
            if kind in NUMBERS:
                name, code = NUMBERS[kind]
                return f"[{name}]", list(self.numbers(code, count))
        if kind not in NUMBERS:
            raise UnsupportedContainerError(f"The key {key!r} of the GGUF file has the type {kind}, which ckpt does not read.")
        name, code = NUMBERS[kind]
        return name, self.numbers(code, 1)[0]

    def _text(self, key: str) -> str:
        length = self.number("Q")
        self.check(length)
        self.hold(length)
        raw = self.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.warnings = self.warnings or [
                Warned("not-utf-8", f"the text under {key!r} is not UTF-8; its odd bytes are escaped")
            ]
            return raw.decode(errors="backslashreplace")


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

_MOST_ALIGNMENT = 1 << 16
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
    alignment = _alignment(metadata)
    if not 0 < alignment <= _MOST_ALIGNMENT:
        raise ConvertError(f"The metadata 'general.alignment' is not a power of two up to {_MOST_ALIGNMENT}.")
    infos, pieces, at = [], list[Piece](), 0
    for name, (entry, content) in tensors.items():
        kind, made = _stored(name, entry, content, quantise=quantise)
        raw, sizes = _text(name, name), entry.shape[::-1]
        if len(raw) - 8 > _LONGEST_NAME:
            what = f"The name {name!r} is longer than the {_LONGEST_NAME} bytes that GGUF has."
            raise ConvertError(what, fix="Use `rename`.")
        if len(sizes) > _MOST_DIMENSIONS:
            raise ConvertError(f"{name!r} has {len(sizes)} dimensions, and GGUF has {_MOST_DIMENSIONS} at most.")
        infos.append(raw + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind.number, at))
        padding = -made.length % alignment
        pieces += [Piece(made), Piece(Literal(bytes(padding)))]
        at += made.length + padding
    head = MAGIC + struct.pack("<I2Q", 3, len(infos), len(keys)) + b"".join([*keys, *infos])
    return [Piece(Literal(head + bytes(-len(head) % alignment))), *pieces]


def becomes_q8_0(entry: Entry) -> bool:
    known = entry.dtype.family == "float" and entry.dtype.packed == 1 and entry.dtype.in_torch
    return known and len(entry.shape) > 1 and entry.numel > 0 and entry.shape[-1] % Q8_0.elements == 0


def _stored(name: str, entry: Entry, content: Content, *, quantise: bool) -> tuple[BlockType, Content]:
    dtype = entry.dtype
    if quantise and becomes_q8_0(entry):
        need_torch("`dtype='q8_0'` works blocks out with it.")
        return Q8_0, quantised(content, dtype, name)
    if dtype not in _BY_DTYPE:
        fix = "`dtype` casts floats; or write a .pth, which holds any tensor."
        raise ConvertError(f"{name!r} is {dtype.name}, which GGUF has no type for.", fix=fix)
    return _BY_DTYPE[dtype], content


def _value(kind: str, key: str, text: str) -> bytes:
    if kind == "string":
        return struct.pack("<I", STRING) + _text(key, text)
    try:
        value = json.loads(text)
        if kind == "[string]":
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_text(key, item) for item in value)
        number, code = _CODES[kind.strip("[]")]
        if kind.startswith("["):
            return struct.pack(f"<IIQ{len(value)}{code}", ARRAY, number, len(value), *value)
        return struct.pack(f"<I{code}", number, value)
    except (ValueError, TypeError, AttributeError, KeyError, struct.error, RecursionError):
        raise ConvertError(f"The metadata {key!r} is not of the type {kind[:20]}, which it has in GGUF.") from None


def _text(key: str, text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise ConvertError(f"{key!r} holds a lone surrogate, which a GGUF cannot.") from None
    return struct.pack("<Q", len(raw)) + raw
