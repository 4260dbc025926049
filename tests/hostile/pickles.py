"""Pickles as opcodes, by hand."""

from __future__ import annotations

import struct

PROTO2, PROTO4, STOP = b"\x80\x02", b"\x80\x04", b"."
EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, MARK = b"}", b"]", b")", b"("
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
TUPLE, TUPLE1, TUPLE2, TUPLE3, REDUCE, BUILD = b"t", b"\x85", b"\x86", b"\x87", b"R", b"b"
SETITEM, SETITEMS, APPEND, APPENDS = b"s", b"u", b"a", b"e"
PERSID = b"Q"
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def pickle(*parts: bytes) -> bytes:
    """A protocol 2 stream."""
    return PROTO2 + b"".join(parts) + STOP


def text(value: str | bytes) -> bytes:
    """A text."""
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    """A whole number of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def put(index: int) -> bytes:
    """Memoize the top of the stack."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """Push what was memoized."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def glob(module: str, name: str) -> bytes:
    """A global."""
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, *args: bytes) -> bytes:
    """A call of a global."""
    return glob(module, name) + tuple_of(*args) + REDUCE


def tuple_of(*items: bytes) -> bytes:
    """A tuple."""
    return MARK + b"".join(items) + TUPLE


def list_of(*items: bytes) -> bytes:
    """A list."""
    return EMPTY_LIST + MARK + b"".join(items) + APPENDS


def dict_of(**items: bytes) -> bytes:
    """A dict with text keys."""
    return EMPTY_DICT + pairs((text(key), value) for key, value in items.items())


def pairs(items: object) -> bytes:
    """SETITEMS with these (key, value) opcodes."""
    return MARK + b"".join(key + value for key, value in items) + SETITEMS  # type: ignore[attr-defined]


def sizes(*values: int) -> bytes:
    """A tuple of whole numbers."""
    return tuple_of(*map(integer, values))


def storage(key: str | bytes = "0", numel: int | bytes = 6, kind: str = "FloatStorage", device: str = "cpu") -> bytes:
    """The persistent id of a storage, loaded."""
    count = integer(numel) if isinstance(numel, int) else numel
    return tuple_of(text("storage"), glob("torch", kind), text(key), text(device), count) + PERSID


def tensor(
    shape: bytes | None = None, stride: bytes | None = None, offset: bytes = b"K\x00", *, on: bytes | None = None,
    grad: bytes = FALSE,
) -> bytes:  # fmt: skip
    """`_rebuild_tensor_v2` of, unless told otherwise, a 2 x 3 tensor on storage "0" of six floats."""
    shape, stride = shape or sizes(2, 3), stride or sizes(3, 1)
    return call("torch._utils", "_rebuild_tensor_v2", on or storage(), offset, shape, stride, grad, ORDERED_DICT)
