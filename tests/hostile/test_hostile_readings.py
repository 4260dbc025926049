"""Pickles that torch's weights_only reads otherwise than their words say: names, states, keys, sets, bits."""

import hashlib
import struct
from pathlib import Path

import pytest
import torch

import ckpt_tools
from tests.hostile import pickles as p
from tests.hostile.refusals import write
from tests.hostile.zips import torch_zip

FLOATS = {"0": struct.pack("<6f", *range(6)), "1": struct.pack("<q", 2)}
ARGUMENTS = p.tuple_of(p.storage(), b"K\x00", p.sizes(2, 3), p.sizes(3, 1), p.FALSE, p.ORDERED_DICT)
FROM_TYPE = p.glob("torch._tensor", "_rebuild_from_type_v2")


def file_of(body: bytes, folder: Path, protocol: int = 2) -> Path:
    """A torch zip of this pickle."""
    return write(folder, torch_zip(b"\x80" + bytes([protocol]) + body + p.STOP, FLOATS))


def test_a_name_of_python_2_that_weights_only_refuses(tmp_path: Path) -> None:
    """There is one reading of it: a class of the user's own in a newer protocol."""
    path = file_of(p.dict_of(w=p.tensor(), x=p.glob("commands", "Net")), tmp_path, 4)

    assert "commands.Net" in ckpt_tools.inspect(path).weights_only["refused"]


def test_a_subclass_takes_a_state_in_its_own_way(tmp_path: Path) -> None:
    """Its own class is needed, and named."""
    state = p.call("models", "State")
    cls = p.glob("models", "Quantized")
    made = FROM_TYPE + p.tuple_of(p.glob("torch._utils", "_rebuild_tensor_v2"), cls, ARGUMENTS, state) + p.REDUCE
    assert "models.Quantized" in ckpt_tools.inspect(file_of(p.dict_of(w=made), tmp_path)).weights_only["refused"]


def test_a_set_of_tensors(tmp_path: Path) -> None:
    """Of a list or a tuple it is what they hold."""
    body = p.tuple_of(
        *(p.call("builtins", "set", elements) for elements in (p.list_of(p.tensor()), p.tuple_of(p.tensor()), p.EMPTY_LIST)),
        p.call("builtins", "set"),
    )
    assert len(ckpt_tools.inspect(file_of(body, tmp_path)).tensors) == 2
    assert len(torch.load(file_of(body, tmp_path), weights_only=True)[0]) == 1


@pytest.mark.parametrize(
    ("shape", "stride", "known"),
    [((2, 3), (3, 1), True), ((2, 2), (3, 1), False), ((4, 4), (0, 1), False), ((3, 2), (1, 3), False)],
)
def test_a_tensor_of_another_device_may_lie_otherwise(
    shape: tuple[int, ...], stride: tuple[int, ...], known: bool, tmp_path: Path
) -> None:
    """`to` lays out anew what has gaps; the strides of the copy are told where they are known."""
    source = p.tensor(p.sizes(*shape), p.sizes(*stride))
    function = "_rebuild_device_tensor_from_cpu_tensor"
    made = p.call("torch._utils", function, source, p.glob("torch", "float16"), p.text("cpu"), p.FALSE)
    path = file_of(p.dict_of(w=made), tmp_path)
    theirs = torch.load(path, weights_only=True)["w"].stride()
    (row,) = ckpt_tools.inspect(path).tensors
    assert row["stride"] == (list(theirs) if known else None)


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "int4", "uint2", "bits8", "float8_e8m0fnu"])
def test_bytes_of_a_dtype_that_torch_does_not_copy(dtype: str, tmp_path: Path) -> None:
    """A view that is not contiguous is gathered by its width: quantised ones crashed the interpreter."""
    storage = p.storage(
        "0", 24, "QInt8Storage" if dtype == "qint8" else "QUInt8Storage" if dtype == "quint8" else "ByteStorage"
    )
    given = [storage, b"K\x00", p.sizes(2, 3), p.sizes(1, 2), p.FALSE, p.ORDERED_DICT]
    kind = "_rebuild_tensor_v2" if dtype.startswith(("qint", "quint")) else "_rebuild_tensor_v3"
    given += [p.glob("torch", dtype)] if kind.endswith("v3") else []
    path = file_of(p.dict_of(w=p.call("torch._utils", kind, *given)), tmp_path)
    (digest,) = ckpt_tools.check(path, digest=True).digests
    data = FLOATS["0"]
    rows = bytes(data[row + 2 * column] for row in range(2) for column in range(3))
    assert digest.sha256 == hashlib.sha256(f"{dtype} [2,3]\n".encode() + rows).hexdigest()
