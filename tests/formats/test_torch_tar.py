"""torch-tar: what torch 0.1 wrote is listed as the torch of today loads it, and never unpacked."""

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.errors import CkptError
from tests.formats.test_oracle import assert_lists, described
from tests.hostile.pickles import BUILD, FALSE, ORDERED_DICT, call, dict_of, glob, pickle, sizes, text, tuple_of
from tests.hostile.refusals import expect_warned, write
from tests.support.graphs import assert_same, live_tensors, load_with_tags
from tests.support.legacy import floats
from tests.support.tars import persistent, storages, tar, tensors, torch_tar

SIX = floats(0, 1, 2, 3, 4, 5)
LONGS = struct.pack("<q3q", 3, 7, 8, 9)
STORED = storages((10, "FloatStorage", SIX), (11, "LongStorage", LONGS))
DESCRIBED = tensors((20, 10, (2, 3), (3, 1), 0), (21, 11, (3,), (1,), 0), (22, 10, (3, 2), (1, 3), 0), (23, 10, (2,), (1,), 3))
STATE = tuple_of(persistent(22), b"N", ORDERED_DICT, FALSE, FALSE)
PARAMETER = glob("torch.nn.parameter", "Parameter") + b")\x81" + STATE + BUILD
ROOT = dict_of(w=persistent(20), n=persistent(21), t=PARAMETER, v=persistent(23), epoch=b"K\x03")
GOOD = torch_tar(ROOT, STORED, DESCRIBED)


def test_lists_what_torch_loads(tmp_path: Path) -> None:
    """Types, strides, offsets, Parameters: as torch loads them; ties as the storages say."""
    path = write(tmp_path, GOOD, "old.tar")
    loaded, tags = load_with_tags(path)
    found = described(path)
    assert found["container"] == "torch-tar"
    assert found["weights_only"]["loads"] is False
    rows = {row["where"][0]: row for row in found["tensors"]}
    for where, tensor in live_tensors(loaded):
        row = rows[str(where[0])]
        assert (row["shape"], row["stride"]) == (list(tensor.shape), list(tensor.stride()))
        assert row["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert row["kind"] == ("parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor")
    assert rows["v"]["offset"] == 3
    assert len({rows[name]["storage"] for name in "wtv"}) == 1
    assert set(tags.values()) == {"cpu"}


def test_the_same_graph(tmp_path: Path) -> None:
    """The graph is torch's, ties included."""
    path = write(tmp_path, torch_tar(dict_of(a=persistent(20), b=persistent(22), c=persistent(20)), STORED, DESCRIBED))
    before, tags = load_with_tags(path)
    assert_lists(path, before, tags)
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert_same(before, torch.load(tmp_path / "out.pth", weights_only=True))
    ckpt_tools.convert(write(tmp_path, GOOD, "good.tar"), tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], load_with_tags(tmp_path / "good.tar")[0][name]) for name in "wntv")


def test_a_tensor_without_dimensions_was_empty(tmp_path: Path) -> None:
    """Before 0.4 there were no scalars."""
    stored, made = storages((10, "FloatStorage", floats())), tensors((20, 10, (), (), 0))
    path = write(tmp_path, torch_tar(dict_of(a=persistent(20)), stored, made))
    assert described(path)["tensors"][0]["shape"] == [0]


def test_a_model_with_its_source(tmp_path: Path) -> None:
    """Classes are persistent ids with their source code."""
    cls = tuple_of(glob("some.models", "Net"), text("net.py"), text("class Net: ...")) + b"Q"
    path = write(tmp_path, torch_tar(cls + b")\x81" + dict_of(w=persistent(20)) + BUILD, STORED, DESCRIBED))
    assert described(path)["objects"][0]["global"] == "some.models.Net"
    assert len(described(path)["tensors"]) == 1


def test_storages_by_tuple(tmp_path: Path) -> None:
    """Files from elsewhere name storages in tuples, and have no `tensors` and no views."""
    named = tuple_of(text("storage"), glob("torch", "FloatStorage"), text("10"), text("cpu"), b"K\x06")
    made = call("torch._utils", "_rebuild_tensor_v2", named, b"K\0", sizes(2, 3), sizes(3, 1), FALSE, ORDERED_DICT)
    stored = storages((10, "FloatStorage", SIX)).removesuffix(pickle(b"]"))
    path = write(tmp_path, torch_tar(dict_of(w=made), stored, None))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


# --- refusals, most of which are in tests/net/payloads/refused.txt


def test_12_cut_anywhere(tmp_path: Path) -> None:
    """Wherever it is cut, it is refused, or nothing of it was missing."""
    end = len(GOOD.rstrip(b"\0"))
    for length in range(262, end, 7):
        with pytest.raises(CkptError):
            ckpt_tools.inspect(write(tmp_path, GOOD[:length]))


def test_12_other_members(tmp_path: Path) -> None:
    """Further members are passed over, whatever their names."""
    extra = {"../../escape": b"evil"}
    members = {"sys_info": pickle(b"}"), "storages": STORED, "tensors": DESCRIBED, "pickle": pickle(ROOT)}
    expect_warned(write(tmp_path, tar(extra | members)), "other-members")
    assert not (tmp_path.parent.parent / "escape").exists()
