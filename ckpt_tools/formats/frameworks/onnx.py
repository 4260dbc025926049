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
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, Entry

# ir_version, then another field of ModelProto: producer_name and _version, domain, model_version, doc_string, graph, opsets
_START = re.compile(rb"\x08[\x01-\x20](?:[\x12\x1a\x22\x32\x3a\x42]|\x28[\x00-\x7f]*)")
# What a type is to torch, and the field of numbers that may hold elements of it; raw_data may hold those of all.
_TYPES = {
    1: ("float32", 4), 2: ("uint8", 5), 3: ("int8", 5), 4: ("uint16", 5), 5: ("int16", 5), 6: ("int32", 5), 7: ("int64", 7),
    9: ("bool", 5), 10: ("float16", 5), 11: ("float64", 10), 12: ("uint32", 11), 13: ("uint64", 11), 14: ("complex64", 4),
    15: ("complex128", 10), 16: ("bfloat16", 5), 17: ("float8_e4m3fn", 5), 18: ("float8_e4m3fnuz", 5), 19: ("float8_e5m2", 5),
    20: ("float8_e5m2fnuz", 5), 21: ("uint8", 5), 22: ("int8", 5), 23: ("float4_e2m1fn_x2", 5), 24: ("float8_e8m0fnu", 5),
}  # fmt: skip
_STRING, _UINT4, _INT4, _FLOAT4 = 8, 21, 22, 23  # of the last three are two elements in a byte, the low half first
_FLOATS, _STRINGS, _RAW, _DOUBLES = 4, 6, 9, 10  # fields of a tensor
_VARINT, _WIDE, _BYTES, _NARROW = 0, 1, 2, 5  # wire types
_Wires = Mapping[int, tuple[int, ...]]
_NUMBER, _TEXT, _NUMBERS = (_VARINT,), (_BYTES,), (_VARINT, _BYTES)
# Of each message the fields that are read, with the wire types that they may have: to others a program is blind.
_MODEL: _Wires = {1: _NUMBER, 5: _NUMBER, **dict.fromkeys((2, 3, 4, 6, 7, 8, 14), _TEXT)}
_GRAPH: _Wires = {2: _TEXT, 5: _TEXT, 15: _TEXT}
_TENSOR: _Wires = {
    **dict.fromkeys((1, 5, 7, 11), _NUMBERS), **dict.fromkeys((3, 6, 8, 9, 13), _TEXT), 2: _NUMBER, 14: _NUMBER,
    _FLOATS: (_BYTES, _NARROW), _DOUBLES: (_BYTES, _WIDE),
}  # fmt: skip
_PAIR: _Wires = {1: _TEXT, 2: _TEXT}
_OPSET: _Wires = {1: _TEXT, 2: _NUMBER}
_KEYS = {1: "ir_version", 2: "producer_name", 3: "producer_version", 4: "domain", 5: "model_version", 6: "doc_string"}
_LONGEST = 70  # bits in ten bytes of seven
_COUNT = re.compile(r"[0-9]{1,19}")


def sniff(head: bytes) -> bool:
    return _START.match(head) is not None


def decode(source: Source, files: Files | None = None) -> Checkpoint:
    model = _fields(Range(source, 0, source.size), _MODEL)
    if 7 not in model:
        why = "A saved_model.pb of TensorFlow begins as one does, and is not read here."
        raise UnsupportedContainerError("This is not an ONNX model: it has no graph.", why=why)
    metadata = {}
    for number, name in _KEYS.items():
        if number in model:
            place = model[number][-1]
            metadata[f"onnx.{name}"] = str(_signed(place)) if _MODEL[number] == _NUMBER else _text(place)
    items, warnings, is_elsewhere = list[tuple[str, Entry]](), list[Warned](), False
    for graph in (_fields(place, _GRAPH) for place in model[7]):
        if 2 in graph:
            metadata["onnx.graph"] = _text(graph[2][-1])
        for place in graph.get(5, ()):
            limits.NODES.check(limits.LISTED * len(items), f"The model lists {len(items)} initializers.", source.size)
            row = _fields(place, _TENSOR)
            name = _text(row[8][-1]) if 8 in row else ""
            is_elsewhere |= 14 in row and _signed(row[14][-1]) == 1
            if (entry := _initializer(row, name, str(len(items)), files)) is None:
                warnings.append(Warned("left-out", f"the initializer {name!r} is text, and is left out", "numbers"))
            else:
                items.append((name, entry))
        if 15 in graph:
            text = f"{len(graph[15])} sparse initializers of the model are left out"
            warnings.append(Warned("left-out", text, "dense tensors"))
    metadata |= _texts(model.get(14, ()))
    if opsets := [_fields(place, _OPSET) for place in model.get(8, ())]:
        versions = {_text(row[1][-1]) if 1 in row else "": _signed(row[2][-1]) if 2 in row else 0 for row in opsets}
        metadata["onnx.opset"] = json.dumps(versions)
    made = state_dict("onnx", files if is_elsewhere and files else source, items)
    made.metadata, made.warnings = metadata, warnings
    return made


decode_with_others = decode


# --- the encoding of messages


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


