"""Every pickle in a file, wherever it stands: one behind another, in archives, behind the header of a .npy, compressed.

It goes by content, and by nothing that a reader of checkpoints believes: a file that is two formats at once is looked through
as both. What cannot be looked through is told.
"""

from __future__ import annotations

import bz2
import lzma
import re
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import RawIOBase
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, LimitError
from ckpt_tools.formats.base import is_tar, is_zip
from ckpt_tools.formats.torch_zip import record_content, record_head
from ckpt_tools.formats.zip import concatenated
from ckpt_tools.formats.zip.directory import (
    LOCAL,
    Record,
    has_end,
    read_directory,
)
from ckpt_tools.io.content import chunks, read
from ckpt_tools.io.in_place.journal import write_all
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.pickling.calls import Pickle, list_pickles
from ckpt_tools.pickling.stream import BytesPart, FilePart

_HEAD = 4096
_BLOCK, _PACKED_BLOCK = 4 << 20, 1 << 20
_COST_OF_RUN = 4 * _HEAD
_MOST_DEPTH = 8  # archives and pickles in one another
_MOST_LISTED = 10_000  # pickles of one file
_INFLATED_PICKLE = 64 << 20  # bytes of a pickle that has to be inflated, or four times the file: it is read as a whole
_MOST_PARTS = 50_000  # members of all archives in one file
_STARTS = re.compile(rb"\x80[\x00-\x05]")
_MODULE = re.compile(r"[\w.+-]+")
_BY_CHANCE = 8  # bytes that something else may have in common with a pickle: the length of a safetensors header
_ZFILE = 2 + len(hex(2**64))
_NUMPY = b"\x93NUMPY"
_LOCAL_SIGNATURE = b"PK\x03\x04"
_LOCKED = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (b"Rar!", "a RAR archive"), (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x04\x22\x4d\x18", "an lz4 archive"),
)  # fmt: skip


_JOBLIB = "zlib of joblib 0.8"  # `ZF`, 19 characters of its length in hexadecimal, perhaps a space
# Of zlib and lzma two or three bytes tell, which other files begin with too: what cannot be inflated is none.
_COMPRESSED: tuple[tuple[bytes, str, Callable[[], Any]], ...] = (
    (b"\x1f\x8b", "gzip", lambda: zlib.decompressobj(31)), (b"BZh", "bzip2", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", "xz", lzma.LZMADecompressor), (b"]\x00\x00", "lzma", lzma.LZMADecompressor),
    (b"\x78\x01", "zlib", zlib.decompressobj), (b"\x78\x5e", "zlib", zlib.decompressobj),
    (b"\x78\x9c", "zlib", zlib.decompressobj), (b"\x78\xda", "zlib", zlib.decompressobj),
    (b"ZF0x", _JOBLIB, zlib.decompressobj),
)  # fmt: skip
_PACKED = (*(magic for magic, _ in _LOCKED), *(magic for magic, _, _ in _COMPRESSED))


@dataclass(slots=True)
class Pickles:
    """Every pickle of a file, and what of it could not be looked through.

    Attributes:
        pickles: in the order in which they were found. unexamined: (member or "", why).
        program: whether an archive in it is a program of torch's, which loading makes ready to run.
    """

    pickles: list[Pickle] = field(default_factory=list)
    unexamined: list[tuple[str, str]] = field(default_factory=list)
    program: bool = False


def find_pickles(source: Source) -> Pickles:
    """Look a file through. Nothing in it is run or imported.

    Raises:
        CkptError: the file cannot be read.
    """
    walk = _Walk(source.size)
    with limits.of_file(source.size):
        walk.examine(source, "", 0)
    return walk.found


class _InMemory(Source):
    """Bytes that were inflated or lay in a pickle, as a source."""

    def __init__(self, data: bytes, source: Source) -> None:
        self.path, self.size, self.data = source.path, len(data), data
        self._fd, self._identity = -1, object()

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def close(self) -> None:
        """Nothing to close."""


