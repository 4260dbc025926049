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

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Decoded, Warned, repeated
from ckpt_tools.formats.frameworks.cursor import Cursor
from ckpt_tools.formats.registry import Container
from ckpt_tools.io.content import Computed, Content, Joined, Range, chunks
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS, Dict, Entry, Storage, check, contiguous_stride

# ir_version, then another field of ModelProto: producer_name and _version, domain, model_version, doc_string, graph, opsets
_START = re.compile(rb"\x08[\x01-\x20](?:[\x12\x1a\x22\x32\x3a\x42]|\x28[\x00-\x7f]*)")
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn",
    18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 23: "float4_e2m1fn_x2", 24: "float8_e8m0fnu",
}  # fmt: skip
_HALF_BYTES = {21: "uint8", 22: "int8"}  # uint4 and int4: two in a byte, the low half first
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
_MAX_FIELD = (1 << 29) - 1
_FIELDS_PER_CONTAINER = 2
_MODEL_TEXTS = {2: "producer_name", 3: "producer_version", 4: "domain", 6: "doc_string"}


def sniff(head: bytes) -> bool:
    """Whether a file that starts with these bytes may be an ONNX model."""
    return _START.match(head) is not None


class _Message:
    """The fields of one message: (number, value), where a value is a number, or the place and length of bytes."""

    def __init__(self, place: Range, wires: Mapping[int, tuple[int, ...]], budget: limits.Budget) -> None:
        self.source, self.wires, self.budget = place.source, wires, budget
        self.cursor = _cursor(place)
        budget.take(limits.NODES, 1, _TOO_MANY)

    def __iter__(self) -> Iterator[tuple[int, int, Range]]:
        """(field, number, bytes): of a number also the bytes that it stands in."""
        cursor, count = self.cursor, 0
        while cursor.at < cursor.end:
            count += 1
            if not count % _FIELDS_PER_CONTAINER:
                self.budget.take(limits.NODES, 1, _TOO_MANY)
            tag = varint(cursor)
            number, wire = tag >> 3, tag & 7
            if not 0 < number <= _MAX_FIELD or wire not in self.wires.get(number, (wire,)):
                raise DamagedFileError(f"The ONNX model holds the field {number} of the wire type {wire} at byte {cursor.at}.")
            if wire == _BYTES:
                length = varint(cursor)
                yield number, 0, Range(self.source, cursor.skip(length), length)
            elif wire == _NUMBER:
                start = cursor.at
                value = varint(cursor)
                yield number, value, Range(self.source, start, cursor.at - start)
            elif wire in (_WIDE, _NARROW):
                width = 8 if wire == _WIDE else 4
                yield number, 0, Range(self.source, cursor.skip(width), width)
            else:
                raise DamagedFileError(f"The ONNX model holds a field of the wire type {wire} at byte {cursor.at}.")


_TOO_MANY = "The ONNX model has more fields than a file of its size can hold."


def _cursor(place: Range) -> Cursor:
    return Cursor(place.source, place.offset, place.offset + place.length, "ONNX model")


def varint(cursor: Cursor) -> int:
    """A number of seven bits a byte."""
    value = 0
    for shift in range(0, 70, 7):
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


def decode(source: Source, files: Files | None = None) -> Decoded:
    """Read what the model says of its initializers; no elements."""
    reader = _Reader(source, files)
    reader.model()
    if not reader.graphs:
        why = "A saved_model.pb of TensorFlow begins as one does, and is not read here."
        raise UnsupportedContainerError("This is no ONNX model, which would have a graph.", why=why)
    items = reader.items
    if (name := repeated(items)) is not None:
        raise DamagedFileError(f"Two initializers of the ONNX model are called {name!r}.")
    made = Decoded(
        "onnx", Dict([*items], ordered=True), files if reader.elsewhere and files else source, metadata=reader.metadata
    )
    made.storage_bytes = sum(node.storage.nbytes for _, node in items)
    made.warnings = reader.warnings
    return made


