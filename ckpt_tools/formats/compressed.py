"""Compressed files: told by their first bytes, and inflated once, into a temporary file without a name."""

from __future__ import annotations

import bz2
import contextlib
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, UnsupportedContainerError
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Reader, Spooled

_BLOCK, _PACKED_BLOCK = 4 << 20, 1 << 16
_MAGIC = 6  # bytes of the longest one
_COST_OF_RUN = 1 << 14  # in bytes that are inflated
BROKEN = (zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)  # what inflating damaged bytes raises
Spend = Callable[[int], None]


class Kind(NamedTuple):
    """A way to compress: how its files begin and end in their names, what inflates one; zstd is read as a stream."""

    name: str
    magic: bytes | tuple[bytes, ...]
    suffix: str = ""
    make: Callable[[], Any] | None = None

    @property
    def called(self) -> str:
        return f"{'an' if self.name[0] in 'xl' else 'a'} {self.name} archive"


def _new_xz() -> Any:
    return lzma.LZMADecompressor(memlimit=1 << 28)  # bytes; `xz -9` needs a quarter of that


KINDS = (
    Kind("gzip", b"\x1f\x8b", ".gz", lambda: zlib.decompressobj(31)),
    Kind("bzip2", b"BZh", ".bz2", bz2.BZ2Decompressor),
    Kind("xz", b"\xfd7zXZ\x00", ".xz", _new_xz),
    Kind("zstd", b"\x28\xb5\x2f\xfd", ".zst"),
)
# joblib's other two. Their few first bytes begin other files too: one is meant where it inflates to the start of a pickle.
_OF_PICKLES = (
    Kind("zlib", (b"x\x01", b"x\x5e", b"x\x9c", b"x\xda"), ".z", zlib.decompressobj),
    Kind("lzma", b"]\x00", ".lzma", _new_xz),
)
EVERY_KIND = (*KINDS, *_OF_PICKLES)
DEFLATE = Kind("deflate", (), make=lambda: zlib.decompressobj(-15))


def kind_of(head: bytes) -> Kind | None:
    found = next((kind for kind in EVERY_KIND if head.startswith(kind.magic)), None)
    if found in _OF_PICKLES and found.make is not None:
        try:
            return found if found.make().decompress(head, 2)[:1] == b"\x80" else None
        except (zlib.error, lzma.LZMAError, EOFError):
            return None
    return found


def inflate(source: Source, kind: Kind) -> Spooled:
    """All that a compressed file inflates to, which counts as what the file being read may; it ends where that ends."""
    budget = limits.budget(source.size)

    def spend(count: int) -> None:
        budget.take(limits.MEMORY, count // limits.STREAMED, f"{source.path} inflates to more than any real file.")

    opened, end, damage = inflated(source, kind, spend)
    if damage is None and end == source.size:
        return opened
    why = f"{damage or f'{source.size - end} bytes of something else stand behind what was compressed'}."
    raise DamagedFileError(f"{source.path} cannot be inflated ({kind.name}).", why=why, fix="Get it again.")


def inflated(source: Source, kind: Kind, spend: Spend) -> tuple[Spooled, int, Exception | None]:
    """What compressed runs give up to their end or damage; where they end; the damage. `spend` counts bytes beforehand."""
    opened, end = Spooled(source, ()), source.size

    def whole() -> Iterator[bytes]:
        nonlocal end
        end = yield from _runs(source, kind, spend)

    try:
        opened.add(whole())
    except CkptError:  # some of ours are an OSError too
        raise
    except BROKEN as error:
        return opened, end, error
    return opened, end, None


def _runs(source: Source, kind: Kind, spend: Spend) -> Generator[bytes, None, int]:
    """What the runs give, one behind another of the same kind, in blocks; returns where they end."""
    if kind.make is None:
        yield from _zstd(source, spend)
        return source.size
    opened, at = kind.make(), 0
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
            at -= len(opened.unused_data)
            while (padding := source.read(at, min(_PACKED_BLOCK, source.size - at))) and not padding.strip(b"\0"):
                at += len(padding)
            at += len(padding) - len(padding.lstrip(b"\0"))
            if not source.read(at, min(_MAGIC, source.size - at)).startswith(kind.magic):
                return at
            spend(_COST_OF_RUN)
            opened = kind.make()
    raise EOFError("It is cut off")


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


def _zstd(source: Source, spend: Spend) -> Iterator[bytes]:
    try:
        module: Any = import_module("zstandard")
    except ImportError:
        what = f"{source.path} is a zstd archive, which the package zstandard reads."
        raise UnsupportedContainerError(what, fix="pip install zstandard, or unpack it: unzstd") from None
    opened = module.ZstdDecompressor().stream_reader(Reader(source), read_across_frames=True)
    try:
        while piece := opened.read(_BLOCK):
            spend(len(piece))
            yield piece
    except module.ZstdError as error:
        raise EOFError(str(error)) from None
