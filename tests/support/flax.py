"""Files of Flax and Keras with tensors of given names, by hand and by h5py."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def packed(value: object) -> bytes:
    """Maps, text, numbers and arrays of float32 as Flax's msgpack has them."""
    if isinstance(value, dict):
        return struct.pack(">BH", 0xDE, len(value)) + b"".join(packed(key) + packed(one) for key, one in value.items())
    if isinstance(value, str):
        return struct.pack(">BB", 0xD9, len(value)) + value.encode()
    if isinstance(value, int):
        return struct.pack(">BI", 0xCE, value)
    array = np.asarray(value, np.float32)
    shape = bytes([0x90 | array.ndim]) + b"".join(map(packed, array.shape))
    inner = b"\x93" + shape + packed("float32") + struct.pack(">BI", 0xC6, array.nbytes) + array.tobytes()
    return struct.pack(">BIb", 0xC9, len(inner), 1) + inner


def flax_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Nested maps for names with dots."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *way, last = name.split(".")
        inner = tree
        for part in way:
            inner = inner.setdefault(part, {})
        inner[last] = tensor.numpy()
    path.write_bytes(packed(tree))
    return path


def keras_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Groups for names with dots."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, tensor in tensors.items():
            file.create_dataset(name.replace(".", "/"), data=tensor.numpy())
    return path
