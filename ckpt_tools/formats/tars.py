"""The members of a tar, as Python's tarfile, and so `torch.load`, reads its headers; none is extracted."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError
from ckpt_tools.formats.base import TAR_BLOCK
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Reader

_LONGEST = 1 << 16  # bytes of a header of names
_BYTES_PER_NODE = 16  # tarfile keeps a kilobyte for each header
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)
_WITHOUT_BYTES = (
    *_FILES, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
_IDLE = ("mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "linkpath")
_IDLE_STARTS = ("LIBARCHIVE.", "SCHILY.xattr.", "SCHILY.fflags", "RHT.security.", "MSWINDOWS.")


class OddHeaderError(Exception):
    """A header that readers of tars take in different ways. The text says which."""


class Headers(Reader):
    """What tarfile reads of a tar: headers, and what headers say. All of it is counted."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.budget = limits.budget(source.size)

    def read(self, size: int | None = -1, /) -> bytes:
        if size == 1:  # whether the member before is whole
            self.at += 1
            return b"\0"[: self.source.size - self.at + 1]
        data = super().read(size)
        self.budget.take(
            limits.NODES, len(data) // _BYTES_PER_NODE, "The tar has more headers than a file of its size can hold."
        )
        return data


class _ShortHeaders(Headers):
    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LONGEST:
            raise OddHeaderError(f"a header of {size} bytes")
        return super().read(size)


def is_file(info: tarfile.TarInfo) -> bool:
    """Whether a member is a regular file; the oldest tars mark a folder by its name alone."""
    return info.type in _FILES and not info.name.endswith("/")


def entries(source: Source, most: int) -> Iterator[tarfile.TarInfo]:
    """Each member, in file order, up to the first empty block."""
    try:
        archive = tarfile.open(  # noqa: SIM115  the source stays open
            fileobj=_ShortHeaders(source), mode="r:", encoding="utf-8", errors="surrogateescape"
        )
        for count, info in enumerate(archive):
            if count == most:
                raise OddHeaderError(f"more than {most} members")
            _check(source, archive, info)
            yield info
    except tarfile.TarError as error:
        raise DamagedFileError("The headers of the tar are damaged.", why=f"{error}.") from None
    at = archive.offset
    if at + TAR_BLOCK <= source.size and any(source.read(at, TAR_BLOCK)):
        raise DamagedFileError(f"The tar header at byte {at} is damaged.", why="Its checksum does not match.")


def _check(source: Source, archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
    """Refuse what is cut off, and what other readers of tars take in another way than tarfile."""
    end = info.offset_data + info.size
    if info.size < 0 or info.sparse is not None or (not is_file(info) and (info.type not in _WITHOUT_BYTES or info.size)):
        raise OddHeaderError(f"a member of kind {info.type!r} with {info.size} bytes")
    if end > source.size:
        raise DamagedFileError(
            f"The tar is cut off in its member {info.name!r}.",
            why=f"It ends after {source.size} bytes; the member goes up to byte {end}.",
            fix="An interrupted download or a full disk does that: get it again.",
        )
    for key in info.pax_headers:
        said_of_all = key in archive.pax_headers
        if not (key in _IDLE or key.startswith(_IDLE_STARTS) or (key in ("path", "size") and not said_of_all)):
            raise OddHeaderError(f"a pax header with {key[:40]!r}")
    at, names = info.offset, 0  # headers in front of the member's own may name it, one of them
    while at + TAR_BLOCK < info.offset_data:
        header = source.read(at, TAR_BLOCK)
        names += header[156:157] in b"xXL"
        at += TAR_BLOCK + -(-tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size // TAR_BLOCK) * TAR_BLOCK
    if names > 1:
        raise OddHeaderError("two names for one member")
