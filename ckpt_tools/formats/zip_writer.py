"""Lay out a torch-zip as torch's miniz writes it: stored records, sizes in a descriptor behind the bytes, zip64 end records.

The tree goes as a pickle, storages are copied in runs, where they were if they can stay there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckpt_tools.errors import TensorError
from ckpt_tools.formats import zip_directory as zips
from ckpt_tools.formats.base import repeated
from ckpt_tools.formats.zip_directory import Record, RecordRange, is_record_name
from ckpt_tools.io.content import CHUNK, Checksum, Computed, Content, Late, Literal, Piece, Range
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.writer import Survey, write_pickle
from ckpt_tools.tree.nodes import Node, Storage

_FLAGS = 0x0808  # UTF-8 names, and a data descriptor after the bytes


def _line(name: bytes, flags: int, crc: int, size: int, header: int) -> bytes:
    wide = b""
    if size >= zips.FULL_32 or header >= zips.FULL_32:
        wide = struct.pack("<2H3Q", 1, 24, size, size, header)
        size = header = zips.FULL_32
    fields = (0, 0, flags, 0, 0, 0, crc, size, size, len(name), len(wide), 0, 0, 0, 0, header)
    return zips.CENTRAL.pack(zips.SIGNATURE_CENTRAL, *fields) + name + wide


class ZipLayout:
    """Records under one root folder, one after another, then the directory. `position` is where the next one goes."""

    def __init__(self, folder: str) -> None:
        self.folder, self.position = folder, 0
        self.pieces: list[Piece] = []
        self.lines: list[Callable[[], bytes]] = []  # of the directory; some hold a checksum that is not known yet
        self.count = self.length = 0

    def enter(self, line: Callable[[], bytes], count: int = 1) -> None:
        self.lines.append(line)
        self.count += count
        self.length += len(line())

    def put(self, content: Content | Late, checksum: Checksum | None = None) -> None:
        self.position += content.length
        self.pieces.append(Piece(content, checksum))

    def pad(self, count: int) -> None:
        if count:
            self.put(Computed(count, lambda: (bytes(min(CHUNK, count - at)) for at in range(0, count, CHUNK))))

    def copy(self, source: Source, records: Sequence[Record]) -> None:
        first, last = records[0], records[-1]
        self.pad((first.header - self.position) % zips.ALIGNMENT)
        shift = self.position - first.header
        if shift:
            lines = [_line(row.name.encode(), row.flags, row.crc, row.size, row.header + shift) for row in records]
        else:
            lines = [row.line for row in records]
        made = b"".join(lines)
        self.enter(lambda: made, len(records))
        self.put(Range(source, first.header, last.following - last.dead - first.header))

    def room(self, records: Iterable[tuple[str, Content]]) -> int:
        fixed = zips.LOCAL.size + len(self.folder) + 1 + 20 + 4 + zips.ALIGNMENT + zips.DESCRIPTOR_64
        return sum(fixed + len(name.encode()) + content.length for name, content in records)

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

        self.enter(lambda: _line(path, flags, crc_32(), size, header))
        if size:
            form = struct.Struct("<4sI2Q" if wide else "<4sI2I")
            self.put(Late(form.size, lambda: form.pack(zips.SIGNATURE_DESCRIPTOR, crc_32(), size, size)))

    def finish(self) -> list[Piece]:
        start, count, size = self.position, self.count, self.length
        self.put(Late(size, lambda: b"".join([line() for line in self.lines])))
        end = self.position
        wide = zips.END64.pack(b"PK\x06\x06", zips.END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
        locator = zips.LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
        few, small, near = min(count, zips.FULL_16), min(size, zips.FULL_32), min(start, zips.FULL_32)
        self.put(Literal(wide + locator + zips.END.pack(b"PK\x05\x06", 0, 0, few, few, small, near, 0)))
        return self.pieces


# Storages keep their offsets when that leaves a gap before them of at most this many bytes, or a 64th of all.
_SMALL_GAP = 4096


def lay_out(root: Node, *, folder: str = "archive", byteorder: str = "little", trust_crc: bool = True) -> list[Piece]:
    survey = Survey(root)
    for storage in survey.storages:
        if not storage.key.isalnum() and not is_record_name(f"data/{storage.key}"):
            raise TensorError(f"A storage has the key {storage.key!r}, which cannot name a record.")
    if (twice := repeated((storage.key, storage) for storage in survey.storages)) is not None:
        raise TensorError(f"Two storages have the key {twice!r}.")
    storages = _in_source_order(survey.storages)
    whole = _whole_records(storages, folder) if trust_crc else {}
    head: _Small = [("data.pkl", Literal(write_pickle(root, survey))), ("byteorder", Literal(byteorder.encode()))]
    tail: _Small = [("version", Literal(b"3\n"))]
    layout = ZipLayout(folder)
    anchor = whole[storages[0].key].header if storages and storages[0].key in whole else 0
    if layout.room(head) > anchor >= layout.room(head[1:]):
        tail.insert(0, head.pop(0))  # the pickle has grown: it goes behind the storages, which stay
    _add_small(layout, head)
    gap_limit = max(_SMALL_GAP, sum(storage.nbytes for storage in storages) // 64)
    if 0 <= anchor - layout.position <= gap_limit:
        layout.pad(anchor - layout.position)
    for run in _runs(storages, whole):
        first = run[0].content
        if run[0].key in whole and type(first) is RecordRange:
            layout.copy(first.source, [whole[storage.key] for storage in run])
        else:
            crc = first.record.crc or None if trust_crc and type(first) is RecordRange else None  # a file may have none
            layout.add(f"data/{run[0].key}", first, align=True, crc=crc)
    _add_small(layout, tail)
    return layout.finish()


_Small = list[tuple[str, Content]]


def _add_small(layout: ZipLayout, records: _Small) -> None:
    for name, content in records:
        layout.add(name, content, align=name == "data.pkl")


def _runs(storages: Sequence[Storage], whole: Mapping[str, Record]) -> Iterator[Sequence[Storage]]:
    """Storages in runs whose records lie one after another; one by one those that cannot be copied whole."""
    start, following, source = 0, None, None
    for index, storage in enumerate(storages):
        record = whole.get(storage.key)
        of = storage.content.source if type(storage.content) is RecordRange else None
        if index > start and (record is None or record.header != following or of is not source):
            yield storages[start:index]
            start = index
        following, source = (record.following, of) if record is not None and not record.dead else (None, None)
    if storages:
        yield storages[start:]


def _in_source_order(storages: list[Storage]) -> list[Storage]:
    sources: dict[int, int] = {}

    def place(storage: Storage) -> tuple[int, int, int, str]:
        if isinstance(storage.content, RecordRange):
            source = sources.setdefault(id(storage.content.source), len(sources))
            return 0, source, storage.content.record.header, ""
        return 1, 0, int(storage.key) if storage.key.isdecimal() and len(storage.key) < 20 else 0, storage.key

    return sorted(storages, key=place)


def _whole_records(storages: Sequence[Storage], folder: str) -> dict[str, Record]:
    """The records that can be copied with their zip headers and descriptors: same name, aligned. By the storages' keys."""
    found = {}
    for storage in storages:
        if isinstance(storage.content, RecordRange):
            record = storage.content.record
            if record.name == f"{folder}/data/{storage.key}" and record.data % zips.ALIGNMENT == 0:
                found[storage.key] = record
    return found