class _Reader:
    """The initializers of a model, and its texts."""

    def __init__(self, source: Source, files: Files | None) -> None:
        self.source, self.files = source, files
        self.budget = limits.budget(source.size)
        self.items: list[tuple[str, Entry]] = []
        self.metadata: dict[str, str] = {}
        self.warnings: list[Warned] = []
        self.graphs = 0
        self.elsewhere = False

    def model(self) -> None:
        """Everything."""
        opsets: dict[str, int] = {}
        for number, value, place in _Message(Range(self.source, 0, self.source.size), _MODEL, self.budget):
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
                domain, version = self._opset(place)
                opsets[domain] = version
            elif number == 14:
                key, text = self._pair(place)
                self.metadata[key] = text
        if opsets:
            self.metadata["onnx.opset"] = json.dumps(opsets)

    def _graph(self, place: Range) -> None:
        sparse = 0
        for number, _, inner in _Message(place, _GRAPH, self.budget):
            if number == 5:
                self._initializer(inner)
            elif number == 2:
                self.metadata["onnx.graph"] = self._text(inner)
            sparse += number == 15
        if sparse:
            text = f"{sparse} sparse initializers of the model are left out"
            self.warnings.append(Warned("left-out", text, "dense tensors"))

    def _text(self, place: Range) -> str:
        self.budget.take(limits.MEMORY, place.length, "The ONNX model holds more text than any has.")
        return place.source.read(place.offset, place.length).decode(errors="backslashreplace")

    def _pair(self, place: Range) -> tuple[str, str]:
        self.budget.take(limits.NODES, 1, _TOO_MANY)
        fields = _Message(place, _PAIR, self.budget)
        texts = {number: self._text(inner) for number, _, inner in fields if number in (1, 2)}
        return texts.get(1, ""), texts.get(2, "")

    def _opset(self, place: Range) -> tuple[str, int]:
        domain, version = "", 0
        for number, value, inner in _Message(place, _OPSET, self.budget):
            if number == 1:
                domain = self._text(inner)
            elif number == 2:
                version = _signed(value)
        return domain, version

    def _initializer(self, place: Range) -> None:
        tensor = self._tensor(place)
        self.elsewhere |= tensor.location == _EXTERNAL
        if tensor.kind == _STRING:
            self.warnings.append(Warned("left-out", f"the initializer {tensor.name!r} is text, and is left out", "numbers"))
            return
        self.items.append((tensor.name, _entry(str(len(self.items)), tensor, self._content(tensor))))
        count = len(self.items)
        limits.NODES.check(limits.LISTED * count, f"The model lists {count} initializers.", self.source.size)

    def _tensor(self, place: Range) -> _Tensor:
        found = _Tensor()
        for number, value, inner in _Message(place, _TENSOR, self.budget):
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
                key, text = self._pair(inner)
                found.external[key] = text
            elif number == 14:
                found.location = value
            elif number == _RAW or (number in (4, 5, 6, 7, 10, 11) and inner.length):
                self.budget.take(limits.NODES, 1, _TOO_MANY)
                found.fields.setdefault(number, []).append(inner)
        return found

    def _content(self, tensor: _Tensor) -> Content:
        """The elements, little-endian."""
        if tensor.location == _EXTERNAL:
            return self._external(tensor)
        if tensor.location != _INSIDE:
            raise DamagedFileError(f"The initializer {tensor.name!r} is at the unknown location {tensor.location}.")
        number, parts = next(iter(tensor.fields.items()), (_RAW, []))
        if len(tensor.fields) > 1 or (number == _RAW and len(parts) > 1):
            raise DamagedFileError(f"The initializer {tensor.name!r} has its elements in two places.")
        width, count = _dtype(tensor).itemsize, max(prod(tensor.dims), 0)
        if number != _RAW and tensor.kind not in _IN_FIELD.get(number, ()):
            raise DamagedFileError(f"The initializer {tensor.name!r} has its elements in a field of another type.")
        content: Content = parts[0] if len(parts) == 1 else Joined(tuple(parts))
        if number in (_RAW, 4, 10):
            return content
        if _is_small(tensor):
            count = -(-count // 2)
        if count > content.length:  # a number takes a byte at least
            raise TensorError(f"The initializer {tensor.name!r} has fewer numbers than its shape.")
        return Computed(count * width, lambda: _numbers(content, width, count, tensor.name), content)

    def _external(self, tensor: _Tensor) -> Content:
        location = tensor.external.get("location", "")
        if self.files is None:
            raise UnsupportedContainerError(
                f"The initializer {tensor.name!r} is in another file, {location!r}, beside the model.",
                fix="Name the model where that file is beside it.",
            )
        other = self.files.open(location)
        offset, length = (_size(tensor, key) for key in ("offset", "length"))
        start = offset or 0
        size = other.size - start if length is None else length
        if size < 0 or start + size > other.size:
            raise DamagedFileError(
                f"The initializer {tensor.name!r} reaches outside {location!r}.",
                why=f"Its bytes end at {start + size}; the file has {other.size}.", fix="Get that file again.",
            )  # fmt: skip
        return Range(other, start, size)


def _size(tensor: _Tensor, key: str) -> int | None:
    text = tensor.external.get(key)
    if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise DamagedFileError(f"The initializer {tensor.name!r} has the {key} {text[:30]!r} in another file.")
    return None if text is None else int(text)


def _packed(place: Range) -> Iterator[int]:
    cursor = _cursor(place)
    while cursor.at < cursor.end:
        yield varint(cursor)


def _numbers(content: Content, width: int, count: int, name: str) -> Iterator[bytes]:
    """Packed numbers as elements of `width` bytes; those of 16 bits and fewer stand in them as they are."""
    made, value, shift = bytearray(), 0, 0
    mask = (1 << 8 * width) - 1
    for chunk in chunks(content):
        for byte in bytes(chunk):
            value |= (byte & 0x7F) << min(shift, _LONGEST)
            shift += 7
            if byte < 0x80:
                made += (value & mask).to_bytes(width, "little")
                value = shift = 0
                count -= 1
        if count < 0 or shift > _LONGEST:
            break
        yield bytes(made)
        made.clear()
    if count:
        raise DamagedFileError(f"The initializer {name!r} has more or fewer numbers than its shape.")


_LONGEST = 70  # bits in ten bytes of seven


def _dtype(tensor: _Tensor) -> DType:
    name = _DTYPES.get(tensor.kind) or _HALF_BYTES.get(tensor.kind)
    if name is None:
        raise UnsupportedContainerError(
            f"The initializer {tensor.name!r} is of ONNX's type {tensor.kind}, which torch does not have."
        )
    return DTYPES[name]


def _is_small(tensor: _Tensor) -> bool:
    """Whether two elements are in a byte."""
    return tensor.kind in _HALF_BYTES or _dtype(tensor).packed > 1


def _entry(key: str, tensor: _Tensor, content: Content) -> Entry:
    dtype, shape = _dtype(tensor), tuple(tensor.dims)
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape) or prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise TensorError(f"The initializer {tensor.name!r} has impossible sizes.")
    count = prod(shape)
    needed = -(-count // 2) if _is_small(tensor) else count * dtype.itemsize
    if content.length != needed:
        raise TensorError(f"The initializer {tensor.name!r} has {content.length} bytes, and its shape needs {needed}.")
    if tensor.kind in _HALF_BYTES:
        content = _one_a_byte(content, count, signed=dtype.name == "int8")
    elif dtype.packed > 1:
        if not shape or shape[-1] % 2:
            raise UnsupportedContainerError(
                f"The initializer {tensor.name!r} is float4 with an odd last size, which torch has not."
            )
        shape = (*shape[:-1], shape[-1] // 2)
    storage = Storage(key, dtype, content.length, None, content)
    entry = Entry(storage, dtype, shape, contiguous_stride(shape), 0)
    check(entry, repr(tensor.name))
    return entry


def _one_a_byte(content: Content, count: int, *, signed: bool) -> Computed:
    """Numbers of four bits, two in a byte, the low half first."""
    numbers = [half - 16 if signed and half > 7 else half for half in range(16)]
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
