"""The table of dtypes, and that of weights_only, against the torch and safetensors that are installed."""

from __future__ import annotations

import re
import struct

import pytest
import safetensors.torch
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree.dtypes import (
    BY_SAFETENSORS,
    BY_STORAGE,
    CAST_TARGETS,
    DTYPES,
)

TORCH = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
STORAGES = {str(dtype).removeprefix("torch."): name for dtype, name in torch.storage._dtype_to_storage_type_map().items()}


def test_every_dtype_of_torch_has_a_row() -> None:
    """No more, no fewer."""
    assert {name for name, row in DTYPES.items() if row.in_torch} == set(TORCH)


@pytest.mark.parametrize("name", sorted(TORCH))
def test_rows_are_true(name: str) -> None:
    """Size, kind and storage class are torch's."""
    row, dtype = DTYPES[name], TORCH[name]
    assert row.itemsize == dtype.itemsize
    assert (row.family == "float") == dtype.is_floating_point
    assert (row.family == "complex") == dtype.is_complex
    assert row.storage == STORAGES.get(name)


def test_every_storage_class_of_torch_is_known() -> None:
    """The classes that torch writes into pickles."""
    assert set(BY_STORAGE) == set(STORAGES.values())


def test_every_type_of_safetensors_is_known() -> None:
    """Those of its torch binding, with torch's names; and those that its reader lists when it is given none."""
    for code, dtype in safetensors.torch._TYPES.items():
        assert DTYPES[str(dtype).removeprefix("torch.")].safetensors == code
        assert BY_SAFETENSORS[code].name == str(dtype).removeprefix("torch.")
    assert set(BY_SAFETENSORS) == codes_of_safetensors()


def codes_of_safetensors() -> set[str]:
    """All type codes, from the error that safetensors gives for an unknown one."""
    header = b'{"a":{"dtype":"X","shape":[0],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(struct.pack("<Q", len(header)) + header)
    return set(re.findall(r"`(\w+)`", str(caught.value))) - {"X"}


@pytest.mark.parametrize("code", sorted(BY_SAFETENSORS))
def test_sizes_of_safetensors(code: str) -> None:
    """Eight elements take as many bytes as one element has bits; safetensors itself agrees."""
    row = BY_SAFETENSORS[code]
    size = row.bits // row.packed
    header = f'{{"a":{{"dtype":"{code}","shape":[8],"data_offsets":[0,{size}]}}}}'.encode()
    ((name, info),) = safetensors.deserialize(struct.pack("<Q", len(header)) + header + bytes(size))
    assert (name, len(info["data"])) == ("a", size)


def test_cast_targets_are_floats() -> None:
    """What --dtype takes."""
    assert {DTYPES[name].family for name in CAST_TARGETS.values()} == {"float"}


def test_weights_only_table_is_torchs() -> None:
    """Every global that torch allows, and no other."""
    assert {str(name) for name in ALLOWED} == set(_get_allowed_globals())
