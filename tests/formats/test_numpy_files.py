"""npy and npz: arrays that NumPy saved are tensors; what it pickled is data that nobody runs."""

import io
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ckpt_tools
from ckpt_tools.errors import CkptError, DamagedFileError, PickleError, TensorError
from tests.formats.test_oracle import described
from tests.hostile.pickles import call, text
from tests.hostile.pickles import pickle as opcodes
from tests.hostile.refusals import expect_refused, expect_warned, write
from tests.hostile.zips import Rec, build
from tests.test_properties import quick

DTYPES = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ARRAYS = {
    "layer.weight": np.arange(6, dtype="f4").reshape(2, 3), "layer.bias": np.arange(3, dtype=">f8"),
    "columns": np.asfortranarray(np.arange(24, dtype="i2").reshape(2, 3, 4)), "scalar": np.array(1.5, "f4"),
    "none": np.zeros((0, 4), "u8"), "mask": np.array([True, False]),
}  # fmt: skip


def npy(value: Any, **options: Any) -> bytes:
    """What numpy.save writes."""
    buffer = io.BytesIO()
    np.save(buffer, value, **options)
    return buffer.getvalue()


def same(array: Any, tensor: torch.Tensor) -> None:
    """A tensor is an array: shape, dtype and bits."""
    native = np.ascontiguousarray(array).reshape(array.shape).astype(array.dtype.newbyteorder("="))
    assert list(tensor.shape) == list(array.shape)
    assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), torch.from_numpy(native.copy().reshape(-1).view("u1")))
    assert str(tensor.dtype).removeprefix("torch.") == str(native.dtype)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_npz(save: Any, target: str, tmp_path: Path) -> None:
    """Every array of a .npz, stored or deflated, is a tensor with its name, and comes out with its bits."""
    path = tmp_path / "in.npz"
    save(path, **ARRAYS)
    found = described(path)
    assert (found["container"], [row["where"] for row in found["tensors"]]) == ("npz", [[name] for name in ARRAYS])
    assert [row["shape"] for row in found["tensors"]] == [list(array.shape) for array in ARRAYS.values()]
    assert found["totals"]["storage_bytes"] == sum(array.nbytes for array in ARRAYS.values())
    ckpt_tools.convert(path, tmp_path / target)
    ckpt_tools.convert(tmp_path / target, tmp_path / "again.pth")
    after = torch.load(tmp_path / "again.pth", weights_only=True)
    for name, array in ARRAYS.items():
        same(array, after[name])


@pytest.mark.parametrize("order", "<>")
def test_npy_of_every_dtype(order: str, tmp_path: Path) -> None:
    """A .npy of one array is one tensor, of every dtype that both know, in either byte order; columns stay columns."""
    for code in DTYPES:
        array = np.arange(6).astype(order + code).reshape(3, 2)
        path = write(tmp_path, npy(np.asfortranarray(array)), "in.npy")
        assert described(path)["container"] == "npy"
        assert described(path)["tensors"][0]["stride"] == [1, 3]
        ckpt_tools.convert(path, tmp_path / "out.pth", overwrite=True)
        same(array, torch.load(tmp_path / "out.pth", weights_only=True))


def test_any_array(tmp_path: Path) -> None:
    """Any shape and order."""
    path, target = tmp_path / "in.npy", tmp_path / "out.pth"

    @quick
    @given(arrays.arrays(st.sampled_from(DTYPES), arrays.array_shapes(min_dims=0, min_side=0)), st.booleans())
    def check(array: Any, fortran: bool) -> None:
        array = np.asfortranarray(array) if fortran else array
        path.write_bytes(npy(array))
        ckpt_tools.convert(path, target, overwrite=True)
        same(array, torch.load(target, weights_only=True))

    check()