class _Spooled(Source):
    """Bytes that were inflated into a temporary file without a name, which goes when nothing refers to it any more."""

    def __init__(self, source: Source, blocks: Iterable[bytes | memoryview]) -> None:
        self.path, self.size, self._identity = source.path, 0, object()
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed with this source
        weakref.finalize(self, file.close)
        self._fd = file.fileno()
        for block in blocks:
            write_all(self._fd, memoryview(block))
            self.size += len(block)

    def close(self) -> None:
        """Nothing: it ends when nothing refers to it."""


class _Walk:
    """One file on its way through: how much may still be inflated, and what has been found."""

    def __init__(self, size: int) -> None:
        self.found = Pickles()
        self.left, self.parts = limits.INFLATED.most(size), 0
        self.longest = max(_INFLATED_PICKLE, 4 * size)

    def examine(self, source: Source, where: str, depth: int) -> None:
        """A file, a member of an archive, or bytes that a pickle loads: as whatever it may be read as."""
        self.parts += 1
        if depth > _MOST_DEPTH or len(self.found.pickles) >= _MOST_LISTED or self.parts > _MOST_PARTS:
            if self.parts <= _MOST_PARTS + 1:
                where = "" if self.parts > _MOST_PARTS else where
                self.skip(where, "it lies too deep, or the file has too many pickles or parts")
            return
        head = source.read(0, min(_HEAD, source.size))
        locked = next((kind for magic, kind in _LOCKED if head.startswith(magic)), None)
        if locked:
            self.skip(where, f"{locked}, which has to be unpacked first")
        opener = next(((magic, kind, make) for magic, kind, make in _COMPRESSED if head.startswith(magic)), None)
        if opener:
            self.guarded(where, lambda: self.compressed(source, where, depth, *opener))
        if is_zip(head) or has_end(source):
            self.guarded(where, lambda: self.archive(source, where, depth))
        if is_tar(head):
            self.guarded(where, lambda: self.tar(source, where, depth))
        if not head.startswith(_NUMPY):
            self.stream(source, where, depth)
        elif _holds_objects(head):
            self.stream(source, where, depth, _npy_header(head))

    def guarded(self, where: str, look: Callable[[], None]) -> None:
        """Look into a part; where that fails, it is told, and the rest goes on."""
        try:
            look()
        except CkptError as error:
            self.skip(where, error.what + (f" {error.why}" if error.why else ""))
        except (tarfile.TarError, zlib.error, OSError, EOFError, lzma.LZMAError, ValueError, OverflowError) as error:
            self.skip(where, f"it cannot be read: {error}")

    def skip(self, where: str, why: str) -> None:
        self.found.unexamined.append((where, why))

    # --- pickles

    def stream(self, source: Source, where: str, depth: int, start: int = 0) -> None:
        """Pickles one behind another, if there are any."""
        end = min(source.size, start + self.longest) if isinstance(source, _Spooled) else source.size
        for number, pickle in enumerate(list_pickles(FilePart(source, min(start, end), end))):
            if pickle.cut and end < source.size:
                self.skip(where, f"a pickle goes on beyond {self.longest} bytes that were inflated")
            elif not number and not _is_pickle(source, start, pickle):
                return
            pickle.where = where
            self.found.pickles.append(pickle)
            if pickle.error is not None:
                self.skip(where, f"{pickle.error.what} {pickle.error.why}".strip())
            for data in pickle.nested:
                self.examine(_InMemory(data, source), _inside(where, "bytes that it loads"), depth + 1)
            if len(self.found.pickles) >= _MOST_LISTED:
                self.skip(where, f"there are more than {_MOST_LISTED} pickles")
                return

    # --- archives

    def archive(self, source: Source, where: str, depth: int) -> None:
        """The records of a zip but those that hold the numbers of tensors; of a damaged one whatever has a local header."""
        try:
            records = read_directory(source).records
        except LimitError:  # no damage: what stands behind local headers would be as much
            raise
        except CkptError as error:
            spans = concatenated.split(source)
            for start, size in spans:
                self.archive(Window(source, start, size), _inside(where, f"archive at byte {start}"), depth + 1)
            if not spans:
                self.damaged_archive(source, where, depth, error)
            return
        names = {record.name for record in records}
        self.found.program |= any(name.endswith(_OF_PROGRAMS) for name in names)
        for record in records:
            if not _is_raw(record.name, names) and self.parts <= _MOST_PARTS:
                self.member(source, record, where, depth)

    def damaged_archive(self, source: Source, where: str, depth: int, error: CkptError) -> None:
        """What stands behind the local headers, since readers may differ in what the directory says."""
        self.skip(where, error.what)
        for name, member in _by_signatures(source, self):
            self.examine(member, _inside(where, name), depth + 1)
            if self.parts > _MOST_PARTS:
                return

    def member(self, source: Source, record: Record, where: str, depth: int) -> None:
        """One record of a zip."""
        name = _inside(where, record.name)

        def look() -> None:
            if not record.deflated or record.size <= _HEAD or _may_hold_pickles(record_head(source, record, _HEAD)):
                self.examine(self.opened(source, record), name, depth + 1)

        self.guarded(name, look)

    def opened(self, source: Source, record: Record) -> Source:
        """A record as a source of its own; a deflated one is inflated."""
        if not record.deflated:
            return Window(source, record.data, record.size)
        self.spend(record.size)
        if record.size <= _BLOCK:
            return _InMemory(read(record_content(source, record)), source)
        return _Spooled(source, chunks(record_content(source, record)))

    def spend(self, count: int) -> None:
        """Count bytes that are inflated.

        Raises:
            LimitError: the file inflates to more than any real one.
        """
        self.left -= count
        if self.left < 0:
            raise limits.INFLATED.error("The file inflates to more than any real one.")

    def tar(self, source: Source, where: str, depth: int) -> None:
        """The members of a tar, as Python's own reader finds them; none is extracted."""
        with tarfile.open(fileobj=_File(source), mode="r:") as archive:
            for info in archive:
                if info.isreg():
                    self.examine(Window(source, info.offset_data, min(info.size, source.size - info.offset_data)),
                                 _inside(where, info.name), depth + 1)  # fmt: skip

    def compressed(self, source: Source, where: str, depth: int, magic: bytes, kind: str, make: Callable[[], Any]) -> None:
        """What a compressed file holds."""
        try:
            opened = _Spooled(source, self.inflated(source, _behind_length(source) if kind == _JOBLIB else 0, make, magic))
        except (zlib.error, lzma.LZMAError):
            if kind in ("zlib", "lzma", _JOBLIB):
                return
            raise
        self.examine(opened, _inside(where, f"({kind})"), depth + 1)

    def inflated(self, source: Source, start: int, make: Callable[[], Any], again: bytes = b"") -> Iterator[bytes]:
        """What a compressed run of bytes from `start` on gives, in blocks, up to where it ends.

        With `again` also the runs behind it that begin so, zeros between them: gzip, bz2 and lzma read them as one.
        """
        opened, at, size = make(), start, _PACKED_BLOCK
        while at < source.size:
            data = source.read(at, min(size, source.size - at))
            at += len(data)
            piece = opened.decompress(data, _BLOCK)
            while piece:
                self.spend(len(piece))
                yield piece
                piece = b"" if opened.eof else opened.decompress(getattr(opened, "unconsumed_tail", b""), _BLOCK)
            size = min(2 * size, _PACKED_BLOCK)
            if opened.eof:
                at = _next_run(source, at - len(opened.unused_data))
                if not again or source.read(at, min(len(again), source.size - at)) != again:
                    return
                self.spend(_COST_OF_RUN)
                opened, size = make(), _HEAD  # runs may be short


