"""One file that stands for itself: its container found by content and decoded, and what is something else refused.

The containers of one file are a row each: a name, and the module that reads it. A new one is a module and a row. Each has
`sniff(head)` and `decode(source)`, one that other files may belong to `decode_with_others(source, files)`; it is imported once
the rows before it have not been what a file is.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, LimitError, exhausted, out_of_memory
from ckpt_tools.formats.base import is_tar, is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.tree.findings import getting_again

HEAD = 4096
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
IN_ZIPS = ("torch-zip", "safetensors", "torch-legacy", "torch-tar", "pickle", "npy", "keras")  # read as members of a zip, too


def container_of(head: bytes, names: Iterable[str] = ROWS) -> str:
    """The row of a file that starts with these bytes; "" for none."""
    return next((name for name in names if reader(name).sniff(head)), "")


def reader(name: str) -> ModuleType:
    return import_module(ROWS[name])


def decode_file(source: Source) -> Checkpoint:
    with naming(source), limits.of_file(source.size):
        return decode_content(source)


def decode_content(source: Source) -> Checkpoint:
    head = source.read(0, min(HEAD, source.size))
    refuse_polyglot(source, head)
    if container := container_of(head):
        try:
            decoded: Checkpoint = reader(container).decode(source)
        except DamagedFileError as error:
            from ckpt_tools.formats.foreign import text_mode

            raise (text_mode(source) if is_zip(head) else None) or error from None
        return decoded
    from ckpt_tools.formats import foreign, safetensors

    if known := foreign.recognise(source, head):
        raise known
    if source.path.suffix.lower() == ".safetensors":  # damaged, and like nothing else: say what is wrong with its header
        return safetensors.decode(source)
    raise foreign.unknown(source, head)


def may_be_packed(head: bytes) -> bool:
    """Whether a file that starts so may be compressed, or a tar; what reads those is imported only then."""
    if is_zip(head):
        return False
    from ckpt_tools.formats.compressed import kind_of

    return kind_of(head) is not None or is_tar(head) or head[257:262] == b"ustar"


@contextlib.contextmanager
def naming(source: Source) -> Iterator[None]:
    try:
        with out_of_memory():
            yield
    except CkptError as error:
        error.about(source.path)
        if isinstance(error, DamagedFileError) and error.whole is not None:
            error.fix = error.fix or getting_again(str(source.path), error.whole)
        if "ckpt repair" in error.fix and not isinstance(source, Files):
            from ckpt_tools.formats.zip_directory import is_mended

            with contextlib.suppress(CkptError):  # the disk failed
                error.fix = error.fix if is_mended(source) else "Get it again."
        raise
    except (MemoryError, RecursionError) as error:
        raise exhausted(error, str(source.path)) from None


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector at rest: a large tree is all alive, and scanning it again and again costs a third."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


# --- files that are two containers at once: which one a program reads depends on what it looks for first
#
# `torch.load` takes a file that begins with PK\3\4 for a zip, any other first for a tar (by the checksum of its first block),
# then for pickles one behind another; one called `.safetensors` for that. Python's own modules, and torch with bytes in memory,
# ask in another order. Source: torch/serialization.py (`load`, `_is_zipfile`, `_legacy_load`), Lib/tarfile.py (`frombuf`).

_TAR, _SAFETENSORS, _GGUF, _MSGPACK = "a tar archive", "a safetensors file", "a GGUF file", "a msgpack file"


_MAPS = frozenset(bytes([byte]) for byte in (*range(0x81, 0x90), 0xDE, 0xDF))  # with which msgpack of a map begins


def refuse_polyglot(source: Source, head: bytes) -> None:
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
    from ckpt_tools.pickling.calls import MAGIC_NUMBER, list_one  # few files begin so
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
