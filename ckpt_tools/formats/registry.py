"""The containers of one file, a row each: its name, and the module that reads it. A new one is a module and a row.

Each has `sniff(head)` and `decode(source)`, one that other files may belong to `decode_with_others(source, files)`; it is
imported once the rows before it have not been what a file is.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

ROWS = {
    "torch-zip": "ckpt_tools.formats.zip_archives",
    "safetensors": "ckpt_tools.formats.safetensors",
    "torch-legacy": "ckpt_tools.formats.torch_legacy",
    "torch-tar": "ckpt_tools.formats.torch_tar",
    "pickle": "ckpt_tools.formats.plain_pickle",
    "npy": "ckpt_tools.formats.numpy_files",
    "gguf": "ckpt_tools.formats.frameworks.gguf",
    "onnx": "ckpt_tools.formats.frameworks.onnx",
    "flax": "ckpt_tools.formats.frameworks.flax",
    "keras": "ckpt_tools.formats.frameworks.keras",
}
IN_ZIPS = frozenset(("safetensors", "torch-legacy", "torch-tar", "npy", "keras"))  # read as members of a zip, too


def container_of(head: bytes, *, in_zips: bool = False) -> ModuleType | None:
    """The module that reads a file which starts with these bytes."""
    modules: Iterator[ModuleType] = (import_module(row) for name, row in ROWS.items() if not in_zips or name in IN_ZIPS)
    return next((module for module in modules if module.sniff(head)), None)