def _next_run(source: Source, at: int) -> int:
    """The first byte from `at` on that is no zero; of a megabyte of zeros none is looked for."""
    padding = source.read(at, min(_PACKED_BLOCK, source.size - at))
    return at + len(padding) - len(padding.lstrip(b"\0"))


_OF_PROGRAMS = ("/constants.pkl", "/archive_format", "/model.json", "/models/model.json", "/serialized_exported_program.json")


def _behind_length(source: Source) -> int:
    """Where the data of an old file of joblib's starts. Source: `joblib.numpy_pickle_compat.read_zfile`."""
    return _ZFILE + (source.read(_ZFILE, min(1, source.size - _ZFILE)) == b" ") if source.size > _ZFILE else source.size


def _is_raw(name: str, names: set[str]) -> bool:
    """Whether a record holds the numbers of a storage: `data/7` or `constants/7` beside a pickle of that name."""
    folder, _, key = name.rpartition("/")
    if not key.isdecimal():
        return False
    return folder.rpartition("/")[2] in ("data", "constants") and f"{folder}.pkl" in names


def _is_pickle(source: Source, start: int, pickle: Pickle) -> bool:
    """Whether bytes that could be read as a pickle are one: they say so, or they name what can be a module, and go through."""
    head = source.read(start, min(2, source.size - start))
    if isinstance(pickle.error, LimitError):  # a call may stand behind what was read
        return True
    if _STARTS.match(head):
        return pickle.error is None or bool(pickle.names) or pickle.end > pickle.start + _BY_CHANCE
    if not pickle.names or not _MODULE.fullmatch(pickle.names[0].module):  # Python would go no further than such an import
        return False
    return bool(pickle.calls) or pickle.error is None


