"""The layout of a GGUF: one flat state dict in plain types or Q8_0, its metadata as typed keys."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import ConvertError
from ckpt_tools.formats.frameworks.gguf import ARRAY, MAGIC, NUMBERS, STRING, types_in
from ckpt_tools.formats.safetensors import GGUF_TYPES
from ckpt_tools.io.content import Content, Literal, Piece
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.ggml import BY_NAME, Q8_0, BlockType, quantised
from ckpt_tools.values.pytorch import need_torch

_ALIGNMENT = 32
_MAX_NAME, _MAX_DIMENSIONS = 63, 4  # ggml's own: GGML_MAX_NAME with its end, GGML_MAX_DIMS
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
        infos.append(_info(name, entry, kind, at))
        padding = -made.length % alignment
        pieces += [Piece(made), Piece(Literal(bytes(padding)))]
        at += made.length + padding
    head = MAGIC + struct.pack("<I2Q", 3, len(infos), len(keys)) + b"".join([*keys, *infos])
    return [Piece(Literal(head + bytes(-len(head) % alignment))), *pieces]


def becomes_q8_0(entry: Entry) -> bool:
    """Whether a tensor is a matrix of floats with rows of whole blocks."""
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


def _info(name: str, entry: Entry, kind: BlockType, at: int) -> bytes:
    raw = _text(name, name)
    if len(raw) - 8 > _MAX_NAME:
        raise ConvertError(f"The name {name!r} is longer than the {_MAX_NAME} bytes that GGUF has.", fix="Use `rename`.")
    if len(entry.shape) > _MAX_DIMENSIONS:
        raise ConvertError(f"{name!r} has {len(entry.shape)} dimensions, and GGUF has {_MAX_DIMENSIONS} at most.")
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
    if kind == "string":
        return STRING, _text(key, value)
    if not kind.startswith("["):
        number, code = _CODES[kind]
        return number, struct.pack(f"<{code}", value)
    inner = kind[1:-1]
    if inner in _CODES:
        number, code = _CODES[inner]
        return ARRAY, struct.pack(f"<IQ{len(value)}{code}", number, len(value), *value)
    found = [_encoded(inner, key, one) for one in value]
    number = STRING if inner == "string" else ARRAY
    return ARRAY, struct.pack("<IQ", number, len(value)) + b"".join(raw for _, raw in found)


def _text(key: str, text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise ConvertError(f"{key!r} holds a lone surrogate, which a GGUF cannot.") from None
    return struct.pack("<Q", len(raw)) + raw
