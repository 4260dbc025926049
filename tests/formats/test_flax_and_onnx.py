"""Flax's msgpack and ONNX's initializers: as those libraries read them, and bytes that break a promise."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import (
    CkptError,
    DamagedFileError,
    LimitError,
    TensorError,
    UnsupportedContainerError,
)
from tests.hostile.refusals import write
from tests.support.flax import packed as packed_array
from tests.support.samples import FIXTURES

HERE = FIXTURES / "frameworks"


def converted(source: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """What a file becomes."""
    ckpt_tools.convert(source, folder / "out.safetensors", overwrite=True, **options)
    return load_file(folder / "out.safetensors")


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


# --- Flax


def test_flax(tmp_path: Path) -> None:
    """Nested maps become dotted names; every array is what Flax restores; values stand beside them."""
    made, wanted = converted(HERE / "flax.msgpack", tmp_path, drop="phase"), load_file(HERE / "flax.safetensors")
    assert list(made)[:2] == ["params.Conv_0.kernel", "params.Conv_0.bias"]
    assert made["params.Dense_0.kernel"].dtype is torch.bfloat16
    for name, tensor in wanted.items():
        if name.startswith(("params", "batch_stats")):
            assert torch.equal(made[name].to(tensor.dtype), tensor)
    assert (made["lr"].item(), made["lr"].dtype) == (0.5, torch.float32)
    values = metadata(tmp_path / "out.safetensors")
    assert (values["step"], values["name"]) == ("1200", "tiny")


@pytest.mark.parametrize("key", ["epochs", "epoch_"])
def test_flax_with_a_brace_where_safetensors_has_one(key: str, tmp_path: Path) -> None:
    """The number 123 is a brace, and behind a key of six letters it stands where a safetensors header begins."""
    head = b"\x83\xa6" + key.encode() + b"\x7b" + b"\xa4step\x07\xa1w"
    (tmp_path / "in.msgpack").write_bytes(head + packed_array(np.ones(1)))
    found = ckpt_tools.inspect(tmp_path / "in.msgpack")
    assert (found.container, found.values) == ("flax", {key: 123, "step": 7})
    header = b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.ljust(0xA181)  # a length that begins as a map of msgpack
    (tmp_path / "in.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert ckpt_tools.inspect(tmp_path / "in.safetensors").container == "safetensors"


def test_flax_chunks(tmp_path: Path) -> None:
    """An array that Flax cut into chunks is one again."""
    made, wanted = converted(HERE / "flax-chunks.msgpack", tmp_path), load_file(HERE / "flax.safetensors")
    assert sorted(made) == ["big.kernel", "small"]
    assert torch.equal(made["big.kernel"], wanted["big.kernel"])
    assert ckpt_tools.show(HERE / "flax-chunks.msgpack", "big.kernel[3, 7]").values == wanted["big.kernel"][3, 7].item()


def packed(value: object) -> bytes:
    """Small values as msgpack."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(packed(key) + packed(one) for key, one in value.items())
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, bytes):
        return value
    assert isinstance(value, int)
    return struct.pack(">Bq", 0xD3, value)


def array(shape: bytes, name: str, data: bytes, kind: int = 1) -> bytes:
    """An array as Flax writes it."""
    inner = b"\x93" + shape + packed(name) + b"\xc4" + bytes([len(data)]) + data
    return b"\xc7" + bytes([len(inner), kind]) + inner


