r"""Files that are two containers at once: which one a program reads depends on what it looks for first. They are refused.

`torch.load` takes a file that begins with PK\3\4 for a zip, any other first for a tar (by the checksum of its first block),
then for pickles one behind another; one called `.safetensors` for that. Python's own modules, and torch with bytes in memory,
ask in another order.

Source: torch/serialization.py (`load`, `_is_zipfile`, `_legacy_load`), CPython's Lib/tarfile.py (`frombuf`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, DamagedFileError, LimitError
from ckpt_tools.formats.base import is_tar, is_zip
from ckpt_tools.io.output import Source

_TAR, _SAFETENSORS, _GGUF, _MSGPACK = "a tar archive", "a safetensors file", "a GGUF file", "a msgpack file"


_MAPS = frozenset(bytes([byte]) for byte in (*range(0x81, 0x90), 0xDE, 0xDF))  # with which msgpack of a map begins


def refuse_polyglot(source: Source, head: bytes) -> None:
    """Raise DamagedFileError for a file whose bytes, which start with `head`, are more than one container."""
    kinds = list(_kinds(head))
    if not head or head[0] not in _FIRST:
        pass
    elif kinds == [_TAR] and _pickle_in(source, harmless=True):
        kinds.append("a pickle")
    elif kinds in ([_SAFETENSORS], [_GGUF], [_MSGPACK]) and _pickle_in(source, harmless=False):
        kinds.append("a pickle that torch.load would run")
    if len(kinds) > 1:
        raise DamagedFileError(f"{source.path} is {kinds[0]}, and {kinds[1]} as well.", why=TWO_FILES)


def _kinds(head: bytes) -> Iterator[str]:
    """What a file with these first bytes may be, pickles apart, which no first byte tells."""
    if is_zip(head):
        yield "a zip archive"
    if is_tar(head):
        yield _TAR
    if head.startswith(b"GGUF"):
        yield _GGUF
    elif head[8:9] == b"{" and _is_safetensors(head):
        yield _SAFETENSORS
    elif head.lstrip().startswith(b"{"):
        yield "JSON"
    if head.startswith(b"\x93NUMPY"):
        yield "a .npy file"
    if head[:1] in _MAPS:
        from ckpt_tools.formats.frameworks import flax

        if flax.sniff(head):
            yield _MSGPACK


def _is_safetensors(head: bytes) -> bool:
    from ckpt_tools.formats import safetensors  # few other files have a brace there

    return safetensors.sniff(head)


# --- pickles that something else begins with

_FIRST = frozenset(b"()BCFGIJKLMNSTUVX]cghjpqr}\x80\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96\x97")  # need nothing below them
_LONGEST = 16 << 20  # bytes that are looked at
_MODULE = re.compile(r"[\w.]+")  # what can be imported; in JSON there would be quotation marks


def _pickle_in(source: Source, *, harmless: bool) -> bool:
    """Whether the file begins with a pickle that names a global or is torch's magic number; with `harmless`, with any."""
    from ckpt_tools.pickling.calls import (
        MAGIC_NUMBER,
        list_one,  # few files begin so
    )
    from ckpt_tools.pickling.stream import Part, Pickles

    end = min(source.size, _LONGEST)
    with limits.of_file(source.size):
        found, value, _ = list_one(Pickles(Part(source, 0, end)))
    if isinstance(found.error, LimitError):  # more than any accident
        return True
    if found.error is not None:
        goes_on = end < source.size and end <= found.end <= source.size
        return goes_on or any(_MODULE.fullmatch(name.module) for name in found.names)
    return harmless or bool(found.names) or value == MAGIC_NUMBER
