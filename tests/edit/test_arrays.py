"""NumPy's arrays in pickles: tensors of their dtype, a plain form, or an error that names them; never dropped."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import ConvertError, ObjectsError
from tests.support.commands import ckpt


class Holder:
    """An instance of a class that the file names."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def of_python_2(array: np.ndarray[Any, Any]) -> bytes:
    """A dict with an array as Python 2 pickled it: its bytes are a str, by the opcodes U and T."""

    def text(data: bytes) -> bytes:
        return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + len(data).to_bytes(4, "little") + data

    shape = b"(" + b"".join(b"K" + bytes([size]) for size in array.shape) + b"t"
    dtype = b"cnumpy\ndtype\n" + text(array.dtype.str[1:].encode()) + b"K\0K\1\x87R"
    dtype += b"(K\3" + text(array.dtype.str[:1].encode()) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    return b"\x80\2}" + text(b"w") + made + b"(K\1" + shape + dtype + b"\x89" + text(array.tobytes()) + b"tbs."


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<i8", "|u1", "|b1", "<f2"])
@pytest.mark.parametrize("first", [0, 200])
def test_arrays_of_python_2(kind: str, first: int, tmp_path: Path) -> None:
    """Whether their bytes can be read as text or not, they are tensors: in inspect, and written with and without --objects."""
    array = np.array([[first, 1, 2], [3, 4, 5]]).astype(kind)
    (tmp_path / "in.pkl").write_bytes(of_python_2(array))
    for name, options in (("a.pth", ()), ("b.pth", ("--objects", "plain")), ("c.safetensors", ())):
        ckpt("convert", tmp_path / "in.pkl", tmp_path / name, *options)
        assert ckpt_tools.inspect(tmp_path / name).totals["tensors"] == 1
    torch.testing.assert_close(
        torch.load(tmp_path / "b.pth")["w"], torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    )
    assert "2x3" in ckpt("inspect", tmp_path / "in.pkl").output


@pytest.mark.parametrize("kind", ["M8[s]", "g", [("a", "<f4"), ("b", "<i4")]], ids=str)
@pytest.mark.parametrize("is_array", [True, False])
def test_numpys_values_without_a_plain_form_are_an_error(kind: Any, is_array: bool, tmp_path: Path) -> None:
    """Dates, numbers wider than torch's and structures are named; alone where --drop names them they are left out."""
    odd = np.zeros(2, kind)
    (tmp_path / "in.pkl").write_bytes(pickle.dumps({"w": np.ones(2), "odd": odd if is_array else odd[0]}, 4))
    with pytest.raises(ObjectsError, match=r"would be lost: odd\.\n.*no dates, structures"):
        ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    with pytest.raises(ConvertError, match="'odd' is a value of NumPy's"):
        ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.safetensors")
    assert ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain", drop="odd").dropped


def test_arrays_with_a_plain_form(tmp_path: Path) -> None:
    """Text becomes lists, a masked array its numbers with their mask; inside an instance inspect counts them."""
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    text, raw = np.array([["a", "bc"], ["d", ""]]), np.array([b"xy", b"z"])
    held = Holder(w=np.arange(6.0).reshape(2, 3), text=text, raw=raw, masked=masked)
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(held, 4))
    assert "1 array of numbers, 6 elements, inside objects" in ckpt("inspect", tmp_path / "in.pkl").output
    ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    made = torch.load(tmp_path / "out.pth")
    assert made["text"] == [["a", "bc"], ["d", ""]]
    assert made["raw"] == ["xy", "z"]
    torch.testing.assert_close(made["w"], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    assert made["masked"]["data"].tolist() == [1, 2]
    assert made["masked"]["mask"].tolist() == [False, True]


def test_arrays_of_dill(tmp_path: Path) -> None:
    """dill calls a function of its own around NumPy's: the array is the same tensor."""
    reduced: Any = np.arange(4, dtype="<f4").__reduce__()
    inner = pickle.dumps((*reduced, None), 2)[2:-1]
    (tmp_path / "in.pkl").write_bytes(b"\x80\2cdill._dill\n_create_array\n" + inner + b"R.")
    ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    assert torch.load(tmp_path / "out.pth").tolist() == [0, 1, 2, 3]


def test_weights_that_torch_saved_into_bytes(tmp_path: Path) -> None:
    """skorch pickles a file of torch.save as bytes: its tensors are shown, and written as tensors; other bytes stay bytes."""
    file = io.BytesIO()
    torch.save({"module_": {"w": torch.arange(6.0).reshape(2, 3)}}, file)
    held = Holder(lr=0.1, cuda=file.getvalue(), cut=file.getvalue()[:-30], text=b"PK")
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(held))
    assert "2x3" in ckpt("inspect", tmp_path / "in.pkl").output
    ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    made = torch.load(tmp_path / "out.pth")
    torch.testing.assert_close(made["cuda"]["module_"]["w"], torch.arange(6.0).reshape(2, 3))
    assert made["text"].tolist() == list(b"PK")
    assert bytes(made["cut"].tolist()) == held.__dict__["cut"]