ONE = array(b"\x91\x02", "float32", bytes(8))
CHUNKED = {"__msgpack_chunked_array__": b"\xc3", "shape": packed({"0": 2}), "chunks": packed({"1": ONE})}
FLAX: dict[str, tuple[bytes, type[CkptError], str]] = {
    "cut": (packed({"a": ONE})[:-3], DamagedFileError, "is cut off"),
    "no map": (b"\x81\xa1a\x01"[:3] + b"\xc1", DamagedFileError, "0xc1"),
    "a byte that is no value": (packed({"a": b"\xc1"}), DamagedFileError, "0xc1"),
    "another extension": (packed({"a": array(b"\x91\x02", "float32", bytes(8), 9)}), UnsupportedContainerError, "extension 9"),
    "too few bytes": (packed({"a": array(b"\x91\x02", "float32", bytes(7))}), TensorError, "7 bytes"),
    "a negative size": (packed({"a": array(b"\x91\xff", "float32", b"")}), DamagedFileError, "not as Flax"),
    "impossible sizes": (packed({"a": array(b"\x92\xcf" + b"\x7f" * 8 + b"\x00", "float32", b"")}), TensorError, "shape"),
    "an unknown dtype": (packed({"a": array(b"\x91\x02", "object", bytes(8))}), UnsupportedContainerError, "object"),
    "a key twice": (b"\x82" + packed("a") + ONE + packed("a") + ONE, DamagedFileError, "'a' twice"),
    "a name twice": (packed({"a.b": ONE, "a": packed({"b": ONE})}), DamagedFileError, "'a.b'"),
    "a key that is no text": (packed({"a": b"\x81\xc0\xc0"}), DamagedFileError, "key that is not text"),
    "a list of 4 billion": (packed({"a": b"\xdd\xff\xff\xff\xff"}), DamagedFileError, "is cut off"),
    "nested for ever": (packed({"a": b"\x91" * 5000 + b"\xc0"}), LimitError, "nested too deep"),
    "maps for ever": (packed({"a": b"\x81\xa1a" * 5000 + b"\xc0"}), LimitError, "nested too deep"),
    "extensions for ever": (packed({"a": b"\xc9\0\0\xff\xff\1\x91" * 5000 + bytes(70000)}), DamagedFileError, "cut off"),
    "chunks out of order": (packed({"a": packed(CHUNKED)}), DamagedFileError, "not as Flax"),
    "chunks without a shape": (
        packed({"a": packed({"__msgpack_chunked_array__": b"\xc3", "chunks": packed({"0": ONE})})}),
        DamagedFileError,
        "not as Flax",
    ),
    "chunks by another value": (
        packed({"a": packed(CHUNKED | {"__msgpack_chunked_array__": b"\xc2"})}), DamagedFileError, "not as Flax",
    ),
    "a long key above many": (
        packed(
            {
                "a": 0,
                "b": b"\x81\xda\xff\xff"
                + b"k" * 0xFFFF
                + b"\xde\x04\x00"
                + b"".join(b"\xcd%c%c\xc0" % (n >> 8, n & 255) for n in range(1024)),
            }
        ),
        LimitError,
        "longer keys",
    ),
    "text that is none": (packed({"a": b"\xa2\xff\xff"}), DamagedFileError, "not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("what", FLAX)
def test_broken_flax(what: str, tmp_path: Path) -> None:
    """Each is refused by name, and nothing is written."""
    data, error, said = FLAX[what]
    with pytest.raises(error, match=said):
        ckpt_tools.inspect(write(tmp_path, data, "x.msgpack"))


def test_a_pickle_behind_a_map_is_two_files(tmp_path: Path) -> None:
    """A map of ten is `LONG1` to a pickle machine: what follows its number would run."""
    data = b"\x8a\xa1a" + bytes(0xA1 - 1) + b"cposix\nsystem\n(S'true'\ntR."
    with pytest.raises(DamagedFileError, match="a msgpack file, and a pickle"):
        ckpt_tools.inspect(write(tmp_path, data, "x.msgpack"))


# --- ONNX


def test_onnx(tmp_path: Path) -> None:
    """Every initializer, of every type and in every place, is what onnx makes of it; texts become metadata."""
    made, wanted = converted(HERE / "types.onnx", tmp_path), load_file(HERE / "onnx.safetensors")
    assert sorted(made) == sorted(wanted)
    for name, tensor in wanted.items():
        own = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}.get(name, tensor.dtype)
        assert made[name].dtype is own
        assert torch.equal(made[name].to(tensor.dtype), tensor), name
    texts = metadata(tmp_path / "out.safetensors")
    assert (texts["note"], texts["onnx.producer_name"], texts["onnx.opset"]) == ("kept", "fixtures", '{"": 21}')


def test_onnx_with_data_beside_it(tmp_path: Path) -> None:
    """Elements in another file of the folder; a missing, a cut one, and one elsewhere are refused by name."""
    for name in ("outside.onnx", "outside.data"):
        shutil.copy(HERE / name, tmp_path / name)
    made, wanted = converted(tmp_path / "outside.onnx", tmp_path), load_file(HERE / "onnx.safetensors")
    assert sorted(made) == ["raw.float16", "raw.float32", "raw.float64"]
    assert all(torch.equal(made[name], wanted[name]) for name in made)
    (tmp_path / "outside.data").write_bytes(bytes(100))
    with pytest.raises(DamagedFileError, match=r"reaches outside 'outside\.data'"):
        ckpt_tools.inspect(tmp_path / "outside.onnx")
    (tmp_path / "outside.data").unlink()
    with pytest.raises(CkptError, match="There is no such file"):
        ckpt_tools.inspect(tmp_path / "outside.onnx")
    data = (HERE / "outside.onnx").read_bytes().replace(b"outside.data", b"../etc/passw")
    with pytest.raises(DamagedFileError, match="passw"):
        ckpt_tools.inspect(write(tmp_path, data, "evil.onnx"))


def message(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    size = len(data)
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    return bytes([number << 3 | 2]) + length + data


def initializer(*fields: bytes, name: bytes = b"w", kind: int = 1, dims: bytes = b"\x02") -> bytes:
    """A tensor of a graph."""
    return message(5, message(1, dims) + bytes([2 << 3, kind]) + message(8, name) + b"".join(fields))


def model(*graph: bytes) -> bytes:
    """A model with this graph."""
    return b"\x08\x0a" + message(7, b"".join(graph))


RAW = message(9, bytes(8))
ONNX: dict[str, tuple[bytes, type[CkptError], str]] = {
    "cut": (model(initializer(RAW))[:-4], DamagedFileError, "is cut off"),
    "no graph": (b"\x08\x0a" + message(2, b"x"), UnsupportedContainerError, "would have a graph"),
    "a name twice": (model(initializer(RAW), initializer(RAW)), DamagedFileError, "called 'w'"),
    "too few bytes": (model(initializer(message(9, bytes(7)))), TensorError, "7 bytes"),
    "two places": (model(initializer(RAW, message(4, bytes(8)))), DamagedFileError, "two places"),
    "an unknown type": (model(initializer(RAW, kind=99)), UnsupportedContainerError, "type 99"),
    "a negative size": (model(initializer(RAW, dims=b"\xff" * 9 + b"\x01")), TensorError, "impossible sizes"),
    "impossible sizes": (model(initializer(RAW, dims=(b"\xff" * 8 + b"\x7f") * 2)), TensorError, "impossible sizes"),
    "a number without end": (model(initializer(RAW, dims=b"\xff" * 20)), DamagedFileError, "more than ten bytes"),
    "a group": (model(b"\x0b"), DamagedFileError, "wire type 3"),
    "raw_data twice": (model(initializer(message(9, bytes(4)) * 2)), DamagedFileError, "two places"),
    "empty raw_data beside numbers": (
        model(initializer(message(9, b""), message(4, bytes(8)))), DamagedFileError, "two places",
    ),
    "floats as int64": (model(initializer(message(4, bytes(16)), kind=7)), DamagedFileError, "a field of another type"),
    "raw_data that is a number": (
        model(initializer(b"\x48\x05", kind=2, dims=b"\1")), DamagedFileError, "field 9 of the wire type 0",
    ),
    "a name that is a number": (model(initializer(RAW, b"\x40\x05")), DamagedFileError, "field 8 of the wire type 0"),
    "the field 0": (model(b"\x02\x00"), DamagedFileError, "the field 0"),
    "another location": (model(initializer(RAW, b"\x70\x02")), DamagedFileError, "unknown location 2"),
    "a shape of terabytes": (
        model(initializer(message(5, b"\1\2\3"), kind=6, dims=b"\x80" * 5 + b"\x20")),
        TensorError,
        "fewer numbers than its shape",
    ),
    "a megabyte of sizes": (
        b"\x08\x0a" + b"\x3a\x88\x80\x40\x2a\x84\x80\x40\x0a\x80\x80\x40" + b"\1" * (1 << 20),
        TensorError,
        "more than 1024 dimensions",
    ),
    "segments": (model(initializer(RAW, message(3, b""))), UnsupportedContainerError, "segments"),
}  # fmt: skip


@pytest.mark.parametrize("what", ONNX)
def test_broken_onnx(what: str, tmp_path: Path) -> None:
    """Each is refused by name, and nothing is written."""
    data, error, said = ONNX[what]
    with pytest.raises(error, match=said):
        ckpt_tools.inspect(write(tmp_path, data, "x.onnx"))


@pytest.mark.parametrize("more", [b"\x78\x00" * 5000, b"\x72\x00" * 2000], ids=["fields", "messages"])
def test_many_fields(more: bytes, tmp_path: Path) -> None:
    """Fields of two bytes, whether they are read or not, count against the budget of the file."""
    path = write(tmp_path, b"\x08\x0a\x3a\x00" + more, "x.onnx")
    with limits.raised(containers=1000), pytest.raises(LimitError, match="more fields"):
        ckpt_tools.inspect(path)


def test_fewer_numbers_than_the_shape(tmp_path: Path) -> None:
    """Numbers that are packed are counted while they are read: a conversion fails, and leaves nothing."""
    data = model(initializer(message(7, b"\x01\x02\x03"), kind=7))
    with pytest.raises(DamagedFileError, match="more or fewer numbers"):
        ckpt_tools.convert(write(tmp_path, data, "x.onnx"), tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]


def test_text_is_left_out(tmp_path: Path) -> None:
    """An initializer of text is told, and the numbers beside it are read."""
    data = model(initializer(message(6, b"word"), name=b"t", kind=8), initializer(RAW))
    found = ckpt_tools.inspect(write(tmp_path, data, "x.onnx"))
    assert [row["name"] for row in found.tensors] == ["w"]
    assert [finding.code for finding in found.findings] == ["left-out"]
