"""Compressed files: told by their first bytes, and inflated once, into a temporary file without a name."""

from __future__ import annotations

import bz2
import contextlib
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, UnsupportedContainerError
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Reader, Spooled

_BLOCK, _PACKED_BLOCK = 4 << 20, 1 << 16
_MAGIC = 6  # bytes of the longest one
_COST_OF_RUN = 1 << 14  # in bytes that are inflated
_XZ_MEMORY = 1 << 28  # bytes; `xz -9` needs a quarter of that
Spend = Callable[[int], None]


@dataclass(slots=True, unsafe_hash=True)
class Kind:
    name: str
    called: str
    magic: bytes
    suffix: str
    shell: str
    make: Callable[[], Any] | None


def new_xz() -> Any:
    return lzma.LZMADecompressor(memlimit=_XZ_MEMORY)


KINDS = (
    Kind("gzip", "a gzip archive", b"\x1f\x8b", ".gz", "gunzip", lambda: zlib.decompressobj(31)),
    Kind("bzip2", "a bzip2 archive", b"BZh", ".bz2", "bunzip2", bz2.BZ2Decompressor),
    Kind("xz", "an xz archive", b"\xfd7zXZ\x00", ".xz", "unxz", new_xz),
    Kind("zstd", "a zstd archive", b"\x28\xb5\x2f\xfd", ".zst", "unzstd", None),
)
# joblib's other two. Their few first bytes begin other files too: one is meant where it inflates to the start of a pickle.
_OF_PICKLES = (
    *(
        Kind("zlib", "a zlib archive", b"x" + level, ".z", "zlib-flate -uncompress <", zlib.decompressobj)
        for level in (b"\x01", b"\x5e", b"\x9c", b"\xda")
    ),
    Kind("lzma", "an lzma archive", b"]\x00", ".lzma", "unlzma", new_xz),
)
EVERY_KIND = (*KINDS, *_OF_PICKLES)
_ZSTD = ("compression.zstd", "zstandard")  # since Python 3.14, and the package of that name


def kind_of(head: bytes) -> Kind | None:
    found = next((kind for kind in EVERY_KIND if head.startswith(kind.magic)), None)
    if found in _OF_PICKLES and found.make is not None:
        try:
            return found if found.make().decompress(head, 2)[:1] == b"\x80" else None
        except (zlib.error, lzma.LZMAError, EOFError):
            return None
    return found


def inflate(source: Source, kind: Kind) -> Spooled:
    """The bytes of a compressed file, inflated; they count as what the file being read may inflate to."""
    budget = limits.budget(source.size)

    def spend(count: int) -> None:
        budget.take(limits.MEMORY, count // limits.STREAMED, f"{source.path} inflates to more than any real file.")

    blocks = zstd_blocks(source, spend) if kind.make is None else _whole(source, kind, kind.make, spend)
    try:
        return Spooled(source, blocks)
    except CkptError:  # some of ours are an OSError too
        raise
    except (zlib.error, lzma.LZMAError, EOFError, ValueError, OSError) as error:
        raise _damaged(source, kind, f"{error}.") from None


def _damaged(source: Source, kind: Kind, why: str) -> DamagedFileError:
    return DamagedFileError(f"{source.path} cannot be inflated ({kind.name}).", why=why, fix="Get it again.")


def _whole(source: Source, kind: Kind, make: Callable[[], Any], spend: Spend) -> Iterator[bytes]:
    """All that the file inflates to; it has to end where what was compressed ends."""
    end = yield from runs(source, 0, make, kind.magic, spend)
    if end is None:
        raise _damaged(source, kind, "It is cut off.")
    if end < source.size:
        raise _damaged(source, kind, f"{source.size - end} bytes of something else stand behind what was compressed.")


Again = bytes | tuple[bytes, ...]


def runs(source: Source, start: int, make: Callable[[], Any], again: Again, spend: Spend) -> Generator[bytes, None, int | None]:
    """What a compressed run of bytes from `start` on gives, in blocks, up to where it ends; `spend` counts them first."""
    opened, at = make(), start
    while at < source.size:
        data = source.read(at, min(_PACKED_BLOCK, source.size - at))
        at += len(data)
        while piece := (yield from _next_block(opened, data)):
            spend(len(piece))
            yield piece
            if opened.eof:
                break
            data = getattr(opened, "unconsumed_tail", b"")
        if opened.eof:
            at = _next_run(source, at - len(opened.unused_data))
            if not again or not source.read(at, min(_MAGIC, source.size - at)).startswith(again):
                return at
            spend(_COST_OF_RUN)
            opened = make()
    return None


def _next_block(opened: Any, data: bytes) -> Generator[bytes, None, bytes]:
    """The next block; where zlib finds an error, what comes before it is given first."""
    before: Any = opened.copy() if hasattr(opened, "copy") else None
    try:
        return bytes(opened.decompress(data, _BLOCK))
    except zlib.error:
        with contextlib.suppress(zlib.error):
            for at in range(len(data)):
                yield before.decompress(data[at : at + 1])
        raise


def _next_run(source: Source, at: int) -> int:
    while padding := source.read(at, min(_PACKED_BLOCK, source.size - at)):
        following = padding.lstrip(b"\0")
        at += len(padding) - len(following)
        if following:
            break
    return at


# --- zstd


def zstd_blocks(source: Source, spend: Spend) -> Iterator[bytes]:
    module: Any = None
    for name in _ZSTD:
        with contextlib.suppress(ImportError):
            module = module or import_module(name)
    if module is None:
        raise UnsupportedContainerError(
            f"{source.path} is a zstd archive, which nothing here inflates.",
            why="Python can do so from 3.14 on, or with the package zstandard.",
            fix="Unpack it (unzstd), or: pip install zstandard",
        )
    file = Reader(source)
    opened = module.ZstdFile(file) if hasattr(module, "ZstdFile") else module.ZstdDecompressor().stream_reader(
        file, read_across_frames=True
    )  # fmt: skip
    try:
        while piece := opened.read(_BLOCK):
            spend(len(piece))
            yield piece
    except getattr(module, "ZstdError", ValueError) as error:
        raise EOFError(str(error)) from None
