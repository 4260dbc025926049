"""ONNX: the initializers of a model's graph, which are its weights. A protobuf message; nodes and types are passed over.

    MUST   ModelProto: the graph (7); GraphProto: initializers (5); TensorProto: dims (1), data_type (2), name (8), and its
           elements in one place: raw_data (9), a field of numbers (4, 5, 7, 10, 11), or a file beside the model (13, 14)
    MAY    what made it, its version, its opsets and metadata_props: text in the metadata

Source: onnx/onnx.proto, onnx/external_data_helper.py, the protobuf encoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Decoded, Warned, row_major, state_dict
from ckpt_tools.formats.frameworks.cursor import Cursor
from ckpt_tools.formats.registry import Container
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
_MAX_FIELD = (1 << 29) - 1
_MODEL_TEXTS = {2: "producer_name", 3: "producer_version", 4: "domain", 6: "doc_string"}
_LONGEST = 70  # bits in ten bytes of seven


def sniff(head: bytes) -> bool:
    return _START.match(head) is not None


def _fields(place: Range, wires: _Wires, budget: limits.Budget) -> Iterator[tuple[int, int, Range]]:
    """(field, number, bytes) of a message: of a number also the bytes that it stands in."""
    cursor = _cursor(place)
    while cursor.at < cursor.end:
        budget.take(limits.NODES, 1, "The ONNX model has more fields than a file of its size can hold.")
        tag = _varint(cursor)
        number, wire = tag >> 3, tag & 7
        if not 0 < number <= _MAX_FIELD or wire not in wires.get(number, (_NUMBER, _WIDE, _BYTES, _NARROW)):
            raise DamagedFileError(f"The ONNX model holds the field {number} of the wire type {wire} at byte {cursor.at}.")
        start, value = cursor.at, 0
        if wire == _NUMBER:
            value = _varint(cursor)
        elif wire == _BYTES:
            length = _varint(cursor)
            start = cursor.skip(length)
        else:
            cursor.skip(8 if wire == _WIDE else 4)
        yield number, value, Range(place.source, start, cursor.at - start)


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


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@dataclass(slots=True)
class _Tensor:
    """What a TensorProto says. `fields`: the elements that are there, by the field's number."""

    name: str = ""
    dims: list[int] = field(default_factory=list)
    kind: int = 0
    fields: dict[int, list[Range]] = field(default_factory=dict)
    location: int = 0
    external: dict[str, str] = field(default_factory=dict)

    @property
    def called(self) -> str:
        return f"The initializer {self.name!r}"


def decode(source: Source, files: Files | None = None) -> Decoded:
    reader = _Reader(source, files)
    reader.model()
    if not reader.graphs:
        why = "A saved_model.pb of TensorFlow begins as one does, and is not read here."
        raise UnsupportedContainerError("This is no ONNX model, which would have a graph.", why=why)
    made = state_dict("onnx", files if reader.elsewhere and files else source, reader.items)
    made.metadata, made.warnings = reader.metadata, reader.warnings
    return made


