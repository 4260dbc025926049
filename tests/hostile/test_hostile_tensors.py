"""Tensors that do not fit their storages, and unusual ones: rows 69 to 76."""

import json
import struct
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import ObjectsError, OutputError
from tests.hostile import pickles as p
from tests.hostile.refusals import expect_convert_refused, write
from tests.hostile.zips import torch_zip

FLOATS = {"0": struct.pack("<6f", *range(6))}


def one(opcodes: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    """A state dict with this tensor as `a.w`."""
    return torch_zip(p.pickle(p.dict_of(**{"a.w": opcodes})), FLOATS if storages is None else storages)


@pytest.mark.parametrize("shape", [(1, 2**34), (2**34,), (2, 3, 2**32)])
def test_71_expanded_beyond_memory(shape: tuple[int, ...], tmp_path: Path) -> None:
    """One number, expanded to terabytes: a .pth keeps the view; safetensors, which cannot, says what it would take."""
    wide = tuple(size << 8 for size in shape)
    path = write(tmp_path, one(p.tensor(p.sizes(*wide), p.sizes(*[0] * len(wide)))))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["a.w"].shape == wide
    expect_convert_refused(path, OutputError, "no space", "It needs", target="out.safetensors")


@pytest.mark.parametrize("device", ["", "cuda:99999", "tpu", "x y", "\u2603"])
def test_74_odd_device(device: str, tmp_path: Path) -> None:
    """A device tag is text, and stays as it is."""
    path = write(tmp_path, one(p.tensor(on=p.storage(device=device))))
    assert ckpt_tools.inspect(path).tensors[0]["device"] == device
    ckpt_tools.convert(path, tmp_path / "same.pth")
    expected = device or "cpu"
    assert ckpt_tools.inspect(tmp_path / "same.pth").tensors[0]["device"] == expected
    ckpt_tools.convert(path, tmp_path / "out.pth", map_location="cpu")
    assert torch.load(tmp_path / "out.pth")["a.w"].shape == (2, 3)


def test_76_deep_state_of_a_tensor(tmp_path: Path) -> None:
    """Tensors in the attributes of tensors, a thousand deep."""
    function, cls = p.glob("torch._utils", "_rebuild_tensor_v2"), p.glob("torch.nn.parameter", "Parameter")
    inner = p.tuple_of(p.storage(), b"K\x00", p.sizes(2, 3), p.sizes(3, 1), p.FALSE, p.ORDERED_DICT)
    start = p.glob("torch._tensor", "_rebuild_from_type_v2") + p.MARK + function + cls + inner
    body = (start + p.EMPTY_DICT + p.text("x")) * 1000 + p.NONE + (p.SETITEM + p.TUPLE + p.REDUCE) * 1000
    path = write(tmp_path, one(body))
    assert json.dumps(ckpt_tools.inspect(path).to_json())
    with pytest.raises(ckpt_tools.CkptError):
        ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", select="nothing")


# --- what torch makes of a pickle by other ways than from a storage


OTHER = p.tensor(p.sizes(3), p.sizes(1))


def test_what_makes_no_tensor_is_not_made_plain(tmp_path: Path) -> None:
    """Of a known class, but made by a function that is not: its name became text, and the output could not be read."""
    made = p.call(
        "torch._tensor", "_rebuild_from_type_v2",
        p.glob("builtins", "object"), p.glob("torch", "Size"), p.tuple_of(p.tensor()), p.EMPTY_DICT,
    )  # fmt: skip
    path = write(tmp_path, one(made))
    with pytest.raises(ObjectsError, match="would be lost"):
        ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")


def test_a_state_that_grows_after_it_was_set(tmp_path: Path) -> None:
    """Python copies a state into its object at once: what the dict is given later, as Borg's do, the object does not have."""
    state = p.EMPTY_DICT + p.put(9) + p.text("a") + p.tensor() + p.SETITEM
    made = p.call("types", "SimpleNamespace") + state + p.BUILD
    body = p.pickle(p.dict_of(x=made, z=p.get(9) + p.text("b") + OTHER + p.SETITEM))
    path = write(tmp_path, torch_zip(body, FLOATS))
    assert vars(torch.load(path, weights_only=False)["x"]).keys() == {"a"}
    assert [row["where"] for row in ckpt_tools.inspect(path).tensors] == [["x", "a"], ["z", "a"], ["z", "b"]]
