"""Find the records of a damaged zip by their signatures, and prove each by a CRC-32.

torch's local headers say no sizes: those follow the bytes, in a descriptor that names the distance back to the first of them,
and a CRC-32; what is left of the directory says both once more. No signature is believed by itself: a storage may hold any
bytes, a whole zip too. No checksum covers a name: where the directory has it elsewhere, with other bytes, it is damaged.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.9 (data descriptor), 4.3.12 (central directory).
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError
from ckpt_tools.formats.zip_directory import (
    ALIGNMENT,
    CENTRAL,
    DESCRIPTOR,
    DESCRIPTOR_64,
    LOCAL,
    SIGNATURE_CENTRAL,
    SIGNATURE_DESCRIPTOR,
    SIGNATURE_LOCAL,
    LocalHeader,
    extra_fields,
    signatures,
    wide_fields,
)
from ckpt_tools.io.content import Content, Deflated, Range, chunks, crc32
from ckpt_tools.io.source import Source
from ckpt_tools.operations.repair.flipped_bits import LONGEST, MOST, flipped_back, flipped_bit

_HAS_DESCRIPTOR, _DEFLATED = 8, 8
_LONGEST_NAME = 4096
Proof = Literal["directory", "descriptor", "header", "size", "flipped bit", ""]
_RANKS: dict[Proof, int] = {"directory": 3, "descriptor": 2, "header": 2, "size": 2, "flipped bit": 1, "": 0}


@dataclass(frozen=True, slots=True)
class Claim:
    """What one place says of a record: its size in the file, its size, its CRC-32, its local header; and where it says so."""

    proof: Proof
    compressed: int
    size: int
    crc: int
    header: int = -1
    at: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A record. `proof` says what proved it; empty for one that nothing proves, whose `size` may be unknown (None)."""

    name: str
    header: int
    data: int
    compressed: int
    size: int | None
    deflated: bool
    proof: Proof = ""
    crc: int = 0
    bit: int = -1

    @property
    def end(self) -> int:
        return self.data + self.compressed

    @property
    def rank(self) -> int:
        return _RANKS[self.proof]

    def content(self, source: Source) -> Content:
        if self.deflated:
            return Deflated(source, self.data, self.compressed, self.size or 0, self.crc if self.proof else 0)
        whole = Range(source, self.data, self.compressed)
        return flipped_back(whole, self.bit) if self.proof == "flipped bit" else whole

    def follows(self, before: Found) -> bool:
        """Whether it stands right behind another whose size is known."""
        return before.size is not None and self.header - before.end in (0, DESCRIPTOR, DESCRIPTOR_64)


