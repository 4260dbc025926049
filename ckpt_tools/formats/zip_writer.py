"""Lay out a torch-zip as torch's miniz writes it: stored records, sizes in a descriptor behind the bytes, zip64 end records.

The tree goes as a pickle; storages are copied with their headers in runs, where they were if they can stay there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from ckpt_tools.errors import TensorError
from ckpt_tools.formats import zip_directory as zips
from ckpt_tools.formats.base import repeated
from ckpt_tools.formats.zip_directory import Record, RecordRange, is_record_name
from ckpt_tools.io.content import CHUNK, Checksum, Computed, Content, Late, Literal, Piece, Range
from ckpt_tools.io.source import Source
from ckpt_tools.pickling.writer import Survey, write_pickle
from ckpt_tools.tree.nodes import Node, Storage

_FLAGS = 0x0808  # UTF-8 names, and a data descriptor after the bytes
_SMALL_GAP = 4096  # storages keep their offsets when that leaves a gap of at most so many bytes before them, or a 64th of all
_Small = list[tuple[str, Content]]


def lay_out(root: Node, *, folder: str = "archive", trust_crc: bool = True) -> list[Piece]:
    survey = Survey(root)
    for storage in survey.storages:
        if not storage.key.isalnum() and not is_record_name(f"data/{storage.key}"):
            raise TensorError(f"A storage has the key {storage.key!r}, which cannot name a record.")
    if (twice := repeated((storage.key, storage) for storage in survey.storages)) is not None:
        raise TensorError(f"Two storages have the key {twice!r}.")
    storages = _in_source_order(survey.storages)
    layout = _Layout(folder)
    head: _Small = [("data.pkl", Literal(write_pickle(root, survey))), ("byteorder", Literal(b"little"))]
    tail: _Small = [("version", Literal(b"3\n"))]
    first = layout.whole(storages[0]) if storages and trust_crc else None
    anchor = 0 if first is None else first.record.header
    if layout.room(head) > anchor >= layout.room(head[1:]):
        tail.insert(0, head.pop(0))  # the pickle has grown: it goes behind the storages, which stay
    for name, content in head:
        layout.add(name, content, align=name == "data.pkl")
    if 0 <= anchor - layout.position <= max(_SMALL_GAP, sum(storage.nbytes for storage in storages) // 64):
        layout.pad(anchor - layout.position)
    for storage in storages:
        content = storage.content
        if trust_crc and (whole := layout.whole(storage)) is not None:
            layout.copy(whole.source, whole.record)
        else:  # a file may have no CRC-32
            crc = content.record.crc or None if trust_crc and type(content) is RecordRange else None
            layout.add(f"data/{storage.key}", content, align=True, crc=crc)
    for name, content in tail:
        layout.add(name, content, align=name == "data.pkl")
    return layout.finish()


def _in_source_order(storages: list[Storage]) -> list[Storage]:
    sources: dict[int, int] = {}

    def place(storage: Storage) -> tuple[int, int, int, str]:
        if isinstance(storage.content, RecordRange):
            source = sources.setdefault(id(storage.content.source), len(sources))
            return 0, source, storage.content.record.header, ""
        return 1, 0, int(storage.key) if storage.key.isdecimal() and len(storage.key) < 20 else 0, storage.key

    return sorted(storages, key=place)


class _Layout:
    """Records under one root folder, one after another, then the directory. `position` is where the next one goes."""

    def __init__(self, folder: str) -> None:
        self.folder, self.position = folder, 0
        self.pieces: list[Piece] = []
        self.lines: list[bytes | Callable[[], bytes]] = []  # of the directory; some hold a checksum that is not known yet
        self.length = 0  # of the directory

    def room(self, records: Iterable[tuple[str, Content]]) -> int:
        fixed = zips.LOCAL.size + len(self.folder) + 1 + 20 + 4 + zips.ALIGNMENT + zips.DESCRIPTOR_64
        return sum(fixed + len(name.encode()) + content.length for name, content in records)

    def put(self, content: Content | Late, checksum: Checksum | None = None) -> None:
        self.position += content.length
        self.pieces.append(Piece(content, checksum))

    def pad(self, count: int) -> None:
        if count:
            self.put(Computed(count, lambda: (bytes(min(CHUNK, count - at)) for at in range(0, count, CHUNK))))

    def whole(self, storage: Storage) -> RecordRange | None:
        """The record of a storage, if it can be copied with its header and descriptor: of this name, and aligned."""
        content = storage.content
        if type(content) is not RecordRange or content.record.data % zips.ALIGNMENT:
            return None
        return content if content.record.name == f"{self.folder}/data/{storage.key}" else None

    def copy(self, source: Source, record: Record) -> None:
        """Copy a record whole; those that lie one after another become one range."""
        self.pad((record.header - self.position) % zips.ALIGNMENT)
        line, length = record.line, record.following - record.dead - record.header
        if self.position != record.header:
            line = _line(record.name.encode(), record.flags, record.crc, record.size, self.position)
        self.lines.append(line)
        self.length += len(line)
        last = self.pieces[-1].content
        if type(last) is Range and last.source is source and last.offset + last.length == record.header:
            last.length += length
            self.position += length
        else:
            self.put(Range(source, record.header, length))

    def add(self, name: str, content: Content, *, align: bool = False, crc: int | None = None) -> None:
        size, path, header = content.length, f"{self.folder}/{name}".encode(), self.position
        checksum = Checksum(size, label=path.decode()) if crc is None and size else None
        known = crc or 0 if size else 0  # whatever the source says of nothing
        wide = struct.pack("<2H2Q", 1, 16, 0, 0) if size >= zips.FULL_32 else b""
        padding = -(header + zips.LOCAL.size + len(path) + len(wide) + 4) % zips.ALIGNMENT if align else 0
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = _FLAGS if size else _FLAGS & ~8  # nothing follows an empty record
        fields = (0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra))
        self.put(Literal(zips.LOCAL.pack(zips.SIGNATURE_LOCAL, *fields) + path + extra))
        self.put(content, checksum)

        def crc_32() -> int:
            return checksum.value if checksum else known

        def line() -> bytes:
            return _line(path, flags, crc_32(), size, header)

        self.lines.append(line)
        self.length += len(line())
        if size:
            form = struct.Struct("<4sI2Q" if wide else "<4sI2I")
            self.put(Late(form.size, lambda: form.pack(zips.SIGNATURE_DESCRIPTOR, crc_32(), size, size)))

    def finish(self) -> list[Piece]:
        start, count, size = self.position, len(self.lines), self.length
        self.put(Late(size, lambda: b"".join([line if isinstance(line, bytes) else line() for line in self.lines])))
        wide = zips.END64.pack(zips.SIGNATURE_END64, zips.END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
        locator = zips.LOCATOR64.pack(zips.SIGNATURE_LOCATOR64, 0, self.position, 1)
        few, small, near = min(count, zips.FULL_16), min(size, zips.FULL_32), min(start, zips.FULL_32)
        self.put(Literal(wide + locator + zips.END.pack(zips.SIGNATURE_END, 0, 0, few, few, small, near, 0)))
        return self.pieces


def _line(name: bytes, flags: int, crc: int, size: int, header: int) -> bytes:
    wide = b""
    if size >= zips.FULL_32 or header >= zips.FULL_32:
        wide = struct.pack("<2H3Q", 1, 24, size, size, header)
        size = header = zips.FULL_32
    fields = (0, 0, flags, 0, 0, 0, crc, size, size, len(name), len(wide), 0, 0, 0, 0, header)
    return zips.CENTRAL.pack(zips.SIGNATURE_CENTRAL, *fields) + name + wide
