"""Several torch-zips one after another in one file: what one rank of `torch.distributed.checkpoint` writes (`__0_0.distcp`).

Only the `.metadata` beside it says which tensor is which; alone it is shown as the list of what its archives hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, DamagedFileError, UnsupportedContainerError
from ckpt_tools.formats.base import Decoded, Warned
from ckpt_tools.formats.sharded import Keys
from ckpt_tools.formats.zip import archives
from ckpt_tools.formats.zip.headers import END, END64, LOCATOR64
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.tree.nodes import List

_COST = 32  # of an archive, in containers, beside its records: torch's own is over a thousand bytes, a made one half of that
_ENDS = END64.size + LOCATOR64.size + END.size  # as torch ends every archive, without a comment


def split(source: Source) -> list[tuple[int, int]]:
    """Start and size of each archive, when the file is several of torch's one after another and nothing else; else none."""
    found = list(_backwards(source))
    return found[::-1] if len(found) > 1 and found[-1][0] == 0 else []


def _backwards(source: Source) -> Iterator[tuple[int, int]]:
    end = source.size
    for _ in range(limits.RECORDS.value):
        if end < _ENDS:
            return
        ends = source.read(end - _ENDS, _ENDS)
        signature, *_, size, start = END64.unpack_from(ends)
        begin = end - _ENDS - start - size
        if signature != b"PK\x06\x06" or ends[-END.size :][:4] != b"PK\x05\x06" or begin < 0:
            return
        yield begin, end - begin
        end = begin
    raise limits.RECORDS.error(f"{source.path} holds more archives than any checkpoint.")


def decode(source: Source, spans: list[tuple[int, int]]) -> Decoded:
    """What the archives hold, as a list."""
    first = _torch_reads_the_first(source, spans[0][1])
    parts, keys = [], Keys()
    for start, size in spans:
        limits.budget(source.size).take(limits.NODES, _COST, f"{source.path} holds too many archives.")
        part = archives.decode(Window(source, start, size))
        part.root = keys.renew(part.root)
        parts.append(part)
    if len({part.byteorder for part in parts}) > 1:
        raise UnsupportedContainerError("Some archives of the file are big-endian, others little-endian.")
    warned = Warned(
        "several-archives",
        f"{len(parts)} archives one after another: one rank's part of a distributed checkpoint, without names"
        + ("; torch.load gives the first of them alone" if first else ""),
        "the folder that it is from, with its .metadata",
    )
    return Decoded(
        "dcp-part", List([part.root for part in parts]), source,
        list(dict.fromkeys(name for part in parts for name in part.globals)),
        list(dict.fromkeys(use for part in parts for use in part.unusual)), {}, [warned],
        sum(part.storage_bytes for part in parts), parts[0].byteorder, all(part.has_checksums for part in parts),
    )  # fmt: skip


def _torch_reads_the_first(source: Source, first: int) -> bool:
    """Whether torch opens the file, as the first archive, which is so long; mostly it opens none."""
    _, _, at, _ = LOCATOR64.unpack(source.read(source.size - LOCATOR64.size - END.size, LOCATOR64.size))
    *_, plain, _ = END.unpack(source.read(source.size - END.size, END.size))
    wide = END64.unpack(source.read(at, END64.size)) if at + END64.size <= source.size else (b"", plain)
    start = wide[-1] if wide[0] == b"PK\x06\x06" else plain
    if start + 4 > source.size or source.read(start, 4) != b"PK\x01\x02":
        return False
    if at != first - _ENDS:
        raise DamagedFileError(
            f"{source.path} is several archives one after another, and torch.load would find another one in it.", why=TWO_FILES
        )
    return True