class Walk:
    """The records that a file still shows, in file order; a name may come twice."""

    def __init__(self, source: Source) -> None:
        self.source = source
        places: dict[bytes, list[int]] = {SIGNATURE_LOCAL: [], SIGNATURE_DESCRIPTOR: [], SIGNATURE_CENTRAL: []}
        for signature, at in signatures(source, *places):
            places[signature].append(at)
            limits.RECORDS.check(len(places[signature]), "The file holds more zip signatures than any checkpoint.")
        self.directory = _centrals(source, places[SIGNATURE_CENTRAL])
        self.descriptors = _descriptors(source, places[SIGNATURE_DESCRIPTOR])
        claims = [claim for rows in (*self.directory.values(), *self.descriptors.values()) for claim in rows if claim.size]
        self.has_checksums = not claims or any(claim.crc for claim in claims)
        self.records: list[Found] = []
        self.tried = 0  # records in which a flipped bit was looked for
        self.read = 0  # a file of nothing but headers could ask for each byte many times
        headers, end = places[SIGNATURE_LOCAL], 0
        for at, following in zip(headers, [*headers[1:], source.size], strict=False):
            if at >= end and (found := self._record(at, following)) is not None:
                self.records.append(found)
                end = found.end if found.proof or self._is_in_its_place(found) else end
        self._add_headerless()
        self.records.sort(key=lambda found: found.header)
        self.inside = sorted((found.data, found.end) for found in self.records if found.proof)
        kept = {name: [row for row in rows if not self.is_inside(row.at)] for name, rows in self.directory.items()}
        self.directory = {name: rows for name, rows in kept.items() if rows}
        self.records = [self._compared(found) if self.contradicts(found) else found for found in self.records]

    def is_inside(self, at: int) -> bool:
        """Whether an offset lies in the bytes of a record that is proved."""
        before = bisect.bisect_right(self.inside, (at, self.source.size)) - 1
        return before >= 0 and at < self.inside[before][1]

    def contradicts(self, found: Found) -> bool:
        """Whether the directory has the record's name, and other bytes for it."""
        claims = self.directory.get(found.name, [])
        return bool(claims) and all((claim.crc, claim.size) != (found.crc, found.size) for claim in claims)

    def _compared(self, found: Found) -> Found:
        """A record of which the directory says other bytes: its CRC-32 is damaged there, or the name here, or two wrote."""
        sums = [claim.crc for claim in self.directory[found.name] if claim.size == found.size and not found.deflated]
        if found.proof and any((crc ^ found.crc).bit_count() == 1 for crc in sums):
            return dataclasses.replace(found, proof="flipped bit")
        return found if self._is_listed(found) else dataclasses.replace(found, proof="")

    def _is_listed(self, found: Found) -> bool:
        return any(claim.header == found.header for claim in self.directory.get(found.name, ()))

    def _is_in_its_place(self, found: Found) -> bool:
        """Whether a damaged record is where the directory has it, and as long."""
        return self._is_listed(found) and found.size is not None and self._ends(found)

    def _record(self, at: int, following: int) -> Found | None:
        """The record of the local header at an offset; `following` is the next header's."""
        if at + LOCAL.size > self.source.size:
            return None
        header = LocalHeader.at(self.source, at)
        data, deflated = header.data, header.method == _DEFLATED
        if header.method not in (0, _DEFLATED) or len(header.name) > _LONGEST_NAME or data > self.source.size:
            return None
        if (name := _name(header.name)) is None:
            return None
        claims = [*self.directory.get(name, []), *self.descriptors.get(data, [])]
        if not header.flags & _HAS_DESCRIPTOR:
            claims.append(Claim("header", header.compressed, header.size, header.crc))
        if data <= following:  # else the bytes are another record's: a damaged length of the extra field leads there
            found = self._proved(name, at, data, deflated, claims) or self._mended(name, at, data, claims)
            if found is not None:
                return found
        size_in_file = min(claims[0].compressed, self.source.size - data) if claims else max(0, following - data)
        size, crc = (claims[0].size, claims[0].crc) if claims else (None, 0)
        return Found(name, at, data, size_in_file, size, deflated, crc=crc)

    def _add_headerless(self) -> None:
        """Records in the directory whose local header is gone: where the directory has it, or behind a record that is whole."""
        proved = [found for found in self.records if found.proof]
        ends = [found.end + DESCRIPTOR for found in proved] if self.has_checksums else []
        taken = set() if self.has_checksums else {found.data for found in proved}
        known = {found.name for found in proved}
        added: list[Found] = []
        for name, claims in self.directory.items():
            stored = [claim for claim in claims if claim.size == claim.compressed]
            for header in (*(claim.header for claim in stored), *ends) if name not in known else ():
                start = header + LOCAL.size + len(name.encode()) + 4
                found = self._proved(name, header, start + -start % ALIGNMENT, False, stored)
                if found is not None and found.data not in taken:
                    added.append(found)
                    break
        again = {found.header for found in added}
        self.records = [found for found in self.records if found.proof or found.header not in again] + added

    def _proved(self, name: str, header: int, data: int, deflated: bool, claims: Sequence[Claim]) -> Found | None:
        """The record, if one of the claims is true."""
        sums: dict[tuple[int, int], int | None] = {}
        for claim in claims:
            if data + claim.compressed > self.source.size or (not deflated and claim.size != claim.compressed):
                continue
            found = Found(name, header, data, claim.compressed, claim.size, deflated, claim.proof, claim.crc)
            if not self.has_checksums and claim.size:
                if self._ends(found):
                    return dataclasses.replace(found, proof="size")
                continue
            lengths = claim.compressed, claim.size
            if lengths not in sums:
                sums[lengths] = self.sum(found)
            if sums[lengths] == claim.crc:
                return found
        return None

    def _ends(self, found: Found) -> bool:
        """Whether a record has the size that is claimed: what comes behind the bytes stands there."""
        if any(claim.compressed == found.compressed for claim in self.descriptors.get(found.data, ())):
            return True
        return self.source.read(found.end, min(4, self.source.size - found.end)) in (SIGNATURE_LOCAL, SIGNATURE_CENTRAL)

    def _mended(self, name: str, header: int, data: int, claims: Sequence[Claim]) -> Found | None:
        """The record, if with one bit flipped back one of the claims is true."""
        for claim in claims if self.has_checksums else ():
            if claim.size != claim.compressed or not 0 < claim.size <= LONGEST or data + claim.size > self.source.size:
                continue
            found = Found(name, header, data, claim.size, claim.size, False, "", claim.crc)
            crc, self.tried = self.sum(found), self.tried + 1
            bit = flipped_bit(crc, claim.crc, claim.size) if crc is not None and self.tried <= MOST else None
            if bit is not None:
                return dataclasses.replace(found, proof="flipped bit", bit=bit)
        return None

    def sum(self, found: Found) -> int | None:
        """The CRC-32 of a record's bytes; None when they cannot be inflated."""
        self.read += found.compressed + (found.size or 0 if found.deflated else 0)
        what = "The zip's records overlap so often that proving them would take many times the file."
        limits.MEMORY.check(self.read // limits.STREAMED, what, self.source.size)
        value = 0
        try:
            for chunk in chunks(dataclasses.replace(found, proof="").content(self.source)):
                value = crc32(chunk, value)
        except DamagedFileError:
            return None
        return value


def _centrals(source: Source, places: Sequence[int]) -> dict[str, list[Claim]]:
    """What is left of the central directory: name -> what it says about the record."""
    found: dict[str, list[Claim]] = {}
    for at in places:
        raw = source.read(at, min(CENTRAL.size + _LONGEST_NAME, source.size - at))
        if len(raw) < CENTRAL.size:
            continue
        _, _, _, _, _, _, _, crc, compressed, size, name_length, extra_length, *_, header = CENTRAL.unpack_from(raw)
        name_end = CENTRAL.size + name_length
        name = _name(raw[CENTRAL.size : name_end])
        if name is None:
            continue
        with contextlib.suppress(DamagedFileError):  # a damaged extra field: sizes that nothing proves
            fields = extra_fields(raw[name_end : name_end + extra_length], name)
            size, compressed, header = wide_fields(fields, (size, compressed, header), name)
        found.setdefault(name, []).append(Claim("directory", compressed, size, crc, header, at))
    return found


def _name(raw: bytes) -> str | None:
    """A record name as torch writes them; None for bytes that are not one."""
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return name if name and name.isprintable() else None


def _descriptors(source: Source, places: Sequence[int]) -> dict[int, list[Claim]]:
    """Where the bytes before a data descriptor begin, as it says -> what it says; with sizes of 32 and of 64 bits."""
    found: dict[int, list[Claim]] = {}
    for at in places:
        raw = source.read(at, min(24, source.size - at))
        crc = int.from_bytes(raw[4:8], "little")
        for width in (4, 8):
            compressed, size = (int.from_bytes(raw[8 + width * i : 8 + width * (i + 1)], "little") for i in (0, 1))
            if len(raw) >= 8 + 2 * width and compressed <= at:
                found.setdefault(at - compressed, []).append(Claim("descriptor", compressed, size, crc))
    return found


def by_name(records: Iterable[Found]) -> dict[str, Found]:
    """One record for each name: the last of those that are proved best."""
    chosen: dict[str, Found] = {}
    for found in records:
        if found.rank >= chosen.get(found.name, found).rank:
            chosen[found.name] = found
    return chosen


def ambiguous(records: Iterable[Found], chosen: dict[str, Found]) -> Iterator[str]:
    """The names of which two records are proved alike, and have different bytes (without checksums: lie elsewhere)."""
    for found in records:
        other = chosen[found.name]
        apart = found.proof == "size" and found.data != other.data
        if found.proof and found.rank == other.rank and ((found.crc, found.size) != (other.crc, other.size) or apart):
            yield found.name


def pickles_of(records: Sequence[Found]) -> list[Found]:
    """The records that may be the pickle which lists the tensors; of two names for the same bytes that in the usual folder."""
    folders = Counter(found.name.partition("/")[0] for found in records)
    chosen: dict[int, Found] = {}
    for found in records:
        if found.name.endswith("/data.pkl"):
            chosen[found.data] = max(
                chosen.get(found.data, found), found, key=lambda one: (bool(one.proof), folders[one.name.partition("/")[0]])
            )
    return list(chosen.values())