def test_flat_dictionary(tmp_path: Path) -> None:
    """numpy.save of a dict: its arrays are tensors, whose bytes lie in the file; the rest is plain data."""
    path = write(tmp_path, npy({**ARRAYS, "epoch": 3, "config": {"lr": 0.1}, "own": torch.arange(4.0)}), "in.npy")
    found = described(path)
    assert [row["where"] for row in found["tensors"]] == [[name] for name in (*ARRAYS, "own")]
    assert found["values"] == {"epoch": 3, "config.lr": 0.1}
    ckpt_tools.convert(path, tmp_path / "out.pth", dtype="bf16", rename="layer=block")
    after = torch.load(tmp_path / "out.pth", weights_only=True)
    assert after["block.weight"].tolist() == ARRAYS["layer.weight"].tolist()
    assert after["block.weight"].dtype == torch.bfloat16
    assert after["own"].tolist() == [0, 1, 2, 3]  # torch's tensors, with their storages as bytes
    same(ARRAYS["columns"], after["columns"])


def test_text_and_objects(tmp_path: Path) -> None:
    """Arrays of text are lists of text, arrays of objects lists of what they hold, dtype and shape kept as nesting."""
    path = tmp_path / "in.npz"
    objects = np.empty((2, 2), object)
    objects[:] = [[1, "a"], [None, 2.5]]
    np.savez(path, names=np.array(["a", "bcd"]), raw=np.array([[b"x"], [b"yz"]]), objects=objects, w=np.ones(2, "f4"))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    after = torch.load(tmp_path / "out.pth", weights_only=True)
    assert (after["names"], after["raw"], after["objects"]) == (["a", "bcd"], [["x"], ["yz"]], [[1, "a"], [None, 2.5]])


def header(text_: str, data: bytes = b"") -> bytes:
    """A .npy with this header."""
    return b"\x93NUMPY\x01\0" + len(text_).to_bytes(2, "little") + text_.encode() + data


def test_headers_of_every_age(tmp_path: Path) -> None:
    """All three versions of the format; sizes with an L, as Python 2 wrote them; other quotes and order."""
    made = [header("{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }\n", bytes(8)),
            header('{"shape": (2,), "fortran_order": False, "descr": "<f4"}', bytes(8))]  # fmt: skip
    for version in ((1, 0), (2, 0), (3, 0)):
        with warnings.catch_warnings(action="ignore"):
            np.lib.format.write_array(buffer := io.BytesIO(), np.arange(2.0), version=version)
        made.append(buffer.getvalue())
    for data in made:
        assert described(write(tmp_path, data, "in.npy"))["tensors"][0]["shape"] == [2]


def test_cut_and_trailing(tmp_path: Path) -> None:
    """A .npy that ends early is refused; bytes behind it are said."""
    data = npy(np.arange(6.0))
    for length in range(6, len(data), 5):
        with pytest.raises(CkptError):
            ckpt_tools.inspect(write(tmp_path, data[:length]))
    zipped = build([Rec(b"w.npy", data + b"more")])
    expect_refused(write(tmp_path, zipped), TensorError, "'w' has 4 bytes more than its shape")
    expect_warned(write(tmp_path, data + b"more"), "trailing-bytes")


def test_nothing_runs(tmp_path: Path) -> None:
    """The pickle of an array of objects is read, not run; one that is no array is refused."""
    marker = tmp_path / "ran"
    text_ = "{'descr': '|O', 'fortran_order': False, 'shape': (), }"
    evil = opcodes(call("os", "mkdir", text(str(marker))))
    expect_refused(write(tmp_path, header(text_, evil)), PickleError, "not pickled as NumPy pickles it")
    held = np.empty((), object)
    held[()] = {"w": np.ones(2), "x": _Evil(str(marker))}
    path = write(tmp_path, npy(held), "in.npy")
    assert [row["global"] for row in described(path)["objects"]] == [f"{os.mkdir.__module__}.mkdir"]
    assert not marker.exists()


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_objects_as_old_numpy_wrote_them(tmp_path: Path) -> None:
    """NumPy before 1.7 gave the size of a pointer with the type of objects; they are objects all the same."""
    array = np.empty((), dtype=object)
    array[()] = {"w": np.ones(3, np.float32)}
    np.save(tmp_path / "new.npy", array, allow_pickle=True)
    data = (tmp_path / "new.npy").read_bytes().replace(b"'|O'", b"'|O8'").replace(b" \n", b"\n", 1)
    (tmp_path / "old.npy").write_bytes(data)
    assert np.load(tmp_path / "old.npy", allow_pickle=True)[()]["w"].tolist() == [1, 1, 1]
    assert [row["where"] for row in ckpt_tools.inspect(tmp_path / "old.npy").tensors] == [["w"]]


