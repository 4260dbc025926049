"""What stands in a zip before and behind the bytes of its records, and where.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.9 (data descriptor), 4.3.12 (central directory),
4.3.14 and 4.3.15 (zip64 end), 4.3.16 (end).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from struct import Struct
from typing import NamedTuple

from ckpt_tools.errors import TWO_FILES, DamagedFileError
from ckpt_tools.io.content import CHUNK
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window

SIGNATURE_LOCAL, SIGNATURE_CENTRAL, SIGNATURE_DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
LOCAL = Struct("<4s5H3I2H")
CENTRAL = Struct("<4s6H3I5H2I")
END = Struct("<4s4H2IH")
END64 = Struct("<4sQ2H2I4Q")
LOCATOR64 = Struct("<4sIQI")
DESCRIPTOR, DESCRIPTOR_64, ALIGNMENT = 16, 24, 64
FULL_16, FULL_32 = 0xFFFF, 0xFFFFFFFF  # what does not fit, and stands in a zip64 field


class LocalHeader(NamedTuple):
    """What stands before a record's name, extra field and bytes."""

    signature: bytes
    needs: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    compressed: int
    size: int
    name_length: int
    extra_length: int

    @classmethod
    def at(cls, source: Source, offset: int) -> LocalHeader:
        """The header at an offset; the file must be as long."""
        return cls._make(LOCAL.unpack(source.read(offset, LOCAL.size)))

    @property
    def length(self) -> int:
        """How far behind its own start the record's bytes begin."""
        return LOCAL.size + self.name_length + self.extra_length


class CentralEntry(NamedTuple):
    """What the central directory says of a record, before its name, extra field and comment."""

    signature: bytes
    made_by: int
    needs: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    compressed: int
    size: int
    name_length: int
    extra_length: int
    comment_length: int
    disk: int
    internal: int
    attributes: int
    header: int

    @classmethod
    def of(cls, data: bytes, at: int = 0) -> CentralEntry:
        """The entry that stands there."""
        return cls._make(CENTRAL.unpack_from(data, at))


def zip64_fields(extra: bytes, size: int, compressed: int, header: int, name: str) -> tuple[int, int, int]:
    """Sizes and offset with those that do not fit 32 bits taken from the zip64 extra field."""
    bodies = [body for tag, body in _extra_fields(extra, name) if tag == 1]
    if len(bodies) > 1:
        raise DamagedFileError(f"The zip record {name!r} has two zip64 fields.", why=TWO_FILES)
    if not bodies:
        return size, compressed, header
    values = [int.from_bytes(bodies[0][i : i + 8], "little") for i in range(0, len(bodies[0]) - 7, 8)]
    narrow = (size, compressed, header)
    if narrow.count(FULL_32) > len(values):
        raise DamagedFileError(f"The zip64 field of record {name!r} is too short.")
    wide = iter(values)
    size, compressed, header = (next(wide) if value == FULL_32 else value for value in narrow)
    return size, compressed, header


UNICODE_PATH = b"up"  # the tag of the field with a name in UTF-8, which Info-ZIP writes


def check_unicode_name(extra: bytes, raw: bytes, name: str) -> None:
    """Raise DamagedFileError where an extra field gives a record another name than its entry does."""
    for tag, body in _extra_fields(extra, name):
        if tag == int.from_bytes(UNICODE_PATH, "little") and body[5:] != raw:
            raise DamagedFileError(
                f"The zip record {name!r} has another name in an extra field, {body[5:105]!r}.",
                why="unzip and Python since 3.12 take that one, others the first.",
            )


def _extra_fields(extra: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(extra):
        length = int.from_bytes(extra[at + 2 : at + 4], "little")
        if at + 4 + length > len(extra):
            raise DamagedFileError(f"An extra field of zip record {name!r} is malformed.")
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
PROGRAM = re.compile(
    r"/code/|/constants\.pkl$|/archive_format$"  # TorchScript, and exported programs, of torch 2.7 on and before
    r"|/models/[^/]+\.json$|/data/(weights|constants|sample_inputs|aotinductor)/|^serialized_(exported_program|state_dict)"
)
_ARRAY = re.compile(r"\.npy$")


def is_mended(source: Source) -> bool:
    """Whether `ckpt repair` may take a damaged zip:"""
    head = Window(source, 0, min(_SEARCHED, source.size))
    data = head.read(0, head.size)
    if SIGNATURE_LOCAL in data and source.size <= _SEARCHED and b"data.pkl" not in data:
        return False
    for _, at in islice(signatures(head, SIGNATURE_LOCAL), _NAMES):
        start = at + LOCAL.size
        if start > head.size:
            break
        name = data[start : start + LocalHeader.at(head, at).name_length].decode(errors="replace")
        if PROGRAM.search(name) or _ARRAY.search(name):
            return False
    return True
