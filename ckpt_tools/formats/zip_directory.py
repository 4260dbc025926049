"""A zip's central directory, read as torch (miniz) reads it, and its records; what two readers could read apart is refused.

Python's zipfile is no way: the last duplicate wins there, CRC 0 is refused. Source: PKWARE's APPNOTE 6.3.10, section 4.3.
"""

from __future__ import annotations

import re
import zlib
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from struct import Struct

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, ChecksumError, DamagedFileError
from ckpt_tools.io.content import CHUNK, Content, Deflated, Range, crc32, read
from ckpt_tools.io.output import Source
from ckpt_tools.tree.findings import mending

SIGNATURE_LOCAL, SIGNATURE_CENTRAL, SIGNATURE_DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
LOCAL = Struct("<4s5H3I2H")
CENTRAL = Struct("<4s6H3I5H2I")
END = Struct("<4s4H2IH")
END64 = Struct("<4sQ2H2I4Q")
LOCATOR64 = Struct("<4sIQI")
DESCRIPTOR, DESCRIPTOR_64, ALIGNMENT = 16, 24, 64
FULL_16, FULL_32 = 0xFFFF, 0xFFFFFFFF  # what does not fit, and stands in a zip64 field


class LocalHeader(
    namedtuple("LocalHeader", "signature needs flags method time date crc compressed size name_length extra_length")
):
    __slots__ = ()

    @classmethod
    def at(cls, source: Source, offset: int) -> LocalHeader:
        return cls._make(LOCAL.unpack(source.read(offset, LOCAL.size)))

    @property
    def length(self) -> int:
        return LOCAL.size + int(self.name_length) + int(self.extra_length)


def zip64_fields(extra: bytes, size: int, compressed: int, header: int, name: str) -> tuple[int, int, int]:
    bodies = [body for tag, body in _extra_fields(extra, name) if tag == _ZIP64]
    narrow = (size, compressed, header)
    if len(bodies) > 1 or any(8 * narrow.count(FULL_32) > len(body) for body in bodies):
        raise _two_ways(name, "its zip64 field is there twice, or too short")
    wide = (int.from_bytes(body[at : at + 8], "little") for body in bodies for at in range(0, len(body), 8))
    size, compressed, header = (next(wide, value) if value == FULL_32 else value for value in narrow)
    return size, compressed, header


def _two_ways(name: str, why: str) -> DamagedFileError:
    return DamagedFileError(f"Two programs may read the zip record {name!r} in two ways: {why}.")


_ZIP64, _UNICODE_PATH = 1, int.from_bytes(b"up", "little")  # tags of extra fields; Info-ZIP writes a name in UTF-8 in one