# --- names


def test_a_name_of_two_arrays(tmp_path: Path) -> None:
    """numpy.load looks for the record before it looks for NAME.npy."""
    path = tmp_path / "two.npz"
    two: Any = {"a": np.ones(2), "a.npy": np.zeros(1)}
    np.savez(path, **two)
    assert np.load(path)["a.npy"].shape == (2,)
    expect_refused(path, DamagedFileError, "Two arrays may be called 'a.npy'", "Two programs would read two files")
    two.pop("a")
    np.savez(path, **two)
    assert [row["where"] for row in described(path)["tensors"]] == [["a.npy"]]


def test_a_name_that_may_be_cp437(tmp_path: Path) -> None:
    """Without the flag for UTF-8 Python's zipfile reads another name than torch would."""
    np.savez(tmp_path / "good.npz", é=np.ones(2))
    assert [row["where"] for row in described(tmp_path / "good.npz")["tensors"]] == [["é"]]
    path = write(tmp_path, build([Rec("é.npy".encode(), npy(np.ones(2)), flags=0)]), "bad.npz")
    assert np.load(path).files == ["├⌐"]
    expect_refused(path, DamagedFileError, "'é.npy' does not say that its name is UTF-8", "cp437")


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_folders_among_arrays(target: str, tmp_path: Path) -> None:
    """Packed again by a zip tool, a .npz with paths for names has folders: they hold nothing, and are passed over."""
    path = write(tmp_path, build([Rec(b"d/"), Rec(b"d/a.npy", npy(np.ones(2))), Rec(b"d/")]), "in.npz")
    assert [row["where"] for row in described(path)["tensors"]] == [["d/a"]]
    ckpt_tools.convert(path, tmp_path / target)
    assert [row["where"] for row in ckpt_tools.inspect(tmp_path / target).tensors] == [["d/a"]]


def test_names_that_differ_in_case(tmp_path: Path) -> None:
    """numpy.savez writes them, and no loader of torch's looks at a .npz."""
    path = tmp_path / "case.npz"
    np.savez(path, W=np.ones(2), w=np.zeros(3))
    assert [(row["where"], row["shape"]) for row in described(path)["tensors"]] == [(["W"], [2]), (["w"], [3])]
    rows = [Rec(b"W.npy", npy(np.ones(2))), Rec(b"w.npy", npy(np.ones(2))), Rec(b"w.npy", npy(np.ones(2)))]
    expect_refused(write(tmp_path, build(rows), "twice.npz"), DamagedFileError, "Two records of the zip have one name")


def test_arrays_without_an_ending(tmp_path: Path) -> None:
    """numpy.load gives a record that begins as an array under its own name."""
    path = write(tmp_path, build([Rec(b"a.npy", npy(np.ones(2))), Rec(b"b", npy(np.ones(3)))]), "some.npz")
    with np.load(path) as loaded:
        assert {name: [*loaded[name].shape] for name in loaded.files} == {"a": [2], "b": [3]}
    assert [(row["where"], row["shape"]) for row in ckpt_tools.inspect(path).tensors] == [(["a"], [2]), (["b"], [3])]
    path = write(tmp_path, build([Rec(b"a.npy", npy(np.ones(2))), Rec(b"a", npy(np.ones(3)))]), "two.npz")
    with np.load(path) as loaded:
        assert loaded["a"].shape == (3,)
    expect_refused(path, DamagedFileError, "Two arrays may be called 'a'", "Two programs would read two files")


@pytest.mark.parametrize("said", [b"\1" + zlib.crc32(b"w.npy").to_bytes(4, "little"), bytes(5)])
def test_a_name_in_an_extra_field(said: bytes, tmp_path: Path) -> None:
    """Python follows it since 3.12, where its checksum is right: two Pythons would give the array two names."""
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    for name in (b"w.npy", b"v.npy"):
        body = said + name
        field = b"up" + len(body).to_bytes(2, "little") + body
        path = write(tmp_path, build([Rec(b"w.npy", file.getvalue(), extra=field)]), "in.npz")
        if name == b"w.npy":
            assert described(path)["tensors"][0]["where"] == ["w"]
        else:
            expect_refused(path, DamagedFileError, "an extra field calls it")
