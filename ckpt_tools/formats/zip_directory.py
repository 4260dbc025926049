"""A zip's central directory, read as torch (miniz) reads it, and its records; what two readers could read apart is refused.

Python's zipfile is no way: the last duplicate wins there, CRC 0 is refused. Source: PKWARE's APPNOTE 6.3.10, section 4.3.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, ChecksumError, DamagedFileError
from ckpt_tools.io.content import CHUNK, Content, Deflated, Range, crc32, read
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Ahead, Window
from ckpt_tools.tree.findings import mending

SIGNATURE_LOCAL, SIGNATURE_CENTRAL, SIGNATURE_DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
SIGNATURE_END, SIGNATURE_END64, SIGNATURE_LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
LOCAL = Struct("<4s5H3I2H")
CENTRAL = Struct("<4s6H3I5H2I")
END = Struct("<4s4H2IH")
END64 = Struct("<4sQ2H2I4Q")
LOCATOR64 = Struct("<4sIQI")
DESCRIPTOR, DESCRIPTOR_64, ALIGNMENT = 16, 24, 64
FULL_16, FULL_32 = 0xFFFF, 0xFFFFFFFF  # what does not fit, and stands in a zip64 field
Place = tuple[int, int]  # start and size of an archive in a larger file
NUMPY = b"\x93NUMPY"


class LocalHeader(NamedTuple):
    """What stands before a record, and where its bytes begin."""

    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    name: bytes
    data: int

    @classmethod
    def at(cls, source: Source, offset: int) -> LocalHeader:
        _, _, flags, method, _, _, crc, compressed, size, named, extra = LOCAL.unpack(source.read(offset, LOCAL.size))
        name = source.read(offset + LOCAL.size, min(named, source.size - offset - LOCAL.size))
        return cls(flags, method, crc, compressed, size, name, offset + LOCAL.size + named + extra)


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """A record: where its header is and its bytes are; `line`, its entry in the directory; where what follows it begins."""

    name: str
    header: int
    size: int
    compressed: int
    crc: int
    deflated: bool
    flags: int
    line: bytes
    data: int = 0
    following: int = 0
    is_array: bool = False

    @property
    def end(self) -> int:
        return self.data + self.compressed

    @property
    def dead(self) -> int:
        """Bytes between its data descriptor and what follows that belong to no record; none when it may be padding."""
        gap = self.following - self.end - DESCRIPTOR_64
        return gap if gap >= ALIGNMENT else 0


@dataclass(slots=True, eq=False, repr=False)
class RecordRange(Range):
    """The bytes of a stored record, which may be copied together with the zip header before them."""

    record: Record


@dataclass(slots=True, eq=False, repr=False)
class Directory:
    """The records in file order, and how many bytes come after the end record."""

    records: list[Record]
    trailing: int


class MissingDirectoryError(DamagedFileError):
    """The file ends without an end record: it was cut off."""


def read_directory(whole: Source, place: Place | None = None) -> Directory:
    """The records of a zip, which may be one in a larger file, at a place: they are placed in the file then."""
    source = whole if place is None else Window(whole, *place)
    start, size, count, trailing = _read_end(source)
    limits.RECORDS.check(count, f"The zip directory lists {count} records.")
    records = _read_entries(source.read(start, size), count, start)
    _check_names(records)
    inflated = sum(record.size for record in records if record.deflated)
    what = f"The file's deflated records come to {inflated} bytes, and the file has {source.size}."
    limits.budget(source.size).take(limits.MEMORY, inflated // limits.STREAMED, what)
    _find_bytes(source, records, start)
    records.sort(key=lambda record: record.header)
    for record, other in zip(records, [*records[1:], None], strict=False):
        record.following = other.header if other else start
        if record.end > record.following:
            into = repr(other.name) if other else "the zip directory"
            raise DamagedFileError(f"The zip record {record.name!r} overlaps {into}.")
    shift = place[0] if place is not None else 0
    for record in records if shift else ():
        record.header, record.data, record.following = record.header + shift, record.data + shift, record.following + shift
    return Directory(records, trailing)


# --- the end records

_MAX_COMMENT = 65535


def _tail(source: Source) -> tuple[int, bytes]:
    """What an end record may stand in, and where that begins."""
    start = max(0, source.size - _MAX_COMMENT - END.size)
    return start, source.read(start, source.size - start)


def has_end(source: Source) -> bool:
    return SIGNATURE_END in _tail(source)[1]


def _find_end(source: Source, tail: bytes) -> tuple[int, int]:
    """Where the end record is in the last bytes of the file, and where its comment ends."""
    starts = [found.start() for found in re.finditer(SIGNATURE_END, tail[: 4 - END.size])]
    ends = [at + END.size + int.from_bytes(tail[at + 20 : at + 22], "little") for at in starts]
    if not ends:
        raise MissingDirectoryError("The zip directory at the end of the file is missing.")
    end = ends.pop()
    if (left := len(tail) - end) < 0:
        raise DamagedFileError("The zip's end record claims a comment longer than the file.")
    if any(reach == len(tail) or (left and reach > starts[-1]) for reach in ends):  # else the bytes of a tensor may look so
        raise DamagedFileError("The zip has an end record inside the comment of another.", why=TWO_FILES)
    if left and SIGNATURE_LOCAL.startswith(tail[end : end + 4]):
        raise DamagedFileError(
            "Another archive begins behind the first, and is cut off.",
            why=f"It is {left} bytes: the file is a part of a distributed checkpoint, whose folder has a .metadata.",
            fix="Get it again, or save what is whole: " + mending("repair", str(source.path), suffix=".pth"),
        )
    return starts[-1], end


def _read_end(source: Source) -> tuple[int, int, int, int]:
    """Where the directory starts, its size, how many records it lists, and how many bytes come after all."""
    base, tail = _tail(source)
    last, end = _find_end(source, tail)
    narrow = fields = END.unpack_from(tail, last)[1:7]
    directory_end, locator = base + last, base + last - LOCATOR64.size
    if locator >= 0 and source.read(locator, 4) == SIGNATURE_LOCATOR64:
        _, disk, directory_end, disks = LOCATOR64.unpack(source.read(locator, LOCATOR64.size))
        if disk or disks != 1:
            raise _one_of_several()
        wide = END64.unpack(source.read(directory_end, END64.size)) if directory_end + END64.size <= locator else (b"", 0)
        if wide[0] != SIGNATURE_END64 or directory_end + 12 + wide[1] != locator:
            raise _misplaced(f"there is no zip64 end record at {directory_end}")
        fields = wide[4:]
    full = (FULL_16,) * 4 + (FULL_32,) * 2
    if any(said not in (wide, most) for said, wide, most in zip(narrow, fields, full, strict=True)):
        raise DamagedFileError("The zip's two end records disagree: two programs would read two archives.")
    disk, first_disk, on_disk, count, size, start = fields
    if disk or first_disk or on_disk != count:
        raise _one_of_several()
    if start + size != directory_end:
        raise _misplaced(f"it should end at {start + size} and ends at {directory_end}")
    return start, size, count, len(tail) - end


def _one_of_several() -> DamagedFileError:
    return DamagedFileError("The zip is one part of several.", why="torch writes single archives.")


def _misplaced(why: str) -> DamagedFileError:
    """The directory is not where the end record says: bytes were put before or removed, or the file was damaged."""
    reason = "Bytes are missing or added before it, or several zips were put one after another (a .distcp shard)."
    return DamagedFileError(f"The zip directory is not where the file says: {why}.", why=reason)


# --- the entries of the directory, each with the local header before its record

_ENCRYPTED, _PATCHED, _STRONG, _MASKED = 1, 1 << 5, 1 << 6, 1 << 13
_ODD_FLAGS = _ENCRYPTED | _PATCHED | _STRONG | _MASKED
_ZIP64, _UNICODE_PATH = b"\1\0", b"up"  # tags of extra fields; Info-ZIP writes a name in UTF-8 in one
_NAME = re.compile(r"(?:(?!\.\.(?:/|\Z))[^/\\\0\ud800-\udfff]++(?:/|\Z))++(?<!/)")
_NEAR, _AT_ONCE = 12 << 10, 64 << 10  # reading a block takes as long as reading five headers one by one
_WITH_START = 256  # a header, the padding in front of a tensor, and the first bytes of it


def is_record_name(name: str) -> bool:
    """Whether every reader takes a name for the same: relative, UTF-8, no `..`, nothing empty, no backslash, no NUL."""
    return _NAME.fullmatch(name) is not None


def _two_ways(name: str, why: str) -> DamagedFileError:
    return DamagedFileError(f"Two programs may read the zip record {name!r} in two ways: {why}.")


def extra_fields(extra: bytes, name: str) -> dict[bytes, bytes]:
    found, at = dict[bytes, bytes](), 0
    while at < len(extra):
        tag, body = extra[at : at + 2], at + 4
        at = body + int.from_bytes(extra[at + 2 : body], "little")
        if at > len(extra) or tag in found:
            raise _two_ways(name, "an extra field is malformed, or there twice")
        found[tag] = extra[body:at]
    return found


def wide_fields(fields: Mapping[bytes, bytes], narrow: tuple[int, int, int], name: str) -> tuple[int, int, int]:
    """Size, size in the file and local header of a record; those that are too large for their places are in a zip64 field."""
    wide = fields.get(_ZIP64, b"")
    if 8 * narrow.count(FULL_32) > len(wide):
        raise _two_ways(name, "its zip64 field is too short")
    numbers = (int.from_bytes(wide[at : at + 8], "little") for at in range(0, len(wide), 8))
    size, compressed, header = (next(numbers) if value == FULL_32 else value for value in narrow)
    return size, compressed, header


def _read_entries(data: bytes, count: int, start: int) -> list[Record]:
    """The records of the central directory but for empty folders."""
    records, at, padded = list[Record](), 0, data + bytes(CENTRAL.size)
    for _ in range(count):
        entry = CENTRAL.unpack_from(padded, at)
        following = at + CENTRAL.size + entry[10] + entry[11] + entry[12]  # name, extra fields, comment
        if entry[0] != SIGNATURE_CENTRAL or following > len(data):
            what = f"The zip directory is damaged at offset {start + at}."
            raise DamagedFileError(what, why="An entry runs past its end, or it has fewer than it counts.")
        record = _record(entry, data[at:following])
        records += [record] if record is not None else []
        at = following
    if at != len(data):
        raise DamagedFileError(f"The zip directory lists more than the {count} records that the end record counts.")
    return records


def _record(entry: tuple[int, ...], line: bytes) -> Record | None:
    """The record of an entry, unless that is an empty folder."""
    (_, _, _, flags, method, _, _, crc, compressed, size, name_length, extra_length, _, disk, _, attributes, header) = entry
    name_end = CENTRAL.size + name_length
    raw, extra = line[CENTRAL.size : name_end], line[name_end : name_end + extra_length]
    name = raw.decode("utf-8", "surrogateescape")  # only ever looked up, never used as a path
    if _NAME.fullmatch(name.removesuffix("/")) is None:
        raise DamagedFileError(f"The zip record name {name!r} is not one that torch writes.")
    if extra:
        fields = extra_fields(extra, name)
        size, compressed, header = wide_fields(fields, (size, compressed, header), name)
        if _UNICODE_PATH in fields and fields[_UNICODE_PATH][5:] != raw:
            raise _two_ways(name, "an extra field calls it otherwise")
    if disk:  # 0xFFFF ("see the zip64 field") too: torch refuses it
        raise _one_of_several()
    if name.endswith("/") or attributes & 0x10:
        if size or compressed or not name.endswith("/"):  # a name like any other to torch, which finds it, and empty
            raise _two_ways(name, "it is marked as a folder, and has data or no name of one")
        return None
    if flags & _ODD_FLAGS or method not in (0, 8):
        what = f"The zip record {name!r} is encrypted, or compressed otherwise than by deflate."
        raise DamagedFileError(what, why=f"torch cannot read it (flags {flags:#06x}, method {method}).")
    if not method and size != compressed:
        raise _two_ways(name, "it is stored with two sizes")
    return Record(name, header, size, compressed, crc, method == 8, flags, line)


def _check_names(records: list[Record]) -> None:
    """Refuse a name that two records have, by torch's rule but for arrays alone, which torch does not look up."""
    fold = str if all(record.name.endswith(".npy") for record in records) else str.casefold
    seen: dict[str, Record] = {}
    for record in records:
        if (first := seen.setdefault(fold(record.name), record)) is not record:
            what = f"Two records of the zip have one name, but for upper and lower case: {first.name!r} and {record.name!r}."
            raise DamagedFileError(what, why=TWO_FILES)


