"""Find the records of a damaged zip by their signatures, and prove each by a CRC-32.

A record begins with a local header. torch's say no sizes: those follow the bytes, in a data descriptor that names the
distance back to its record's first byte, and a CRC-32. What is left of the central directory says both once more. A record is
proved when the bytes between give one of those CRC-32s, so no signature is believed by itself: a storage may hold any bytes,
a whole zip too. No checksum covers a name: where the directory says other bytes of a name, and has it elsewhere, it is damaged.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.9 (data descriptor), 4.3.12 (central directory).
"""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    signatures,
    zip64_fields,
)
from ckpt_tools.io.content import Content, Deflated, Range, chunks, crc32
from ckpt_tools.io.output import Source
from ckpt_tools.operations.repair.flipped_bits import LONGEST, FlippedBits, flipped_back

CentralEntry = namedtuple(  # what a directory says of a record before its name
    "CentralEntry",
    "signature made_by needs flags method time date crc compressed size name_length extra_length comment_length disk internal "
    "attributes header",
)
_HAS_DESCRIPTOR, _DEFLATED = 8, 8
_LONGEST_NAME = 4096
Proof = Literal["directory", "descriptor", "header", "size", "flipped bit", ""]


@dataclass(frozen=True, slots=True)
class Claim:
    """What one place says about a record: its size in the file, its size, its CRC-32, and where its local header should be."""

    proof: Proof
    compressed: int
    size: int
    crc: int
    header: int = 0
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
    proof: Proof
    crc: int = 0
    bit: int = -1

    def content(self, source: Source) -> Content:
        """Its bytes."""
        if self.deflated:
            return Deflated(source, self.data, self.compressed, self.size or 0, self.crc)
        whole = Range(source, self.data, self.compressed)
        return flipped_back(whole, self.bit) if self.proof == "flipped bit" else whole


@dataclass(slots=True)
class Walked:
    """The records of a file, in file order; a name may come twice. `has_checksums`: whether any place names a CRC-32."""

    records: list[Found] = field(default_factory=list)
    has_checksums: bool = True
    directory: dict[str, list[Claim]] = field(default_factory=dict)

    def contradicts(self, found: Found) -> bool:
        """Whether the directory has the record's name, and other bytes for it."""
        claims = self.directory.get(found.name, [])
        return bool(claims) and all((claim.crc, claim.size) != (found.crc, found.size) for claim in claims)


def walk_zip(source: Source) -> Walked:
    """Every record that the file still shows."""
    places = _signatures(source)
    centrals = _centrals(source, places[SIGNATURE_CENTRAL])
    descriptors = _descriptors(source, places[SIGNATURE_DESCRIPTOR])
    claims = [claim for rows in (*centrals.values(), *descriptors.values()) for claim in rows if claim.size]
    walk = _Walk(source, centrals, descriptors, not claims or any(claim.crc for claim in claims))
    headers = places[SIGNATURE_LOCAL]
    for at, following in zip(headers, [*headers[1:], source.size], strict=False):
        walk.add(at, following)
    walk.add_headerless(centrals)
    walk.records.sort(key=lambda found: found.header)
    return Walked(walk.records, walk.has_checksums, _outside(walk.records, centrals))


def _signatures(source: Source) -> dict[bytes, list[int]]:
    """The offsets of the three signatures, wherever they are."""
    found: dict[bytes, list[int]] = {SIGNATURE_LOCAL: [], SIGNATURE_DESCRIPTOR: [], SIGNATURE_CENTRAL: []}
    for signature, at in signatures(source, *found):
        found[signature].append(at)
        limits.RECORDS.check(len(found[signature]), "The file holds more zip signatures than any checkpoint.")
    return found


def _centrals(source: Source, places: Sequence[int]) -> dict[str, list[Claim]]:
    """What is left of the central directory: name -> what it says about the record."""
    found: dict[str, list[Claim]] = {}
    for at in places:
        raw = source.read(at, min(CENTRAL.size + _LONGEST_NAME, source.size - at))
        if len(raw) < CENTRAL.size:
            continue
        entry = CentralEntry._make(CENTRAL.unpack_from(raw))
        name_end = CENTRAL.size + entry.name_length
        name = _name(raw[CENTRAL.size : name_end])
        if name is None:
            continue
        size, compressed, header = entry.size, entry.compressed, entry.header
        with contextlib.suppress(DamagedFileError):  # a damaged extra field: sizes that nothing proves
            size, compressed, header = zip64_fields(
                raw[name_end : name_end + entry.extra_length], size, compressed, header, name
            )
        found.setdefault(name, []).append(Claim("directory", compressed, size, entry.crc, header, at))
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


