"""Bombs of a few kilobytes: what is deflated, short to say and long to make. Each asks for gigabytes, or for minutes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace

from tests.hostile import bombs
from tests.hostile import pickles as p
from tests.hostile.bombs import FLOATS
from tests.hostile.headers import info, safetensors
from tests.hostile.zips import (
    Rec,
    build,
    deflated,
    torch_records,
    torch_zip,
)

SMALL: dict[str, Callable[[], bytes]] = {}
EMPTY = b'{"":0},'  # seven bytes of JSON, a dict and a place in a list
WEIGHTS = b"m/data/weights/model_weights_config.json"


def small(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """Enter a builder in the table."""
    SMALL[make.__name__] = make
    return make


def array(descr: str, shape: str, data: bytes) -> bytes:
    """A .npy."""
    body = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body + data


def objects(count: int, items: bytes, shape: str = "") -> bytes:
    """A .npy of objects: `count` of them, which these opcodes push."""
    kind = p.call("numpy", "dtype", p.text("O8"), p.FALSE, p.TRUE)
    state = p.tuple_of(b"K\x01", p.sizes(count), kind, p.FALSE, p.list_of(items))
    made = p.call("numpy.core.multiarray", "_reconstruct", p.glob("numpy", "ndarray"), p.sizes(0), b"C\x01b") + state + p.BUILD
    return array("|O", shape or f"{count},", p.pickle(made))


def in_npz(data: bytes, count: int = 1) -> bytes:
    """A .npz with the same deflated array, again and again."""
    one = deflated(b"", data)
    return build([replace(one, name=b"%d.npy" % index) for index in range(count)])


def beside_a_checkpoint(*records: Rec) -> bytes:
    """A bundle: a small checkpoint and other members."""
    return build([Rec(b"a.pth", torch_zip(p.pickle(p.dict_of(**{"a.w": p.tensor()})), FLOATS)), *records])


def program(*records: Rec) -> bytes:
    """A TorchScript program of one module, and other records."""
    module = p.glob("__torch__", "A") + b")\x81" + p.dict_of(a=p.tensor()) + p.BUILD
    return build([*torch_records(p.pickle(module), FLOATS), Rec(b"archive/constants.pkl", p.pickle(b")")), *records])


def exported(table: bytes) -> bytes:
    """An exported program with this table of weights."""
    return build([Rec(b"m/archive_format", b"pt2"), deflated(WEIGHTS, table), Rec(b"m/data/weights/weight_0", bytes(4))])


# --- npz


@small
def small_npz_of_many_dimensions() -> bytes:
    """Text of two million cells, in lists of one list of one list ..."""
    return in_npz(array("<U1", "2000000," + "1," * 1000, bytes(8_000_000)))


@small
def small_npz_of_too_many_dimensions() -> bytes:
    """The same for four thousand dimensions, more than a tensor may have."""
    return in_npz(array("<U1", "2000," + "1," * 4000, bytes(8000)))


@small
def small_npz_of_texts() -> bytes:
    """Sixteen megabytes of text, sixty times."""
    return in_npz(array("|S8", "2000000,", b"abcdefgh" * 2_000_000), 25)


@small
def small_npz_of_long_texts() -> bytes:
    """A few long texts, which take four bytes a character for one that is no ASCII."""
    return in_npz(array("<U1000000", "4,", ("a" * 999_999 + "\U0001f600").encode("utf-32-le") * 4), 25)


@small
def small_npz_of_objects() -> bytes:
    """Arrays of sixteen million times None, sixty times."""
    return in_npz(objects(1_000_000, p.NONE * 1_000_000), 60)


@small
def small_npz_of_lists() -> bytes:
    """Arrays of three hundred thousand lists, sixty times."""
    return in_npz(objects(300_000, p.EMPTY_LIST * 300_000), 60)


@small
def small_npz_of_objects_of_many_dimensions() -> bytes:
    """A hundred thousand times None, each in a thousand lists."""
    return in_npz(objects(100_000, p.NONE * 100_000, "100000," + "1," * 1000))


@small
def small_npz_of_broken_pickles() -> bytes:
    """Pickles that break at their very end, in an archive."""
    broken = deflated(b"", b"\x80\x02(" + p.EMPTY_LIST * 350_000 + b"\xff")
    return beside_a_checkpoint(*(replace(broken, name=b"%d.pkl" % index) for index in range(300)))


# --- programs


@small
def small_model_json_of_dicts() -> bytes:
    """A model.json of sixty-four megabytes of dicts."""
    text = b'{"mainModule":{"name":"a"},"x":[' + EMPTY * 4_000_000 + b"0]}"
    return build([deflated(b"a/model.json", text), Rec(b"a/version", b"1")])


@small
def small_model_json_of_tensors() -> bytes:
    """A model.json of tensors with many dimensions."""
    row = b'{"dataType":"FLOAT","dims":[' + b'"1",' * 1000 + b'"1"],"data":{"key":"tensors/0"}},'
    uses = b'{"name":"a","tensorId":"0"},' * 100_000
    text = b'{"mainModule":{"parameters":[' + uses + b'{"name":"b","tensorId":"0"}]},"tensors":[' + row + b"0]}"
    return build([deflated(b"a/model.json", text), Rec(b"a/tensors/0", bytes(4)), Rec(b"a/version", b"1")])


@small
def small_model_json_of_digits() -> bytes:
    """Numbers of thousands of digits."""
    text = b'{"mainModule":{"name":"a"},"x":[' + (b"9" * 4200 + b",") * 7000 + b"0]}"
    return build([deflated(b"a/model.json", text), Rec(b"a/version", b"1")])


@small
def small_code_of_quotes() -> bytes:
    """A list of names that begin and never end."""
    code = b'class A(Module):\n  __parameters__ = ["' + b'\\"' * 4_000_000 + b"]\n"
    return program(deflated(b"archive/code/__torch__.py", code))


@small
def small_code_of_lists() -> bytes:
    """Lists of names in lists of names."""
    code = b"class A(Module):\n" + b"  __parameters__ = [" * 700_000 + b"\n"
    return program(deflated(b"archive/code/__torch__.py", code))


@small
def small_code_of_classes() -> bytes:
    """A long file of classes, each with a name."""
    code = b"".join(b'class A%d(Module):\n  __parameters__ = ["a", ]\n' % index for index in range(200_000))
    return program(deflated(b"archive/code/__torch__.py", code))


@small
def small_code_of_names() -> bytes:
    """A class with three million names."""
    names = b"".join(b'"%x",' % index for index in range(450_000))
    return program(deflated(b"archive/code/__torch__.py", b"class A(Module):\n  __parameters__ = [" + names + b"]\n"))


@small
def small_table_of_dicts() -> bytes:
    """A table of weights with another key full of dicts."""
    return exported(b'{"x":[' + EMPTY * 4_000_000 + b'0],"config":{}}')


@small
def small_table_of_numbers() -> bytes:
    """A table of weights with another key full of numbers."""
    return exported(b'{"x":[' + b"1.5," * 8_000_000 + b'0],"config":{}}')


@small
def small_table_of_strings() -> bytes:
    """A table of weights with another key full of short texts."""
    return exported(b'{"x":[' + b'"a",' * 8_000_000 + b'0],"config":{}}')


# --- bundles


@small
def small_bundle_of_pickles() -> bytes:
    """A thousand pickles of a megabyte, a kilobyte each."""
    one = deflated(b"", p.pickle(p.list_of(p.NONE * 1_000_000)))
    return beside_a_checkpoint(*(replace(one, name=b"%d.pkl" % index) for index in range(400)))


@small
def small_bundle_of_archives() -> bytes:
    """Archives with a deflated pickle of a megabyte, deflated again."""
    records = torch_records(b"", FLOATS)
    records[0] = deflated(b"archive/data.pkl", p.pickle(p.list_of(p.NONE * 1_000_000)))
    one = Rec(b"", build(records))
    return beside_a_checkpoint(*(replace(one, name=b"%d.pth" % index) for index in range(200)))


@small
def small_bundle_of_dicts() -> bytes:
    """JSON of dicts, two megabytes of it in each of a hundred members."""
    one = deflated(b"", b"[" + EMPTY * 300_000 + b"0]")
    return beside_a_checkpoint(*(replace(one, name=b"%d.json" % index) for index in range(100)))


@small
def small_bundle_of_texts() -> bytes:
    """Text in which one character takes four bytes, so that all others do."""
    one = deflated(b"", b"a" * 16_000_000 + "\U0001f600".encode())
    return beside_a_checkpoint(*(replace(one, name=b"%d.txt" % index) for index in range(4)))


# --- objects made plain


@small
def short_bytes() -> bytes:
    """A list of short bytes: each becomes a tensor where torch 2.4 is to load it."""
    return bombs.keyed(p.EMPTY_LIST + p.MARK, b"C\x02xy", p.APPENDS)


@small
def as_many_bytes_as_may_be() -> bytes:
    """As many of them as may become tensors, and one long one."""
    many = b"C\x02xy" * (59_000 + bombs.SIZE // 192)
    rest = b"B" + max(0, bombs.SIZE - len(many)).to_bytes(4, "little") + bytes(max(0, bombs.SIZE - len(many)))
    return torch_zip(p.pickle(p.dict_of(**{"a.w": p.tensor(), "x": p.list_of(many), "y": rest})), FLOATS)


@small
def short_bytearrays() -> bytes:
    """The same of one bytearray, used again and again, and of complex numbers."""
    array = p.call("builtins", "bytearray", b"C\x01x") + p.put(5) + b"0"
    return bombs.keyed(array + p.EMPTY_LIST + p.MARK, p.get(5), p.APPENDS)


@small
def long_bytes_shared() -> bytes:
    """A long string of bytes, in a list again and again."""
    return bombs.keyed(b"B\x40\x42\x0f\x00" + b"x" * 1_000_000 + p.put(5) + b"0" + p.EMPTY_LIST + p.MARK, p.get(5), p.APPENDS)


# --- JSON in headers and indexes


@small
def header_of_dicts() -> bytes:
    """A safetensors header with a field full of dicts."""
    field = EMPTY.decode() * (bombs.SIZE // len(EMPTY))
    return safetensors('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[' + field + "0]}}")


@small
def header_of_texts() -> bytes:
    """A safetensors header with a field full of short texts."""
    return safetensors('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[' + '"a",' * (bombs.SIZE // 4) + "0]}}")


@small
def aliases_of_dicts() -> bytes:
    """Our own metadata of tied tensors, full of dicts; JSON in text in JSON."""
    aliases = '{"b":[' + '{"":0},' * (bombs.SIZE // 11) + "0]}"
    return safetensors({"__metadata__": {"ckpt_tools.aliases": aliases}, "w": info("U8", [1], [0, 1])}, b"\0")


@small
def metadata_of_dicts() -> bytes:
    """Metadata that is JSON, full of dicts, which a comparison takes apart."""
    value = '{"b":[' + '{"":0},' * (bombs.SIZE // 11) + "0]}"
    return safetensors({"__metadata__": {"config": value}, "w": info("U8", [1], [0, 1])}, b"\0")


@small
def index_of_dicts() -> bytes:
    """An index of shards with metadata full of dicts."""
    return b'{"metadata":{"a":[' + EMPTY * (bombs.SIZE // len(EMPTY)) + b'0]},"weight_map":{"a":"a.safetensors"}}'


@small
def damaged_header_of_dicts() -> bytes:
    """A safetensors file behind other bytes, which repair looks for."""
    return b"XX" + safetensors(
        json.dumps({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})[:-1]
        + ',"x":['
        + EMPTY.decode() * (bombs.SIZE // 7)
        + "0]}"
    )


# --- metadata of other frameworks


def field(number: int, value: bytes) -> bytes:
    """A field of protobuf with bytes in it, fewer than 128."""
    return bytes([number << 3 | 2, len(value)]) + value


@small
def onnx_of_metadata_bytes() -> bytes:
    """A model of one number and hundreds of thousands of pairs of text."""
    tensor = b"\x08\x02\x10\x01\x42\x03a.w\x4a\x08" + bytes(8)
    return b"\x08\x07" + field(7, field(5, tensor)) + b"".join(field(14, field(1, b"%x" % index)) for index in range(300_000))


@small
def gguf_of_keys_bytes() -> bytes:
    """A model of one number and hundreds of thousands of keys, each with a number of one byte."""
    names = [b"%x" % index for index in range(550_000)]
    keys = b"".join(struct.pack("<Q", len(name)) + name + struct.pack("<IB", 0, 1) for name in names)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(names)) + keys + struct.pack("<Q", 3) + b"a.w"
    head += struct.pack("<IQIQ", 1, 1, 0, 0)
    return head + bytes(-len(head) % 32) + bytes(4)
