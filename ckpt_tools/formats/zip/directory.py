"""Our own reading of a zip's central directory: as torch (miniz) reads it, and refusing what two readers could read apart.

Python's zipfile is not an alternative: the last duplicate wins there, CRC 0 is refused, one bad extra field refuses all.
`headers` has the structures, and where they are described.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, DamagedFileError
from ckpt_tools.formats.zip.headers import (
    ALIGNMENT,
    CENTRAL,
    DESCRIPTOR_64,
    END,
    END64,
    FULL_16,
    FULL_32,
    LOCAL,
    LOCATOR64,
    SIGNATURE_CENTRAL,
    SIGNATURE_LOCAL,
    UNICODE_PATH,
    CentralEntry,
    check_unicode_name,
    zip64_fields,
)
from ckpt_tools.io.content import Range
from ckpt_tools.io.output import Source
from ckpt_tools.tree.findings import mending

_MAX_COMMENT = 65535
_ENCRYPTED, _PATCHED, _STRONG, _MASKED = 1, 1 << 5, 1 << 6, 1 << 13
_ODD_FLAGS = _ENCRYPTED | _PATCHED | _STRONG | _MASKED
_ORDINARY_NAME = re.compile(rb"[\w.-]++(?<=\w)(?:/[\w.-]++(?<=\w))*+")  # ASCII, no folder called "..", nothing empty
_METHODS = {1: "shrink", 9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 98: "ppmd"}


@dataclass(slots=True, eq=False)
class Record:
    """One record."""

    name: str
    header: int
    data: int
    size: int
    compressed: int
    crc: int
    deflated: bool
    flags: int
    line: bytes
    is_array: bool = False
    following: int = 0

    @property
    def end(self) -> int:
        """Where its bytes end."""
        return self.data + self.compressed

    @property
    def dead(self) -> int:
        """Bytes between its data descriptor and what follows that belong to no record; none when it may be padding."""
        gap = self.following - self.data - self.compressed - DESCRIPTOR_64
        return gap if gap >= ALIGNMENT else 0


@dataclass(slots=True, unsafe_hash=True)
class RecordRange(Range):
    """The bytes of a stored record, which may be copied together with the zip header before them."""

    record: Record


@dataclass(slots=True, unsafe_hash=True)
class Directory:
    """The records in file order, where the central directory starts, and how many bytes come after the end record."""

    records: list[Record]
    start: int
    trailing: int
    folders: Sequence[str] = ()


class MissingDirectoryError(DamagedFileError):
    """The file ends without an end record: it was cut off."""


def read_directory(source: Source) -> Directory:
    """Read and check the directory of a zip file."""
    try:
        return _read_directory(source)
    except DamagedFileError as error:
        # Carriage returns that were put in can break any part, so this is asked last, whatever broke.
        raise _text_mode(source) or error from None


def _read_directory(source: Source) -> Directory:
    tail_start = max(0, source.size - _MAX_COMMENT - END.size)
    tail = source.read(tail_start, source.size - tail_start)
    end = _find_end(source, tail, tail_start)
    _, disk, first_disk, on_disk, count, size, start, _ = END.unpack_from(tail, end - tail_start)
    trailing = source.size - end - END.size - _comment_length(tail, end - tail_start)
    directory_end = end
    wide = _read_zip64(source, end)
    if wide is not None:
        directory_end, wide_fields = wide
        _agree((disk, first_disk, on_disk, count, size, start), wide_fields)
        disk, first_disk, on_disk, count, size, start = wide_fields
    if disk or first_disk or on_disk != count:
        raise DamagedFileError("The zip is one part of several.", why="torch writes single archives.")
    limits.RECORDS.check(count, f"The zip directory lists {count} records.")
    _check_place(start, size, directory_end)
    records, folders = _read_central(source, source.read(start, size), count, start)
    _check_names(records)
    inflated = sum(record.size for record in records if record.deflated)
    what = f"The file's deflated records come to {inflated} bytes, and the file has {source.size}."
    limits.budget(source.size).take(limits.MEMORY, inflated // limits.STREAMED, what)
    return Directory(_in_file_order(records, start), start, trailing, folders)


def has_end(source: Source) -> bool:
    """Whether an end record is where readers look for one: in the last 64 KiB."""
    start = max(0, source.size - _MAX_COMMENT - END.size)
    return b"PK\x05\x06" in source.read(start, source.size - start)


def _comment_length(tail: bytes, at: int) -> int:
    return int.from_bytes(tail[at + 20 : at + 22], "little")


def _find_end(source: Source, tail: bytes, tail_start: int) -> int:
    """The offset of the end record: the last signature, unless it lies inside the comment of an earlier one."""
    last = len(tail)
    while (last := tail.rfind(b"PK\x05\x06", 0, last)) >= 0 and last + END.size > len(tail):
        pass
    if last < 0:
        raise MissingDirectoryError("The zip directory at the end of the file is missing.")
    if last + END.size + _comment_length(tail, last) > len(tail):
        raise DamagedFileError("The zip's end record claims a comment longer than the file.")
    earlier = last
    while (earlier := tail.rfind(b"PK\x05\x06", 0, earlier)) >= 0:
        if earlier + END.size + _comment_length(tail, earlier) > last and _plausible_end(source, tail, earlier, tail_start):
            raise DamagedFileError(
                "The zip has an end record inside the comment of another.",
                why="Two programs would read two different archives.",
            )
    return tail_start + last


def _plausible_end(source: Source, tail: bytes, at: int, tail_start: int) -> bool:
    """Whether these bytes, found by their signature alone, point to a central directory."""
    *_, size, start, _ = END.unpack_from(tail, at)
    return start == FULL_32 or (start + size <= tail_start + at and source.read(start, 4) in (b"PK\x01\x02", b"PK\x05\x06"))


def _read_zip64(source: Source, end: int) -> tuple[int, tuple[int, ...]] | None:
    """Where the zip64 end record starts, and its fields; None when there is none."""
    if end < LOCATOR64.size:
        return None
    signature, disk, at, disks = LOCATOR64.unpack(source.read(end - LOCATOR64.size, LOCATOR64.size))
    if signature != b"PK\x06\x07":
        return None
    if disk or disks != 1:
        raise DamagedFileError("The zip is one part of several.", why="torch writes single archives.")
    if at + END64.size > end - LOCATOR64.size:
        raise _misplaced(f"its zip64 end record is said to be at {at}")
    signature, record_size, _, _, disk, first_disk, on_disk, count, size, start = END64.unpack(source.read(at, END64.size))
    if signature != b"PK\x06\x06" or at + 12 + record_size != end - LOCATOR64.size:
        raise _misplaced(f"there is no zip64 end record at {at}")
    return at, (disk, first_disk, on_disk, count, size, start)


def _agree(plain: tuple[int, ...], wide: tuple[int, ...]) -> None:
    for index, (narrow, full) in enumerate(zip(plain, wide, strict=True)):
        limit = FULL_16 if index < 4 else FULL_32
        if narrow != full and narrow != limit:
            raise DamagedFileError(
                "The zip's two end records disagree.",
                why=f"One says {narrow}, the zip64 one {full}: two programs would differ.",
            )


def _check_place(start: int, size: int, directory_end: int) -> None:
    if start + size != directory_end:
        raise _misplaced(f"it should end at {start + size} and ends at {directory_end}")


def _misplaced(why: str) -> DamagedFileError:
    """The directory is not where the end record says: bytes were put before or removed, or the file was damaged."""
    reason = "Bytes are missing or added before it, or several zips were put one after another (a .distcp shard)."
    return DamagedFileError(f"The zip directory is not where the file says: {why}.", why=reason)


def _text_mode(source: Source) -> DamagedFileError | None:
    """The error for a file that a text-mode transfer went over, None where none did. No other file lacks a bare line feed."""
    head = source.read(0, min(source.size, 1 << 20))
    if b"\r\n" not in head or b"\n" in head.replace(b"\r\n", b""):
        return None
    return DamagedFileError(
        "The file was damaged by a text-mode transfer.",
        why="Every line feed has a carriage return before it.",
        fix=f"Transfer it again in binary mode, or undo it: {mending('repair', str(source.path))}",
    )


def _read_central(source: Source, data: bytes, count: int, start: int) -> tuple[list[Record], list[str]]:
    """The records, and the names of the folders."""
    records: list[Record] = []
    folders: list[str] = []
    at = 0
    if source.fd < 0:
        source.prefetch(list(_local_headers(data)))
    headers = _Headers(source, start)
    for _ in range(count):
        if at + CENTRAL.size > len(data) or data[at : at + 4] != SIGNATURE_CENTRAL:
            raise DamagedFileError(
                f"The zip directory is damaged at offset {start + at}.", why="There is no entry where one is counted."
            )
        record, at = _read_entry(headers, data, at)
        if type(record) is Record:
            records.append(record)
        else:
            folders.append(str(record))
    if at != len(data):
        raise DamagedFileError(f"The zip directory lists more than the {count} records that the end record counts.")
    return records, folders


class _Headers:
    """The local headers of a zip; where they lie close together, as between small tensors, many are read at once."""

    def __init__(self, source: Source, end: int) -> None:
        self.source, self.end = source, end
        self.near = _NEAR if source.fd >= 0 else 0
        self.last, self.start, self.block = -_NEAR, 0, b""

    def read(self, offset: int, length: int) -> bytes:
        """What is there; nothing where it would reach into the directory."""
        at, last, self.last = offset - self.start, self.last, offset
        if at >= 0 and at + length <= len(self.block):
            return self.block[at : at + length]
        if offset + length > self.end:
            return b""
        more = _AT_ONCE if 0 <= offset - last < self.near else _WITH_START
        self.start, self.block = offset, self.source.read(offset, min(max(more, length), self.end - offset))
        return self.block[:length]

    def is_array(self, start: int) -> bool:
        """Whether the bytes of a .npy start here; they have been read with the header, unless it is a long one."""
        at = start - self.start
        if 0 <= at <= len(self.block) - len(NUMPY):
            return self.block.startswith(NUMPY, at)
        return start + len(NUMPY) <= self.end and self.source.read(start, len(NUMPY)) == NUMPY


_NEAR, _AT_ONCE = 12 << 10, 64 << 10  # reading a block takes as long as reading five headers one by one
_WITH_START = 256  # a header, the padding in front of a tensor, and the first bytes of it
NUMPY = b"\x93NUMPY"


def _local_headers(data: bytes) -> Iterator[tuple[int, int]]:
    """Where the local headers are and how long, as far as the directory can be read; whoever reads them checks it."""
    at = 0
    while at + CENTRAL.size <= len(data) and data[at : at + 4] == SIGNATURE_CENTRAL:
        entry = CentralEntry.of(data, at)
        header = entry.header
        name_end = at + CENTRAL.size + entry.name_length
        extra_end = name_end + entry.extra_length
        if header == FULL_32:
            *_, header = zip64_fields(data[name_end:extra_end], entry.size, entry.compressed, header, "")
        yield header, max(LOCAL.size + entry.name_length, _WITH_START)
        at = extra_end + entry.comment_length


def _read_entry(headers: _Headers, data: bytes, at: int) -> tuple[Record | str, int]:
    """One entry of the central directory, with its local header checked; the name alone of an empty folder."""
    fields = CENTRAL.unpack_from(data, at)
    _, _, _, flags, method, _, _, crc, compressed, size, name_length, extra_length, comment, disk, _, attributes, header = (
        fields
    )
    name_end = at + CENTRAL.size + name_length
    extra_end = name_end + extra_length
    following = extra_end + comment
    if following > len(data):
        raise DamagedFileError(f"The zip directory is damaged at offset {headers.end + at}.", why="An entry runs past its end.")
    raw_name = data[at + CENTRAL.size : name_end]
    name = _checked_name(raw_name)
    if extra_length:
        extra = data[name_end:extra_end]
        size, compressed, header = zip64_fields(extra, size, compressed, header, name)
        if UNICODE_PATH in extra:
            check_unicode_name(extra, raw_name, name)
    if disk:  # 0xFFFF ("see the zip64 field") too: torch refuses it
        raise DamagedFileError("The zip is one part of several.", why="torch writes single archives.")
    if name.endswith("/") or attributes & 0x10:
        if size or compressed:
            raise DamagedFileError(f"The zip record {name!r} is marked as a folder and has data.")
        if not name.endswith("/"):  # a name like any other to torch, which finds it, and empty
            raise DamagedFileError(f"The zip record {name!r} is marked as a folder and not named as one.", why=TWO_FILES)
        return name, following
    if flags & _ODD_FLAGS or method or size != compressed:
        _check_kind(name, flags, method, size, compressed)
    start = _check_local(headers, raw_name, name, flags, method, header, (crc, compressed, size))
    is_array = method == 8 or headers.is_array(start)
    return Record(name, header, start, size, compressed, crc, method == 8, flags, data[at:following], is_array), following


def is_record_name(name: str) -> bool:
    """Whether every reader takes a name for the same: relative, UTF-8, no `..`, nothing empty, no backslash, no NUL."""
    parts = name.split("/")
    clean = name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)
    return clean and "" not in parts and ".." not in parts and not set(name) & set("\\\0")


def _checked_name(raw: bytes) -> str:
    """A record name. It is only ever looked up, never used as a path; what other readers could trip over is refused."""
    if _ORDINARY_NAME.fullmatch(raw):
        return raw.decode("ascii")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedFileError(f"The zip record name {raw!r} is not UTF-8.") from None
    if not is_record_name(name.removesuffix("/")):
        raise DamagedFileError(f"The zip record name {name!r} is not one that torch writes.")
    return name


def _check_kind(name: str, flags: int, method: int, size: int, compressed: int) -> None:
    if flags & _ODD_FLAGS:
        raise DamagedFileError(f"The zip record {name!r} is encrypted or a patch (flags {flags:#06x}).")
    if method not in (0, 8):
        kind = _METHODS.get(method, f"method {method}")
        raise DamagedFileError(
            f"The zip record {name!r} is compressed with {kind}.", why="torch reads stored and deflated records."
        )
    if method == 0 and size != compressed:
        raise DamagedFileError(f"The zip record {name!r} is stored with two sizes, {compressed} and {size}.")


def _check_local(
    headers: _Headers, raw: bytes, name: str, flags: int, method: int, header: int, sums: tuple[int, int, int]
) -> int:
    """Where the record's bytes start, after comparing its local header with the central entry."""
    length = LOCAL.size + len(raw)
    local = headers.read(header, length)
    if local[:4] != SIGNATURE_LOCAL:
        raise DamagedFileError(f"The zip record {name!r} is not where the directory says (offset {header}).")
    _, _, local_flags, local_method, _, _, crc, compressed, size, name_length, extra_length = LOCAL.unpack_from(local)
    if local[LOCAL.size :] != raw or name_length != len(raw):
        raise DamagedFileError(
            f"The zip record {name!r} has another name in its local header.", why="Two programs would read two files."
        )
    if local_method != method or (local_flags ^ flags) & _ENCRYPTED:
        raise DamagedFileError(f"The zip record {name!r} says in its local header that it is packed in another way.")
    if not local_flags & 8 and (crc, compressed, size) != sums and FULL_32 not in (compressed, size):
        raise DamagedFileError(f"The zip record {name!r} has another size or CRC-32 in its local header.")
    start = header + length + int(extra_length)
    if start + sums[1] > headers.end:
        raise DamagedFileError(f"The zip record {name!r} reaches into the zip directory: the file is cut or damaged.")
    return start


def _check_names(records: list[Record]) -> None:
    """Refuse a name that two records have, by torch's rule but for arrays alone, which torch does not look up."""
    fold = str if all(record.name.endswith(".npy") for record in records) else str.casefold
    if len({fold(record.name) for record in records}) == len(records):
        return
    folded: dict[str, Record] = {}
    for record in records:
        other, name = folded.setdefault(fold(record.name), record).name, record.name
        if folded[fold(name)] is record:
            continue
        if other == name:
            raise DamagedFileError(
                f"The zip holds two records named {name!r}.", why="Two programs would read two different ones."
            )
        raise DamagedFileError(f"The zip records {other!r} and {name!r} differ only in case.", why="torch would mix them up.")


def _in_file_order(records: list[Record], directory: int) -> list[Record]:
    """The records by offset, each knowing where the next begins; DamagedFileError when two overlap."""
    ordered = sorted(records, key=lambda record: record.header)
    for record, other in zip(ordered, [*ordered[1:], None], strict=False):
        record.following = other.header if other else directory
        if record.end > record.following:
            raise DamagedFileError(
                f"The zip record {record.name!r} overlaps {repr(other.name) if other else 'the zip directory'}."
            )
    return ordered
