"""Flax's msgpack and ONNX's initializers, as those libraries read them; refusals are in tests/net/payloads/refused.txt."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError
from tests.hostile.refusals import write
from tests.support.flax import packed
from tests.support.samples import FIXTURES, metadata

HERE = FIXTURES / "frameworks"


def converted(source: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """What a file becomes."""
    ckpt_tools.convert(source, folder / "out.safetensors", overwrite=True, **options)
    return load_file(folder / "out.safetensors")


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
    (tmp_path / "in.msgpack").write_bytes(head + packed(np.ones(1)))
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
    return bytes([number << 3 | 2, len(data)]) + data


def model(*tensors: tuple[bytes, int, bytes]) -> bytes:
    """A model with these initializers of two numbers: name, type, fields."""
    rows = (message(1, b"\2") + bytes([2 << 3, kind]) + message(8, name) + fields for name, kind, fields in tensors)
    return b"\x08\x0a" + message(7, b"".join(message(5, row) for row in rows))


@pytest.mark.parametrize("more", [b"\x78\x00" * 100_000, b"\x72\x00" * 2000], ids=["fields", "messages"])
def test_many_fields(more: bytes, tmp_path: Path) -> None:
    """Fields of two bytes, whether they are read or not, count against the budget of the file."""
    path = write(tmp_path, b"\x08\x0a\x3a\x00" + more, "x.onnx")
    with limits.raised(nodes=1), pytest.raises(LimitError, match="more values"):
        ckpt_tools.inspect(path)


def test_fewer_numbers_than_the_shape(tmp_path: Path) -> None:
    """Numbers that are packed are counted while they are read: a conversion fails, and leaves nothing."""
    data = model((b"w", 7, message(7, b"\x01\x02\x03")))
    with pytest.raises(DamagedFileError, match="more or fewer numbers"):
        ckpt_tools.convert(write(tmp_path, data, "x.onnx"), tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]


def test_text_is_left_out(tmp_path: Path) -> None:
    """An initializer of text is told, and the numbers beside it are read."""
    data = model((b"t", 8, message(6, b"word")), (b"w", 1, message(9, bytes(8))))
    found = ckpt_tools.inspect(write(tmp_path, data, "x.onnx"))
    assert [row["name"] for row in found.tensors] == ["w"]
    assert [finding.code for finding in found.findings] == ["left-out"]
