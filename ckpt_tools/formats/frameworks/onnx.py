"""ONNX: the initializers of a model's graph, which are its weights. A protobuf message; nodes and types are passed over.

What made the model, its opsets and metadata_props become text in the metadata. Source: onnx/onnx.proto,
onnx/external_data_helper.py, the protobuf encoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from math import prod

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Cursor, Warned, row_major
from ckpt_tools.formats.checkpoint import Checkpoint, state_dict
from ckpt_tools.io.content import Computed, Content, Joined, Range, chunks
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, Entry

# ir_version, then another field of ModelProto: producer_name and _version, domain, model_version, doc_string, graph, opsets
_START = re.compile(rb"\x08[\x01-\x20](?:[\x12\x1a\x22\x32\x3a\x42]|\x28[\x00-\x7f]*)")
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn",
    18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint8", 22: "int8", 23: "float4_e2m1fn_x2",
    24: "float8_e8m0fnu",
}  # fmt: skip
_UINT4, _INT4, _FLOAT4 = 21, 22, 23  # two elements in a byte, the low half first
_STRING, _RAW = 8, 9
_INSIDE, _EXTERNAL = 0, 1
# which types have their elements in a field of numbers; all may have them in raw_data
_IN_FIELD = {
    4: {1, 14}, 5: {2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20, 21, 22, 23, 24}, 7: {7}, 10: {11, 15}, 11: {12, 13},
}  # fmt: skip
_NUMBER, _WIDE, _BYTES, _NARROW = 0, 1, 2, 5  # wire types
# of each message the fields that are read, with the wire types that they may have: to others a program is blind
_MODEL = {1: (_NUMBER,), 5: (_NUMBER,), **dict.fromkeys((2, 3, 4, 6, 7, 8, 14), (_BYTES,))}
_GRAPH = dict.fromkeys((2, 5, 15), (_BYTES,))
_TENSOR = {
    **dict.fromkeys((1, 5, 7, 11), (_NUMBER, _BYTES)), **dict.fromkeys((3, 6, 8, 9, 13), (_BYTES,)),
    2: (_NUMBER,), 14: (_NUMBER,), 4: (_BYTES, _NARROW), 10: (_BYTES, _WIDE),
}  # fmt: skip
_PAIR, _OPSET = {1: (_BYTES,), 2: (_BYTES,)}, {1: (_BYTES,), 2: (_NUMBER,)}
_Wires = Mapping[int, tuple[int, ...]]
_Message = dict[int, list[Range]]
_MAX_FIELD = (1 << 29) - 1
_MODEL_KEYS = {
    1: "ir_version", 2: "producer_name", 3: "producer_version", 4: "domain", 5: "model_version", 6: "doc_string",
}  # fmt: skip
_LONGEST = 70  # bits in ten bytes of seven
_COUNT = re.compile(r"[0-9]{1,19}")


def sniff(head: bytes) -> bool:
    return _START.match(head) is not None


def decode(source: Source) -> Checkpoint:
    return decode_with_others(source, None)


def decode_with_others(source: Source, files: Files | None) -> Checkpoint:
    reader = _Reader(source, files)
    model = reader.fields(Range(source, 0, source.size), _MODEL)
    if 7 not in model:
        why = "A saved_model.pb of TensorFlow begins as one does, and is not read here."
        raise UnsupportedContainerError("This is no ONNX model, which would have a graph.", why=why)
    metadata = {}
    for number, name in _MODEL_KEYS.items():
        if number in model:
            place = model[number][-1]
            metadata[f"onnx.{name}"] = str(_signed(_number(place))) if _MODEL[number] == (_NUMBER,) else reader.text(place)
    for place in model[7]:
        graph = reader.fields(place, _GRAPH)
        if 2 in graph:
            metadata["onnx.graph"] = reader.text(graph[2][-1])
        for initializer in graph.get(5, ()):
            reader.initializer(initializer)
        if 15 in graph:
            text = f"{len(graph[15])} sparse initializers of the model are left out"
            reader.warnings.append(Warned("left-out", text, "dense tensors"))
    for place in model.get(14, ()):
        key, value = reader.pair(place, _PAIR)
        metadata[key] = reader.text(value) if value else ""
    opsets = dict(reader.pair(place, _OPSET) for place in model.get(8, ()))
    if opsets:
        metadata["onnx.opset"] = json.dumps({name: _signed(_number(row)) if row else 0 for name, row in opsets.items()})
    made = state_dict("onnx", files if reader.elsewhere and files else source, reader.items)
    made.metadata, made.warnings = metadata, reader.warnings
    return made


def _cursor(place: Range) -> Cursor:
    return Cursor(place.source, place.offset, place.offset + place.length, "ONNX model")


def _varint(cursor: Cursor) -> int:
    value = 0
    for shift in range(0, _LONGEST, 7):
        byte = cursor.take(1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF
    raise DamagedFileError(f"The ONNX model has a number of more than ten bytes at byte {cursor.at}.")


def _number(place: Range) -> int:
    return _varint(_cursor(place))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class _Reader:
    def __init__(self, source: Source, files: Files | None) -> None:
        self.source, self.files = source, files
        self.items: list[tuple[str, Entry]] = []
        self.warnings: list[Warned] = []
        self.elsewhere = False

    def fields(self, place: Range, wires: _Wires) -> _Message:
        cursor, found = _cursor(place), _Message()
        while cursor.at < cursor.end:
            cursor.count(1)
            tag = _varint(cursor)
            number, wire = tag >> 3, tag & 7
            if not 0 < number <= _MAX_FIELD or wire not in wires.get(number, (_NUMBER, _WIDE, _BYTES, _NARROW)):
                raise DamagedFileError(f"The ONNX model holds the field {number} of the wire type {wire} at byte {cursor.at}.")
            start = cursor.at
            if wire == _NUMBER:
                _varint(cursor)
            elif wire == _BYTES:
                length = _varint(cursor)
                start = cursor.skip(length)
            else:
                cursor.skip(8 if wire == _WIDE else 4)
            if number in wires:
                found.setdefault(number, []).append(Range(place.source, start, cursor.at - start))
        return found

    def text(self, place: Range) -> str:
        cursor = _cursor(place)
        cursor.hold(place.length)
        return cursor.take(place.length).decode(errors="backslashreplace")

    def pair(self, place: Range, wires: _Wires) -> tuple[str, Range | None]:
        """Field 1 of a message, a text, and where field 2 is."""
        found = self.fields(place, wires)
        return self.text(found[1][-1]) if 1 in found else "", found[2][-1] if 2 in found else None

    def initializer(self, place: Range) -> None:
        row = self.fields(place, _TENSOR)
        name = self.text(row[8][-1]) if 8 in row else ""
        called = f"The initializer {name!r}"
        kind, location = (_number(row[number][-1]) if number in row else 0 for number in (2, 14))
        sizes = [_signed(size) for part in row.get(1, ()) for size in islice(_packed(part), MAX_DIMENSIONS + 1)]
        self.elsewhere |= location == _EXTERNAL
        if len(sizes) > MAX_DIMENSIONS:
            raise TensorError(f"An initializer of the ONNX model has more than {MAX_DIMENSIONS} dimensions.")
        if 3 in row:
            raise UnsupportedContainerError("An initializer of the ONNX model is cut into segments, which is not read.")
        if kind == _STRING:
            self.warnings.append(Warned("left-out", f"the initializer {name!r} is text, and is left out", "numbers"))
            return
        if kind not in _DTYPES:
            raise UnsupportedContainerError(f"{called} is of ONNX's type {kind}, which torch does not have.")
        if location not in (_INSIDE, _EXTERNAL):
            raise DamagedFileError(f"{called} is at the unknown location {location}.")
        dtype, shape = DTYPES[_DTYPES[kind]], tuple(sizes)
        content = self._external(row, called) if location == _EXTERNAL else _inside(row, kind, shape, called)
        if kind in (_UINT4, _INT4):
            content = _one_a_byte(content, prod(shape), kind, called)
        elif kind == _FLOAT4:
            if not shape or shape[-1] % 2:
                raise UnsupportedContainerError(f"{called} is float4 with an odd last size, which torch has not.")
            shape = (*shape[:-1], shape[-1] // 2)
        count = len(self.items)
        limits.NODES.check(limits.LISTED * count, f"The model lists {count} initializers.", self.source.size)
        self.items.append((name, row_major(str(count), dtype, shape, content, called)))

    def _external(self, row: _Message, called: str) -> Content:
        said = dict(self.pair(place, _PAIR) for place in row.get(13, ()))
        texts = {key: self.text(value) if value else "" for key, value in said.items()}
        location = texts.get("location", "")
        if self.files is None:
            what = f"{called} is in another file, {location!r}, beside the model."
            raise UnsupportedContainerError(what, fix="Name the model where that file is beside it.")
        if not all(_COUNT.fullmatch(texts.get(key, "0")) for key in ("offset", "length")):
            raise DamagedFileError(f"{called} has an offset or a length in another file that is not a number.")
        other = self.files.open(location)
        start = int(texts.get("offset", "0"))
        size = int(texts.get("length", other.size - start))
        if size < 0 or start + size > other.size:
            why = f"Its bytes end at {start + size}; the file has {other.size}."
            raise DamagedFileError(f"{called} reaches outside {location!r}.", why=why, fix="Get that file again.")
        return Range(other, start, size)


def _inside(row: _Message, kind: int, shape: tuple[int, ...], called: str) -> Content:
    fields = {number: row[number] for number in (_RAW, 6) if number in row}
    fields |= {number: parts for number in _IN_FIELD if (parts := [part for part in row.get(number, ()) if part.length])}
    number, parts = next(iter(fields.items()), (_RAW, []))
    if len(fields) > 1 or (number == _RAW and len(parts) > 1):
        raise DamagedFileError(f"{called} has its elements in two places.")
    if number != _RAW and kind not in _IN_FIELD.get(number, ()):
        raise DamagedFileError(f"{called} has its elements in a field of another type.")
    content: Content = parts[0] if len(parts) == 1 else Joined(tuple(parts))
    if number in (_RAW, 4, 10):
        return content
    width, count = DTYPES[_DTYPES[kind]].itemsize, max(prod(shape), 0)
    if kind in (_UINT4, _INT4, _FLOAT4):
        count = -(-count // 2)
    if count > content.length:  # a number takes a byte at least
        raise TensorError(f"{called} has fewer numbers than its shape.")
    return Computed(count * width, lambda: _numbers(content, width, count, called), content)


def _packed(place: Range) -> Iterator[int]:
    cursor = _cursor(place)
    while cursor.at < cursor.end:
        yield _varint(cursor)


def _numbers(content: Content, width: int, count: int, called: str) -> Iterator[bytes]:
    """Packed numbers as elements of `width` bytes; those of 16 bits and fewer stand in them as they are."""
    value = shift = 0
    mask = (1 << 8 * width) - 1
    for chunk in chunks(content):
        made = bytearray()
        for byte in bytes(chunk):
            value |= (byte & 0x7F) << min(shift, _LONGEST)
            shift += 7
            if byte < 0x80:
                made += (value & mask).to_bytes(width, "little")
                value = shift = 0
        count -= len(made) // width
        if count < 0 or shift > _LONGEST:
            break
        yield bytes(made)
    if count:
        raise DamagedFileError(f"{called} has more or fewer numbers than its shape.")


def _one_a_byte(content: Content, count: int, kind: int, called: str) -> Computed:
    if content.length != -(-count // 2):
        raise TensorError(f"{called} has {content.length} bytes, and its shape needs {-(-count // 2)}.")
    numbers = [half - 16 if kind == _INT4 and half > 7 else half for half in range(16)]
    low, high = (bytes(numbers[byte >> shift & 15] & 255 for byte in range(256)) for shift in (0, 4))

    def work() -> Iterator[bytes | memoryview]:
        left = count
        for chunk in chunks(content):
            data, made = bytes(chunk), bytearray(2 * len(chunk))
            made[::2], made[1::2] = data.translate(low), data.translate(high)
            yield memoryview(made)[:left]
            left -= min(left, len(made))

    return Computed(count, work, content)
