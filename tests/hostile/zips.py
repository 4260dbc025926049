"""A zip writer that writes what it is told, lies included: no size, name or checksum is made right by itself."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

UTF8 = 0x800


@dataclass
class Rec:
    """One record. What is None follows from `data`; a `local_...` that is None follows from the central value."""

    name: bytes
    data: bytes = b""
    method: int = 0
    flags: int = UTF8
    crc: int | None = None
    size: int | None = None
    compressed: int | None = None
    extra: bytes = b""
    attributes: int = 0
    header: int | None = None
    disk: int = 0
    listed: bool = True
    local: dict[str, Any] = field(default_factory=dict)  # overrides: name, method, flags, crc, size, compressed, extra, magic

    @property
    def sums(self) -> tuple[int, int, int]:
        """CRC-32, compressed size, size."""
        crc = zlib.crc32(self.data) if self.crc is None else self.crc
        compressed = len(self.data) if self.compressed is None else self.compressed
        return crc, compressed, len(self.data) if self.size is None else self.size


def deflated(name: bytes, data: bytes, **lies: Any) -> Rec:
    """A deflated record."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(data) + packer.flush()
    truth: dict[str, Any] = {"crc": zlib.crc32(data), "size": len(data), "compressed": len(packed)}
    return Rec(name, packed, method=8, **truth | lies)


def local_header(rec: Rec) -> bytes:
    """The header in front of the record's bytes."""
    crc, compressed, size = rec.sums
    told: dict[str, Any] = {"name": rec.name, "method": rec.method, "flags": rec.flags, "crc": crc, "size": size}
    told |= {"compressed": compressed, "extra": b"", "magic": b"PK\x03\x04"} | rec.local
    name, extra = told["name"], told["extra"]
    fields = (20, told["flags"], told["method"], 0, 0, told["crc"], told["compressed"], told["size"], len(name), len(extra))
    return struct.pack("<4s5H3I2H", told["magic"], *fields) + name + extra


def central_entry(rec: Rec, header: int) -> bytes:
    """The entry in the directory."""
    crc, compressed, size = rec.sums
    fields = (20, 20, rec.flags, rec.method, 0, 0, crc, compressed, size, len(rec.name), len(rec.extra), 0, rec.disk, 0)
    at = header if rec.header is None else rec.header
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *fields, rec.attributes, at) + rec.name + rec.extra


def end_record(count: int, size: int, start: int, comment: bytes = b"", *, disk: int = 0) -> bytes:
    """The last 22 bytes of a zip, and its comment."""
    return struct.pack("<4s4H2IH", b"PK\x05\x06", disk, disk, count, count, size, start, len(comment)) + comment


def wide_end(count: int, size: int, start: int, at: int, *, disk: int = 0, disks: int = 1) -> bytes:
    """The zip64 end record and its locator."""
    record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, disk, disk, count, count, size, start)
    return record + struct.pack("<4sIQI", b"PK\x06\x07", 0, at, disks)


def build(records: Sequence[Rec], *, comment: bytes = b"", after: bytes = b"", **lies: int) -> bytes:
    """The bytes of a zip. `lies`: count, size, start of the end record; wide_count, wide_size, wide_start of the zip64 one."""
    out, entries = bytearray(), bytearray()
    count = 0
    for rec in records:
        if rec.listed:
            entries += central_entry(rec, len(out))
            count += 1
        out += local_header(rec) + rec.data
    start, size = len(out), len(entries)
    out += entries
    if any(lie.startswith("wide") for lie in lies):
        wide = (lies.get("wide_count", count), lies.get("wide_size", size), lies.get("wide_start", start))
        out += wide_end(*wide, lies.get("wide_at", len(out)), disks=lies.get("wide_disks", 1))
    told = (lies.get("count", count), lies.get("size", size), lies.get("start", start))
    return bytes(out) + end_record(*told, comment, disk=lies.get("disk", 0)) + after


def torch_records(pickle: bytes, storages: dict[str, bytes] | None = None, *, folder: str = "archive") -> list[Rec]:
    """The records that `torch.save` writes."""
    root = folder.encode()
    data = [Rec(root + b"/data/" + key.encode(), content) for key, content in (storages or {}).items()]
    return [Rec(root + b"/data.pkl", pickle), Rec(root + b"/byteorder", b"little"), *data, Rec(root + b"/version", b"3\n")]


def torch_zip(pickle: bytes, storages: dict[str, bytes] | None = None, **more: Any) -> bytes:
    """A torch-zip around a pickle."""
    return build(torch_records(pickle, storages), **more)