def _may_hold_pickles(head: bytes) -> bool:
    """Whether it is worth inflating what begins so: an archive, an array of objects, or what can be read as a pickle so far."""
    if head.startswith(_NUMPY):
        return _holds_objects(head)
    if is_zip(head) or is_tar(head) or head.startswith(_PACKED):
        return True
    return any(pickle.names or pickle.cut or pickle.error is None for pickle in list_pickles(BytesPart(head)))


def _holds_objects(head: bytes) -> bool:
    """Whether a .npy says that it holds Python objects, by themselves or in a field of its elements."""
    return b"O" in head[: _npy_header(head)]


def _npy_header(head: bytes) -> int:
    """Where the bytes behind the header of a .npy start."""
    width = 2 if head[6:7] == b"\1" else 4
    return 8 + width + int.from_bytes(head[8 : 8 + width], "little")


def _inside(where: str, name: str) -> str:
    return f"{where}: {name}" if where else name


def _by_signatures(source: Source, walk: _Walk) -> Iterator[tuple[str, Source]]:
    """What stands behind every local header of a zip that is damaged or not to be trusted."""
    places = list(_signatures(source))
    for place, following in zip(places, [*places[1:], source.size], strict=True):
        if place + LOCAL.size > source.size:
            return
        _, _, _, method, *_, name_length, extra_length = LOCAL.unpack(source.read(place, LOCAL.size))
        start = place + LOCAL.size + name_length + extra_length
        if start >= source.size:
            continue
        name = source.read(place + LOCAL.size, min(name_length, _HEAD)).decode("utf-8", "replace")
        window = Window(source, start, max(following, start) - start)
        if method != 8:
            yield name, window
            continue
        try:
            yield name, _Spooled(source, walk.inflated(window, 0, lambda: zlib.decompressobj(-15)))
        except (zlib.error, LimitError) as error:
            walk.skip(name, f"it cannot be inflated: {error}")


def _signatures(source: Source) -> Iterator[int]:
    """Where local headers begin."""
    at = 0
    while at < source.size:
        data = source.read(at, min(_BLOCK + 3, source.size - at))
        found = data.find(_LOCAL_SIGNATURE)
        while found >= 0 and found < _BLOCK:
            yield at + found
            found = data.find(_LOCAL_SIGNATURE, found + 1)
        at += _BLOCK


class _File(RawIOBase):
    """A source as Python's tarfile reads a file."""

    def __init__(self, source: Source) -> None:
        self.source, self.at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.source.size - self.at)
        data = self.source.read(self.at, left if size is None or size < 0 else min(size, left))
        self.at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.at = offset + (0, self.at, self.source.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at