def _integers(place: Range) -> Iterator[int]:
    """The signed numbers that stand one behind another, or the one."""
    cursor = _cursor(place)
    while cursor.at < cursor.end:
        value = _varint(cursor)
        yield value - (1 << 64) if value >> 63 else value


def _signed(place: Range) -> int:
    return next(_integers(place))


def _text(place: Range) -> str:
    cursor = _cursor(place)
    cursor.hold(place.length)
    return cursor.take(place.length).decode(errors="backslashreplace")


def _fields(place: Range, wires: _Wires) -> dict[int, list[Range]]:
    """Where the fields of a message are that are read."""
    cursor, found = _cursor(place), dict[int, list[Range]]()
    while cursor.at < cursor.end:
        cursor.count(1)
        tag = _varint(cursor)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29 or wire not in wires.get(number, (_VARINT, _WIDE, _BYTES, _NARROW)):
            raise DamagedFileError(f"The ONNX model holds the field {number} of the wire type {wire} at byte {cursor.at}.")
        start = cursor.at
        if wire == _VARINT:
            _varint(cursor)
        elif wire == _BYTES:
            length = _varint(cursor)
            start = cursor.skip(length)
        else:
            cursor.skip(8 if wire == _WIDE else 4)
        if number in wires:
            found.setdefault(number, []).append(Range(place.source, start, cursor.at - start))
    return found


def _texts(places: list[Range] | tuple[()]) -> dict[str, str]:
    """Messages of a key and a value."""
    rows = (_fields(place, _PAIR) for place in places)
    return dict([_text(row[number][-1]) if number in row else "" for number in (1, 2)] for row in rows)


# --- a tensor


def _initializer(row: Mapping[int, list[Range]], name: str, key: str, files: Files | None) -> Entry | None:
    """The tensor of an initializer; None where it is text."""
    called = f"The initializer {name!r}"
    kind, location = (_signed(row[number][-1]) if number in row else 0 for number in (2, 14))
    shape = tuple(size for part in row.get(1, ()) for size in islice(_integers(part), MAX_DIMENSIONS + 1))
    if len(shape) > MAX_DIMENSIONS:
        raise TensorError(f"{called} has more than {MAX_DIMENSIONS} dimensions.")
    if 3 in row:
        raise UnsupportedContainerError(f"{called} is cut into segments, which is not read.")
    if kind == _STRING:
        return None
    if kind not in _TYPES:
        raise UnsupportedContainerError(f"{called} is of ONNX's type {kind}, which torch does not have.")
    if location not in (0, 1):
        raise DamagedFileError(f"{called} is at the unknown location {location}.")
    dtype, own, count = DTYPES[_TYPES[kind][0]], _TYPES[kind][1], max(prod(shape), 0)
    if location:
        content = _outside(_texts(row.get(13, [])), files, called)
    else:
        numbers = -(-count // 2) if kind in (_UINT4, _INT4, _FLOAT4) else count
        content = _inside(row, own, dtype.itemsize, numbers, called)
    if kind in (_UINT4, _INT4):
        content = _one_a_byte(content, count, kind, called)
    elif kind == _FLOAT4:
        if not shape or shape[-1] % 2:
            raise UnsupportedContainerError(f"{called} is float4 with an odd last size, which torch has not.")
        shape = (*shape[:-1], shape[-1] // 2)
    return row_major(key, dtype, shape, content, called)


def _outside(said: Mapping[str, str], files: Files | None, called: str) -> Content:
    location = said.get("location", "")
    if files is None:
        what = f"{called} is in another file, {location!r}, beside the model."
        raise UnsupportedContainerError(what, fix="Name the model where that file is beside it.")
    other = files.open(location)
    start, size = said.get("offset", "0"), said.get("length", "")
    if not _COUNT.fullmatch(start) or not (_COUNT.fullmatch(size) or "length" not in said):
        raise DamagedFileError(f"{called} has an offset or a length in another file that is not a number.")
    end = int(start) + int(size) if size else max(other.size, int(start))
    if end > other.size:
        why = f"Its bytes end at {end}; the file has {other.size}."
        raise DamagedFileError(f"{called} reaches outside {location!r}.", why=why, fix="Get that file again.")
    return Range(other, int(start), end - int(start))


def _inside(row: Mapping[int, list[Range]], own: int, width: int, count: int, called: str) -> Content:
    places = {  # a program takes raw_data, empty or not, and texts; numbers where there are some
        number: parts
        for number in (_RAW, _STRINGS, *{field for _, field in _TYPES.values()})
        if (parts := [part for part in row.get(number, ()) if part.length or number in (_RAW, _STRINGS)])
    }
    number, parts = next(iter(places.items()), (_RAW, []))
    if len(places) > 1 or number not in (_RAW, own) or (number == _RAW and len(parts) > 1):
        raise DamagedFileError(f"{called} has its elements in two places, or in a field of another type.")
    content: Content = parts[0] if len(parts) == 1 else Joined(tuple(parts))
    if number in (_RAW, _FLOATS, _DOUBLES):
        return content
    if count > content.length:  # a number takes a byte at least
        raise TensorError(f"{called} has fewer numbers than its shape.")
    return Computed(count * width, lambda: _numbers(content, width, count, called), content)


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