class _Reader:
    def __init__(self, source: Source, files: Files | None) -> None:
        self.source, self.files = source, files
        self.budget = limits.budget(source.size)
        self.items: list[tuple[str, Entry]] = []
        self.metadata: dict[str, str] = {}
        self.warnings: list[Warned] = []
        self.graphs = 0
        self.elsewhere = False

    def model(self) -> None:
        opsets: dict[str, int] = {}
        for number, value, place in _fields(Range(self.source, 0, self.source.size), _MODEL, self.budget):
            if number == 1:
                self.metadata["onnx.ir_version"] = str(value)
            elif number == 5:
                self.metadata["onnx.model_version"] = str(_signed(value))
            elif number in _MODEL_TEXTS:
                self.metadata[f"onnx.{_MODEL_TEXTS[number]}"] = self._text(place)
            elif number == 7:
                self.graphs += 1
                self._graph(place)
            elif number == 8:
                domain, version = self._pair(place, _OPSET)
                opsets[domain] = version or 0
            elif number == 14:
                key, text = self._pair(place, _PAIR)
                self.metadata[key] = text
        if opsets:
            self.metadata["onnx.opset"] = json.dumps(opsets)

    def _graph(self, place: Range) -> None:
        sparse = 0
        for number, _, inner in _fields(place, _GRAPH, self.budget):
            if number == 5:
                self._initializer(self._tensor(inner))
            elif number == 2:
                self.metadata["onnx.graph"] = self._text(inner)
            sparse += number == 15
        if sparse:
            text = f"{sparse} sparse initializers of the model are left out"
            self.warnings.append(Warned("left-out", text, "dense tensors"))

    def _text(self, place: Range) -> str:
        self.budget.take(limits.MEMORY, place.length, "The ONNX model holds more text than any has.")
        return place.source.read(place.offset, place.length).decode(errors="backslashreplace")

    def _pair(self, place: Range, wires: _Wires) -> tuple[str, Any]:
        """Fields 1 and 2 of a message: a text, and a text or a number."""
        found: dict[int, Any] = {1: "", 2: ""}
        for number, value, inner in _fields(place, wires, self.budget):
            if number in found:
                found[number] = self._text(inner) if _BYTES in wires[number] else _signed(value)
        return found[1], found[2]

    def _tensor(self, place: Range) -> _Tensor:
        found = _Tensor()
        for number, value, inner in _fields(place, _TENSOR, self.budget):
            if number == 1:
                found.dims += [_signed(size) for size in islice(_packed(inner), MAX_DIMENSIONS + 1)]
                if len(found.dims) > MAX_DIMENSIONS:
                    raise TensorError(f"An initializer of the ONNX model has more than {MAX_DIMENSIONS} dimensions.")
            elif number == 2:
                found.kind = value
            elif number == 3:
                raise UnsupportedContainerError("An initializer of the ONNX model is cut into segments, which is not read.")
            elif number == 8:
                found.name = self._text(inner)
            elif number == 13:
                key, text = self._pair(inner, _PAIR)
                found.external[key] = text
            elif number == 14:
                found.location = value
            elif number == _RAW or (number in _IN_FIELD and inner.length) or number == 6:
                found.fields.setdefault(number, []).append(inner)
        return found

    def _initializer(self, tensor: _Tensor) -> None:
        self.elsewhere |= tensor.location == _EXTERNAL
        if tensor.kind == _STRING:
            self.warnings.append(Warned("left-out", f"the initializer {tensor.name!r} is text, and is left out", "numbers"))
            return
        if tensor.kind not in _DTYPES:
            raise UnsupportedContainerError(f"{tensor.called} is of ONNX's type {tensor.kind}, which torch does not have.")
        content, dtype, shape = self._content(tensor), DTYPES[_DTYPES[tensor.kind]], tuple(tensor.dims)
        if tensor.kind in (_UINT4, _INT4):
            content = _one_a_byte(content, prod(shape), tensor)
        elif tensor.kind == _FLOAT4:
            if not shape or shape[-1] % 2:
                raise UnsupportedContainerError(f"{tensor.called} is float4 with an odd last size, which torch has not.")
            shape = (*shape[:-1], shape[-1] // 2)
        count = len(self.items)
        limits.NODES.check(limits.LISTED * count, f"The model lists {count} initializers.", self.source.size)
        self.items.append((tensor.name, row_major(str(count), dtype, shape, content, tensor.called)))

    def _content(self, tensor: _Tensor) -> Content:
        """The elements as bytes, little-endian."""
        if tensor.location == _EXTERNAL:
            return self._external(tensor)
        if tensor.location != _INSIDE:
            raise DamagedFileError(f"{tensor.called} is at the unknown location {tensor.location}.")
        number, parts = next(iter(tensor.fields.items()), (_RAW, []))
        if len(tensor.fields) > 1 or (number == _RAW and len(parts) > 1):
            raise DamagedFileError(f"{tensor.called} has its elements in two places.")
        if number != _RAW and tensor.kind not in _IN_FIELD.get(number, ()):
            raise DamagedFileError(f"{tensor.called} has its elements in a field of another type.")
        content: Content = parts[0] if len(parts) == 1 else Joined(tuple(parts))
        if number in (_RAW, 4, 10):
            return content
        width, count = DTYPES[_DTYPES[tensor.kind]].itemsize, max(prod(tensor.dims), 0)
        if tensor.kind in (_UINT4, _INT4, _FLOAT4):
            count = -(-count // 2)
        if count > content.length:  # a number takes a byte at least
            raise TensorError(f"{tensor.called} has fewer numbers than its shape.")
        return Computed(count * width, lambda: _numbers(content, width, count, tensor.called), content)

    def _external(self, tensor: _Tensor) -> Content:
        location = tensor.external.get("location", "")
        if self.files is None:
            raise UnsupportedContainerError(
                f"{tensor.called} is in another file, {location!r}, beside the model.",
                fix="Name the model where that file is beside it.",
            )
        other = self.files.open(location)
        start = _size(tensor, "offset", 0)
        size = _size(tensor, "length", other.size - start)
        if size < 0 or start + size > other.size:
            raise DamagedFileError(
                f"{tensor.called} reaches outside {location!r}.",
                why=f"Its bytes end at {start + size}; the file has {other.size}.", fix="Get that file again.",
            )  # fmt: skip
        return Range(other, start, size)


def _size(tensor: _Tensor, key: str, default: int) -> int:
    text = tensor.external.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise DamagedFileError(f"{tensor.called} has the {key} {text[:30]!r} in another file.")
    return int(text)


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


def _one_a_byte(content: Content, count: int, tensor: _Tensor) -> Computed:
    """Numbers of four bits, two in a byte, as one in each."""
    if content.length != -(-count // 2):
        raise TensorError(f"{tensor.called} has {content.length} bytes, and its shape needs {-(-count // 2)}.")
    numbers = [half - 16 if tensor.kind == _INT4 and half > 7 else half for half in range(16)]
    low, high = (bytes(numbers[byte >> shift & 15] & 255 for byte in range(256)) for shift in (0, 4))

    def work() -> Iterator[bytes | memoryview]:
        left = count
        for chunk in chunks(content):
            data, made = bytes(chunk), bytearray(2 * len(chunk))
            made[::2], made[1::2] = data.translate(low), data.translate(high)
            yield memoryview(made)[:left]
            left -= min(left, len(made))

    return Computed(count, work, content)


def _with_other_files(source: Source, files: Files) -> Decoded:
    """A model, with the files beside it that have elements of it."""
    with limits.of_file(source.size):
        return decode(source, files)


CONTAINER = Container(sniff, decode, _with_other_files)
