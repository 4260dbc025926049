"""Dtypes and what weights_only allows, against the torch and safetensors that are installed."""

import re
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch._weights_only_unpickler import _get_allowed_globals

import ckpt_tools
from tests.hostile.zips import torch_zip

TORCH = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def codes_of_safetensors() -> set[str]:
    """All type codes, from the error that safetensors gives for an unknown one."""
    header = b'{"a":{"dtype":"X","shape":[0],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(struct.pack("<Q", len(header)) + header)
    return set(re.findall(r"`(\w+)`", str(caught.value))) - {"X"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(TORCH))
def test_every_dtype_of_torch(name: str, tmp_path: Path) -> None:
    """What torch can save in a dtype is listed with its name and size, and loads as it was."""
    try:
        torch.save({"a.w": torch.zeros(16, dtype=torch.uint8).view(TORCH[name])}, tmp_path / "in.pth")
    except (RuntimeError, KeyError, NotImplementedError):
        pytest.skip("torch cannot make or save it")
    (row,) = ckpt_tools.inspect(tmp_path / "in.pth").tensors
    assert (row["dtype"], row["bytes"]) == (name, 16)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["a.w"].dtype is TORCH[name]


@pytest.mark.parametrize("code", sorted(codes_of_safetensors()))
def test_every_type_of_safetensors(code: str, tmp_path: Path) -> None:
    """Its name is torch's where its torch binding has it, its size is what safetensors itself takes."""
    for bits in (4, 6, 8, 16, 32, 64, 128):
        header = f'{{"a":{{"dtype":"{code}","shape":[8],"data_offsets":[0,{bits}]}}}}'.encode()
        data = struct.pack("<Q", len(header)) + header + bytes(bits)
        try:
            safetensors.deserialize(data)
        except safetensors.SafetensorError:
            continue
        (tmp_path / "in.safetensors").write_bytes(data)
        (row,) = ckpt_tools.inspect(tmp_path / "in.safetensors").tensors
        known = safetensors.torch._TYPES.get(code)
        assert row["bytes"] == bits
        assert known is None or row["dtype"] == str(known).removeprefix("torch.")
        return
    pytest.fail("safetensors takes no size of it")


def test_what_weights_only_allows(tmp_path: Path) -> None:
    """Every global that torch allows is one that loads, and its neighbours are not."""
    path = tmp_path / "in.pth"
    newer = {"torch.bcomplex32"}  # of torch 2.14
    for name in sorted(_get_allowed_globals().keys() - newer):
        for given, loads in ((name, True), (f"{name}_no", False)):
            module, _, last = given.rpartition(".")
            path.write_bytes(torch_zip(b"\x80\x02c%s\n%s\n." % (module.encode(), last.encode())))
            assert ckpt_tools.inspect(path).weights_only["loads"] is loads, given
