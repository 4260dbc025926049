"""safetensors files around a header that is written by hand."""

from __future__ import annotations

import json
from typing import Any


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file; `header` is text, bytes, or something to dump as JSON."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def info(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **extra: Any) -> dict[str, Any]:
    """The header's row for one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}