def _find_bytes(source: Source, records: list[Record], end: int) -> None:
    """Find where the bytes of records start, after comparing each local header with the directory."""
    if source.fd < 0:
        source.prefetch([(record.header, max(LOCAL.size + len(record.name), _WITH_START)) for record in records])
    is_near = source.fd >= 0 and end < _NEAR * len(records)  # as between small tensors
    headers = Ahead(source, end, _AT_ONCE if is_near else _WITH_START)
    for record in records:
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
        record.is_array = record.deflated or headers.read(record.data, len(NUMPY)) == NUMPY


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


# --- damaged files


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
PROGRAM = (  # in the names of TorchScript's records, and of exported programs, of torch 2.7 on and before
    rb"/code/|/constants\.pkl|/archive_format|/models/[^/]+\.json|/data/(?:weights|constants|sample_inputs|aotinductor)/"
    rb"|\bserialized_(?:exported_program|state_dict)"
)
_NOT_MENDED = re.compile(rb"(?s)PK\x03\x04.{26}[^\0]{0,300}?(?:" + PROGRAM + rb"|\.npy)")


def is_mended(source: Source) -> bool:
    """Whether `ckpt repair` may take a damaged zip: one of torch's, and no program."""
    data = source.read(0, min(_SEARCHED, source.size))
    no_pickle = SIGNATURE_LOCAL in data and source.size <= _SEARCHED and b"data.pkl" not in data
    return not no_pickle and _NOT_MENDED.search(data) is None
