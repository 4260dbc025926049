"""pickle: state dicts that pickle.dump wrote without torch.save, their storages inside as bytes."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, TensorError
from tests.conftest import small_model
from tests.formats.test_oracle import described
from tests.hostile.pickles import call, dict_of, glob, integer, text, tuple_of
from tests.hostile.pickles import pickle as opcodes
from tests.hostile.refusals import expect_refused, write
from tests.support.graphs import assert_same, live_tensors
from tests.support.legacy import legacy, stream
from tests.test_properties import quick, tensors

STATE = small_model().state_dict()


def rows(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What inspect says about each tensor, that a live one can say too."""
    return [(row["where"], row["dtype"], row["shape"], row["stride"], row["offset"], row["kind"]) for row in found["tensors"]]


def expected(value: Any) -> list[tuple[Any, ...]]:
    """The same of live tensors."""
    return [
        (
            list(where), str(one.dtype).removeprefix("torch."), list(one.shape), list(one.stride()), one.storage_offset(),
            "parameter" if isinstance(one, nn.Parameter) else "tensor",
        )
        for where, one in live_tensors(value)
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", range(2, 6))
def test_state_dict(protocol: int, tmp_path: Path) -> None:
    """A pickled state dict is listed as pickle loads it, and comes out for torch.load(weights_only=True)."""
    path, target = tmp_path / "in.pkl", tmp_path / "out.pth"
    path.write_bytes(pickle.dumps(STATE, protocol))
    found = described(path)
    assert (found["container"], found["weights_only"]["loads"]) == ("pickle", False)
    assert rows(found) == expected(STATE)
    assert found["totals"]["bytes"] == found["totals"]["storage_bytes"]
    ckpt_tools.convert(path, target)
    assert_same(pickle.loads(path.read_bytes()), torch.load(target, weights_only=True))


def test_any_tensors(tmp_path: Path) -> None:
    """Any tensors that pickle can write come out as pickle loads them."""
    path, target = tmp_path / "in.pkl", tmp_path / "out.pth"

    @quick
    @given(tensors())
    def check(state_dict: dict[str, torch.Tensor]) -> None:
        data = pickle.dumps(state_dict, 4)
        try:
            loaded = pickle.loads(data)
        except AttributeError:  # torch cannot load the UntypedStorage that it pickled
            return
        path.write_bytes(data)
        assert rows(described(path)) == expected(loaded)
        ckpt_tools.convert(path, target, overwrite=True)
        assert_same(loaded, torch.load(target, weights_only=True))

    check()


def test_blobs_inside_blobs_and_containers(tmp_path: Path) -> None:
    """A pickle that holds tensors, as bytes inside a checkpoint, inside bytes: each is found where it is used."""
    inner = {"w": torch.arange(6.0)}
    reduced = pickle.dumps(inner, 2)[2:-1]  # as an object of the stream around it
    for data in (legacy(inner), stream(reduced)):
        blob = call("torch.storage", "_load_from_bytes", call("_codecs", "encode", text(data.decode("latin1")), text("latin1")))
        deep = call(
            "torch.storage", "_load_from_bytes",
            call("_codecs", "encode", text(stream(dict_of(inner=blob)).decode("latin1")), text("latin1")),
        )  # fmt: skip
        for name, whole in (("a.pkl", opcodes(dict_of(x=deep))), ("b.pth", stream(dict_of(x=deep)))):
            path = write(tmp_path, whole, name)
            assert [row["where"] for row in described(path)["tensors"]] == [["x", "inner", "w"]]
            ckpt_tools.convert(path, tmp_path / "out.pth", overwrite=True)
            assert torch.load(tmp_path / "out.pth", weights_only=True)["x"]["inner"]["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_blobs_in_a_torch_zip(tmp_path: Path) -> None:
    """A torch-zip whose pickle carries a pickled storage as bytes."""
    path = tmp_path / "in.pth"
    tensor = torch.arange(4.0)

    class Reduced:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (legacy(tensor),)

    torch.save({"own": torch.ones(2), "carried": Reduced()}, path)
    assert [row["where"] for row in described(path)["tensors"]] == [["own"], ["carried"]]
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["carried"].tolist() == [0, 1, 2, 3]


def test_a_dtype_that_changes_after_its_array(tmp_path: Path) -> None:
    """NumPy turns the bytes when the array is made; we took the byte order that the dtype had at last."""
    big, little = (tuple_of(b"K\x03", text(order), b"NNN", integer(-1), integer(-1), b"K\x00") + b"b" for order in "><")
    kind = call("numpy", "dtype", text("f4"), b"\x89", b"\x88") + b"r\x09\x00\x00\x00" + big
    made = call("numpy._core.multiarray", "_reconstruct", glob("numpy", "ndarray"), tuple_of(b"K\x00"), b"C\x01b")
    array = made + tuple_of(b"K\x01", tuple_of(b"K\x01"), kind, b"\x89", b"C\x04\x3f\x80\x00\x00") + b"b"
    for data, twice in ((opcodes(dict_of(a=array)), False), (opcodes(dict_of(a=array, z=b"h\x09" + little)), True)):
        data = b"\x80\x03" + data[2:]
        assert pickle.loads(data)["a"].tolist() == [1.0]
        path = write(tmp_path, data, "in.pkl")
        if twice:
            expect_refused(path, TensorError, "dtype of a pickled array is set twice")
        else:
            assert ckpt_tools.show(path, "a").values == [1.0]


# --- refusals


def test_cut_anywhere(tmp_path: Path) -> None:
    """Wherever it is cut, it is refused."""
    data = pickle.dumps({"w": torch.arange(4.0), "epoch": 3}, 4)
    for length in range(2, len(data)):
        with pytest.raises(CkptError):
            ckpt_tools.inspect(write(tmp_path, data[:length]))


def test_several_pickles_in_a_row(tmp_path: Path) -> None:
    """The first is read, as `pickle.load` reads it, and what is behind it is said."""
    with open(tmp_path / "in.pkl", "wb") as file:
        for number in range(3):
            pickle.dump({"w": np.full(3, number, "f4")}, file)
    found = ckpt_tools.inspect(tmp_path / "in.pkl")
    assert len(found.tensors) == 1
    assert [finding.code for finding in found.findings if finding.code == "trailing-bytes"]
