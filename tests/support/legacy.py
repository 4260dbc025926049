"""The bytes of files that torch saves; torch-legacy files also put together by hand."""

import io
import struct
from typing import Any

import torch

from tests.hostile.pickles import glob, integer, list_of, pickle, text, tuple_of

MAGIC = pickle(integer(0x1950A86A20F9469CFC6C))
PROTOCOL = pickle(integer(1001))
SYS_INFO = pickle(b"}")
HEAD = MAGIC + PROTOCOL + SYS_INFO


def saved(value: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def legacy(value: Any, **options: Any) -> bytes:
    """What torch.save writes for PyTorch before 1.6."""
    return saved(value, _use_new_zipfile_serialization=False, **options)


def persistent(
    key: str | bytes = "0", numel: int | bytes = 6, kind: str = "FloatStorage", device: str = "cpu", view: bytes = b"N"
) -> bytes:
    """The persistent id of a storage in a legacy stream, loaded."""
    count = integer(numel) if isinstance(numel, int) else numel
    return tuple_of(text("storage"), glob("torch", kind), text(key), text(device), count, view) + b"Q"


def floats(*values: float) -> bytes:
    """A storage of floats as it stands in the stream: their count, then they."""
    return struct.pack(f"<q{len(values)}f", len(values), *values)


def stream(root: bytes, *storages: tuple[str, bytes], head: bytes = HEAD, keys: bytes | None = None) -> bytes:
    """A legacy stream of opcodes that make the object, and of storages as key and bytes."""
    listed = list_of(*(text(key) for key, _ in storages)) if storages else b"]"
    return head + pickle(root) + (pickle(listed) if keys is None else keys) + b"".join(data for _, data in storages)