class _Walk:
    """The records found so far; `end` is where the last proved one ends: what lies inside it is its own bytes."""

    def __init__(
        self, source: Source, centrals: Mapping[str, list[Claim]], descriptors: Mapping[int, list[Claim]], has_checksums: bool
    ) -> None:
        self.source, self.centrals, self.descriptors = source, centrals, descriptors
        self.has_checksums = has_checksums
        self.records: list[Found] = []
        self.flipped = FlippedBits()
        self.end = 0
        self.read = 0  # a file of nothing but headers could ask for each byte many times

    def add(self, at: int, following: int) -> None:
        """The record of the local header at an offset; `following` is the next header's."""
        if at < self.end or at + LOCAL.size > self.source.size:
            return
        header = LocalHeader.at(self.source, at)
        data, deflated = at + header.length, header.method == _DEFLATED
        if header.method not in (0, _DEFLATED) or header.name_length > _LONGEST_NAME or data > self.source.size:
            return
        name = _name(self.source.read(at + LOCAL.size, header.name_length))
        if name is None:
            return
        claims = [*self.centrals.get(name, []), *self.descriptors.get(data, [])]
        if not header.flags & _HAS_DESCRIPTOR:
            claims.append(Claim("header", header.compressed, header.size, header.crc))
        found = None
        if data <= following:  # else the bytes are another record's: a damaged length of the extra field leads there
            found = self.proved(name, at, data, deflated, claims) or self.mended(name, at, data, claims)
        if found is None:
            size_in_file = min(claims[0].compressed, self.source.size - data) if claims else max(0, following - data)
            size, crc = (claims[0].size, claims[0].crc) if claims else (None, 0)
            found = Found(name, at, data, size_in_file, size, deflated, "", crc)
        else:
            self.end = found.data + found.compressed
        self.records.append(found)

    def add_headerless(self, centrals: Mapping[str, list[Claim]]) -> None:
        """Records in the directory whose local header is gone: where the directory has it, or behind a record that is whole."""
        proved = [found for found in self.records if found.proof]
        ends = [found.data + found.compressed + DESCRIPTOR for found in proved] if self.has_checksums else []
        taken = set() if self.has_checksums else {found.data for found in proved}
        known = {found.name for found in proved}
        added: list[Found] = []
        for name, claims in centrals.items():
            stored = [claim for claim in claims if claim.size == claim.compressed]
            for header in (*(claim.header for claim in stored), *ends) if name not in known else ():
                start = header + LOCAL.size + len(name.encode()) + 4
                found = self.proved(name, header, start + -start % ALIGNMENT, False, stored)
                if found is not None and found.data not in taken:
                    added.append(found)
                    break
        again = {found.header for found in added}
        self.records = [found for found in self.records if found.proof or found.header not in again] + added

    def proved(self, name: str, header: int, data: int, deflated: bool, claims: Sequence[Claim]) -> Found | None:
        """The record, if one of the claims is true."""
        sums: dict[tuple[int, int], int | None] = {}
        for claim in claims:
            if data + claim.compressed > self.source.size or (not deflated and claim.size != claim.compressed):
                continue
            found = Found(name, header, data, claim.compressed, claim.size, deflated, claim.proof, claim.crc)
            if not self.has_checksums and claim.size:
                if self.ends(found):
                    return replace(found, proof="size")
                continue
            lengths = claim.compressed, claim.size
            if lengths not in sums:
                sums[lengths] = self.crc(found)
            if sums[lengths] == claim.crc:
                return found
        return None

    def ends(self, found: Found) -> bool:
        """Whether a record without a checksum has the size that is claimed: what comes behind the bytes stands there."""
        if any(claim.compressed == found.compressed for claim in self.descriptors.get(found.data, ())):
            return True
        end = found.data + found.compressed
        return self.source.read(end, min(4, self.source.size - end)) in (SIGNATURE_LOCAL, SIGNATURE_CENTRAL)

    def mended(self, name: str, header: int, data: int, claims: Sequence[Claim]) -> Found | None:
        """The record, if with one bit flipped back one of the claims is true."""
        for claim in claims if self.has_checksums else ():
            if claim.size != claim.compressed or not 0 < claim.size <= LONGEST or data + claim.size > self.source.size:
                continue
            found = Found(name, header, data, claim.size, claim.size, False, "", claim.crc)
            crc = self.crc(found)
            bit = self.flipped.find(crc, claim.crc, claim.size) if crc is not None else None
            if bit is not None:
                return replace(found, proof="flipped bit", bit=bit)
        return None

    def crc(self, found: Found) -> int | None:
        """The CRC-32 of a record's bytes; None when they cannot be inflated."""
        self.read += found.compressed + (found.size or 0 if found.deflated else 0)
        what = "The zip's records overlap so often that proving them would take many times the file."
        limits.MEMORY.check(self.read // limits.STREAMED, what, self.source.size)
        value = 0
        try:
            for chunk in chunks(found.content(self.source)):
                value = crc32(chunk, value)
        except DamagedFileError:
            return None
        return value


def _outside(records: Sequence[Found], centrals: Mapping[str, list[Claim]]) -> dict[str, list[Claim]]:
    """What the directory says, without the entries of a zip that is a record's bytes."""
    inside = sorted((found.data, found.data + found.compressed) for found in records if found.proof)

    def is_outside(claim: Claim) -> bool:
        before = bisect.bisect_right(inside, (claim.at, len(inside) and inside[-1][1])) - 1
        return before < 0 or inside[before][1] <= claim.at

    kept = {name: [claim for claim in claims if is_outside(claim)] for name, claims in centrals.items()}
    return {name: claims for name, claims in kept.items() if claims}


def without_contradicted(walked: Walked) -> Walked:
    """The records of one archive, with no proof for those that have the name of another."""

    def is_right(found: Found) -> bool:
        claims = walked.directory.get(found.name, [])
        return not walked.contradicts(found) or any(claim.header == found.header for claim in claims)

    return replace(walked, records=[found if is_right(found) else replace(found, proof="") for found in walked.records])


def by_name(records: Sequence[Found]) -> dict[str, Found]:
    """One record for each name: of several the last that the directory proves, else the last that is proved, else the last."""
    chosen: dict[str, Found] = {}
    for found in records:
        other = chosen.get(found.name)
        if other is None or _rank(found) >= _rank(other):
            chosen[found.name] = found
    return chosen


def ambiguous(records: Sequence[Found]) -> set[str]:
    """The names of which two records are proved alike, and have different bytes."""
    chosen = by_name(records)
    rivals = (found for found in records if found.proof and _rank(found) == _rank(chosen[found.name]))
    return {found.name for found in rivals if _bytes(found) != _bytes(chosen[found.name])}


def _bytes(found: Found) -> tuple[int, int | None, int]:
    """What tells a record's bytes from others; without a checksum where they lie."""
    return found.crc, found.size, found.data if found.proof == "size" else 0


def _rank(found: Found) -> int:
    return 3 if found.proof == "directory" else 1 if found.proof == "flipped bit" else 2 if found.proof else 0


def follows(found: Found, before: Found) -> bool:
    """Whether a record stands right behind another whose size is known."""
    end = before.data + before.compressed
    return before.size is not None and found.header - end in (0, DESCRIPTOR, DESCRIPTOR_64)


def pickles_of(records: Sequence[Found]) -> list[Found]:
    """The records that may be the pickle which lists the tensors; of two names for the same bytes that in the usual folder."""
    folders = Counter(found.name.partition("/")[0] for found in records)
    chosen: dict[int, Found] = {}

    def weight(found: Found) -> tuple[bool, int]:
        return bool(found.proof), folders[found.name.partition("/")[0]]

    for found in records:
        if found.name.endswith("/data.pkl"):
            chosen[found.data] = max(chosen.get(found.data, found), found, key=weight)
    return list(chosen.values())
