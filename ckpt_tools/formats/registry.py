"""The containers of one file, a row each: its name, and the module that reads it. A new one is a module and a row.

A module says in its `CONTAINER` how a file is told by its first bytes and read; it is imported once the rows before it have not
been what a file is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files

Decode = Callable[[Source], Checkpoint]


@dataclass(slots=True, eq=False, repr=False)
class Container:
    """A kind of file.

    Attributes:
        sniff: whether a file that starts with these bytes is one.
        decode: reads one.
        with_others: reads one with the files beside it that belong to it.
        in_zips: whether it is read as a member of a zip, too.
    """

    sniff: Callable[[bytes], bool]
    decode: Decode
    with_others: Callable[[Source, Files], Checkpoint] | None = None
    in_zips: bool = False


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


def containers() -> Iterator[Container]:
    for module in ROWS.values():
        container = import_module(module).CONTAINER
        assert isinstance(container, Container)
        yield container


def begins_as_checkpoint(head: bytes) -> bool:
    return any(container.sniff(head) for container in containers())
