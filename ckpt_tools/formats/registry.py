"""The containers of one file, a row each: its name, and the module that reads it. A new one is a module and a row.

Each has `sniff(head)` and `decode(source)`; it is imported once the rows before it have not been what a file is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files

Decode = Callable[[Source], Checkpoint]


class Container(NamedTuple):
    """A kind of file: whether one that starts with these bytes is one, what reads one, alone and with the files beside it."""

    sniff: Callable[[bytes], bool]
    decode: Decode
    with_others: Callable[[Source, Files], Checkpoint] | None = None


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


def containers(*, in_zips: bool = False) -> Iterator[Container]:
    for name, row in ROWS.items():
        if not in_zips or name in IN_ZIPS:
            module = import_module(row)
            yield Container(module.sniff, module.decode, getattr(module, "decode_with_others", None))


def begins_as_checkpoint(head: bytes) -> bool:
    return any(container.sniff(head) for container in containers())