def _extra_fields(extra: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(extra):
        length = int.from_bytes(extra[at + 2 : at + 4], "little")
        if at + 4 + length > len(extra):
            raise _two_ways(name, "an extra field is malformed")
        yield int.from_bytes(extra[at : at + 2], "little"), extra[at + 4 : at + 4 + length]
        at += 4 + length


def signatures(source: Source, *wanted: bytes) -> Iterator[tuple[bytes, int]]:
    """Each of these signatures with its offset, wherever it is: also within the bytes of a record."""
    for start in range(0, source.size, CHUNK):
        block = source.read(start, min(CHUNK + 3, source.size - start))
        for signature in wanted:
            at = block.find(signature)
            while 0 <= at < CHUNK:
                yield signature, start + at
                at = block.find(signature, at + 1)


_SEARCHED = 1 << 20
_NAMES = 64  # of records that are looked at
PROGRAM = (
    r"/code/|/constants\.pkl$|/archive_format$"  # TorchScript, and exported programs, of torch 2.7 on and before
    r"|/models/[^/]+\.json$|/data/(weights|constants|sample_inputs|aotinductor)/|^serialized_(exported_program|state_dict)"
)
_HEADER = rb"(?s)PK\x03\x04.{22}(..).."  # with the length of the name behind it


def is_mended(source: Source) -> bool:
    """Whether `ckpt repair` may take a damaged zip:"""
    data = source.read(0, min(_SEARCHED, source.size))
    if SIGNATURE_LOCAL in data and source.size <= _SEARCHED and b"data.pkl" not in data:
        return False
    headers = islice(re.finditer(_HEADER, data), _NAMES)
    names = (data[found.end() : found.end() + int.from_bytes(found[1], "little")] for found in headers)
    return not any(re.search(rf"{PROGRAM}|\.npy$", name.decode(errors="replace")) for name in names)


_MAX_COMMENT = 65535
_ENCRYPTED, _PATCHED, _STRONG, _MASKED = 1, 1 << 5, 1 << 6, 1 << 13
_ODD_FLAGS = _ENCRYPTED | _PATCHED | _STRONG | _MASKED
_ORDINARY_NAME = re.compile(rb"[\w.-]++(?<=\w)(?:/[\w.-]++(?<=\w))*+")  # ASCII, no folder called "..", nothing empty


@dataclass(slots=True, eq=False, repr=False)
class Record:
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
        return self.data + self.compressed

    @property
    def dead(self) -> int:
        """Bytes between its data descriptor and what follows that belong to no record; none when it may be padding."""
        gap = self.following - self.data - self.compressed - DESCRIPTOR_64
        return gap if gap >= ALIGNMENT else 0


@dataclass(slots=True, eq=False, repr=False)
class RecordRange(Range):
    """The bytes of a stored record, which may be copied together with the zip header before them."""

    record: Record


@dataclass(slots=True, eq=False, repr=False)
class Directory:
    """The records in file order, where the central directory starts, and how many bytes come after the end record."""

    records: list[Record]
    start: int
    trailing: int


class MissingDirectoryError(DamagedFileError):
    """The file ends without an end record: it was cut off."""


def read_directory(source: Source) -> Directory:
    tail_start = max(0, source.size - _MAX_COMMENT - END.size)
    tail = source.read(tail_start, source.size - tail_start)
    end = _find_end(tail, tail_start)
    narrow = END.unpack_from(tail, end - tail_start)[1:7]
    trailing = source.size - end - END.size - _comment_length(tail, end - tail_start)
    directory_end, fields = _read_zip64(source, end) or (end, narrow)
    full = (FULL_16,) * 4 + (FULL_32,) * 2
    if any(said not in (wide, most) for said, wide, most in zip(narrow, fields, full, strict=True)):
        raise DamagedFileError("The zip's two end records disagree: two programs would read two archives.")
    disk, first_disk, on_disk, count, size, start = fields
    if disk or first_disk or on_disk != count:
        raise _one_of_several()
    limits.RECORDS.check(count, f"The zip directory lists {count} records.")
    if start + size != directory_end:
        raise _misplaced(f"it should end at {start + size} and ends at {directory_end}")
    records = _read_central(source, source.read(start, size), count, start)
    _check_names(records)
    inflated = sum(record.size for record in records if record.deflated)
    what = f"The file's deflated records come to {inflated} bytes, and the file has {source.size}."
    limits.budget(source.size).take(limits.MEMORY, inflated // limits.STREAMED, what)
    return Directory(_in_file_order(records, start), start, trailing)


def has_end(source: Source) -> bool:
    start = max(0, source.size - _MAX_COMMENT - END.size)
    return b"PK\x05\x06" in source.read(start, source.size - start)


def _comment_length(tail: bytes, at: int) -> int:
    return int.from_bytes(tail[at + 20 : at + 22], "little")


def _find_end(tail: bytes, tail_start: int) -> int:
    last = len(tail)
    while (last := tail.rfind(b"PK\x05\x06", 0, last)) >= 0 and last + END.size > len(tail):
        pass
    if last < 0:
        raise MissingDirectoryError("The zip directory at the end of the file is missing.")
    end, earlier = last + END.size + _comment_length(tail, last), last
    if end > len(tail):
        raise DamagedFileError("The zip's end record claims a comment longer than the file.")
    while (earlier := tail.rfind(b"PK\x05\x06", 0, earlier)) >= 0:
        reach = earlier + END.size + _comment_length(tail, earlier)
        if reach == len(tail) or (reach > last and end < len(tail)):  # else the bytes of a tensor may look so
            raise DamagedFileError("The zip has an end record inside the comment of another.", why=TWO_FILES)
    return tail_start + last


def _read_zip64(source: Source, end: int) -> tuple[int, tuple[int, ...]] | None:
    if end < LOCATOR64.size:
        return None
    signature, disk, at, disks = LOCATOR64.unpack(source.read(end - LOCATOR64.size, LOCATOR64.size))
    if signature != b"PK\x06\x07":
        return None
    if disk or disks != 1:
        raise _one_of_several()
    if at + END64.size > end - LOCATOR64.size:
        raise _misplaced(f"its zip64 end record is said to be at {at}")
    signature, record_size, _, _, disk, first_disk, on_disk, count, size, start = END64.unpack(source.read(at, END64.size))
    if signature != b"PK\x06\x06" or at + 12 + record_size != end - LOCATOR64.size:
        raise _misplaced(f"there is no zip64 end record at {at}")
    return at, (disk, first_disk, on_disk, count, size, start)


def _one_of_several() -> DamagedFileError:
    return DamagedFileError("The zip is one part of several.", why="torch writes single archives.")


def _misplaced(why: str) -> DamagedFileError:
    """The directory is not where the end record says: bytes were put before or removed, or the file was damaged."""
    reason = "Bytes are missing or added before it, or several zips were put one after another (a .distcp shard)."
    return DamagedFileError(f"The zip directory is not where the file says: {why}.", why=reason)


def _read_central(source: Source, data: bytes, count: int, start: int) -> list[Record]:
    records: list[Record] = []
    at = 0
    for _ in range(count):
        record, at = _read_entry(data, at, start)
        records += [record] if record is not None else []
    if at != len(data):
        raise DamagedFileError(f"The zip directory lists more than the {count} records that the end record counts.")
    if source.fd < 0:
        source.prefetch([(record.header, max(LOCAL.size + len(record.name), _WITH_START)) for record in records])
    headers = _Headers(source, start, count)
    for record in records:
        _check_local(headers, record)
        record.is_array = record.deflated or headers.read(record.data, len(NUMPY)) == NUMPY
    return records


class _Headers:
    """The local headers of a zip; where they lie close together, as between small tensors, many are read at once."""

    def __init__(self, source: Source, end: int, count: int) -> None:
        self.source, self.end = source, end
        self.ahead = _AT_ONCE if source.fd >= 0 and end < _NEAR * count else _WITH_START
        self.start, self.block = 0, b""

    def read(self, offset: int, length: int) -> bytes:
        """What is there; less where that would reach into the directory."""
        at = offset - self.start
        if not 0 <= at <= len(self.block) - length:
            self.start, at = offset, 0
            self.block = self.source.read(offset, max(0, min(max(self.ahead, length), self.end - offset)))
        return self.block[at : at + length]


_NEAR, _AT_ONCE = 12 << 10, 64 << 10  # reading a block takes as long as reading five headers one by one
_WITH_START = 256  # a header, the padding in front of a tensor, and the first bytes of it
NUMPY = b"\x93NUMPY"


def _read_entry(data: bytes, at: int, start: int) -> tuple[Record | None, int]:
    """One entry of the central directory, unless it is an empty folder, and where the next begins."""
    line = data[at : at + CENTRAL.size]
    if len(line) < CENTRAL.size or line[:4] != SIGNATURE_CENTRAL:
        what = f"The zip directory is damaged at offset {start + at}."
        raise DamagedFileError(what, why="It has fewer entries than it counts.")
    (_, _, _, flags, method, _, _, crc, compressed, size, name_length, extra_length, comment_length, disk, _, attributes,
     header) = CENTRAL.unpack(line)  # fmt: skip
    name_end = at + CENTRAL.size + name_length
    extra_end = name_end + extra_length
    following = extra_end + comment_length
    if following > len(data):
        raise DamagedFileError(f"The zip directory is damaged at offset {start + at}.", why="An entry runs past its end.")
    raw_name, extra = data[at + CENTRAL.size : name_end], data[name_end:extra_end]
    name = _checked_name(raw_name)
    if extra:
        size, compressed, header = zip64_fields(extra, size, compressed, header, name)
        if any(tag == _UNICODE_PATH and body[5:] != raw_name for tag, body in _extra_fields(extra, name)):
            raise _two_ways(name, "an extra field calls it otherwise")
    if disk:  # 0xFFFF ("see the zip64 field") too: torch refuses it
        raise _one_of_several()
    if name.endswith("/") or attributes & 0x10:
        if size or compressed or not name.endswith("/"):  # a name like any other to torch, which finds it, and empty
            raise _two_ways(name, "it is marked as a folder, and has data or no name of one")
        return None, following
    if flags & _ODD_FLAGS or method not in (0, 8):
        what = f"The zip record {name!r} is encrypted, or compressed otherwise than by deflate."
        raise DamagedFileError(what, why=f"torch cannot read it (flags {flags:#06x}, method {method}).")
    if not method and size != compressed:
        raise _two_ways(name, "it is stored with two sizes")
    return Record(name, header, 0, size, compressed, crc, method == 8, flags, data[at:following]), following


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


def _check_local(headers: _Headers, record: Record) -> None:
    """Find where a record's bytes start, after comparing its local header with the central entry."""
    name, raw = record.name, record.name.encode()
    length = LOCAL.size + len(raw)
    local = headers.read(record.header, length)
    if len(local) < length or local[:4] != SIGNATURE_LOCAL:
        raise DamagedFileError(f"The zip record {name!r} is not where the directory says (offset {record.header}).")
    _, _, flags, method, _, _, crc, compressed, size, name_length, extra_length = LOCAL.unpack_from(local)
    if local[LOCAL.size :] != raw or name_length != len(raw):
        raise _two_ways(name, "its local header has another name")
    sums = (record.crc, record.compressed, record.size)
    is_other = not flags & 8 and (crc, compressed, size) != sums and FULL_32 not in (compressed, size)
    if is_other or method != 8 * record.deflated or (flags ^ record.flags) & _ENCRYPTED:
        raise _two_ways(name, "its local header has another size or CRC-32, or says that it is packed in another way")
    record.data = record.header + length + int(extra_length)
    if record.data + record.compressed > headers.end:
        raise DamagedFileError(f"The zip record {name!r} reaches into the zip directory: the file is cut or damaged.")


def _check_names(records: list[Record]) -> None:
    """Refuse a name that two records have, by torch's rule but for arrays alone, which torch does not look up."""
    fold = str if all(record.name.endswith(".npy") for record in records) else str.casefold
    seen: dict[str, Record] = {}
    for record in records:
        if (first := seen.setdefault(fold(record.name), record)) is not record:
            what = f"Two records of the zip have one name, but for upper and lower case: {first.name!r} and {record.name!r}."
            raise DamagedFileError(what, why=TWO_FILES)


def _in_file_order(records: list[Record], directory: int) -> list[Record]:
    """The records by offset, each knowing where the next begins; DamagedFileError when two overlap."""
    ordered = sorted(records, key=lambda record: record.header)
    for record, other in zip(ordered, [*ordered[1:], None], strict=False):
        record.following = other.header if other else directory
        if record.end > record.following:
            into = repr(other.name) if other else "the zip directory"
            raise DamagedFileError(f"The zip record {record.name!r} overlaps {into}.")
    return ordered


# --- the bytes of a record


def record_content(source: Source, record: Record) -> Content:
    if record.deflated:
        return Deflated(source, record.data, record.compressed, record.size, record.crc)
    return RecordRange(source, record.data, record.size, record)


def record_head(source: Source, record: Record, length: int) -> bytes:
    packed = source.read(record.data, min(record.compressed, length))
    if not record.deflated:
        return packed
    try:
        return zlib.decompressobj(-15).decompress(packed, length)
    except zlib.error as error:
        raise DamagedFileError(f"The zip record {record.name!r} cannot be inflated.", why=f"{error}.") from None


def read_record(source: Source, record: Record, *, check: bool) -> bytes:
    check_pickle(source, record.size, deflated=record.deflated)
    data = read(record_content(source, record))
    if check and crc32(data) != record.crc:
        raise ChecksumError(
            f"The bytes of {record.name} do not match their CRC-32: the file is damaged.",
            fix=f"Get the file again, or save what is whole: {mending('repair', str(source.path))}",
        )
    return data


def check_pickle(source: Source, size: int, *, deflated: bool) -> None:
    """Refuse a deflated record that inflates to more than may be held; whoever reads what is in it counts it."""
    if deflated and size > limits.budget(source.size).room(limits.MEMORY):
        raise limits.MEMORY.error(f"A record of the zip claims {size} bytes, deflated; the file has fewer.", size)
