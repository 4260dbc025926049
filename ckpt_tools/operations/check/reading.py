"""Read an open checkpoint once: CRC-32 of every record, and where asked the digest and the values of every tensor."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_tools import limits
from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.errors import DamagedFileError
from ckpt_tools.formats.base import PART_CONTAINERS, is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_archives import split
from ckpt_tools.formats.zip_directory import Place, Record, RecordRange, read_directory
from ckpt_tools.io.content import CHUNK, Deflated, Range, chunks, crc32
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Files, Window
from ckpt_tools.io.writer import Advance
from ckpt_tools.operations.check import digests, values
from ckpt_tools.tree.nodes import Entry, Storage, Where
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.numeric import row_major, view_of
from ckpt_tools.values.statistics import ValueCount

# --- one pass over a file: every byte is read once, in order, and handed to whoever counts, sums or hashes it

Sink: TypeAlias = Callable[[memoryview], object]


class Crc:
    value = 0

    def take(self, data: memoryview | bytes) -> None:
        self.value = crc32(data, self.value)


@dataclass(slots=True, unsafe_hash=True)
class Span:
    """A run of a file's bytes, and what takes them in as they are read, in pieces, in order."""

    offset: int
    length: int
    take: Sink


def _read_through(source: Source, spans: Iterable[Span], advance: Advance) -> None:
    """Read a whole file and hand each span its bytes; bytes of no span are read all the same: the disk may fail there."""
    waiting = sorted(spans, key=lambda span: span.offset, reverse=True)
    open_spans: list[Span] = []
    for start, block in _blocks(source):
        stop = start + len(block)
        while waiting and waiting[-1].offset < stop:
            open_spans.append(waiting.pop())
        for span in open_spans:
            span.take(block[max(span.offset - start, 0) : span.offset + span.length - start])
        open_spans = [span for span in open_spans if span.offset + span.length > stop]
        advance(len(block))


def _blocks(source: Source) -> Iterator[tuple[int, memoryview]]:
    """The file in blocks of 4 MiB with their offsets. A block is valid until the one after the next is asked for."""
    starts = range(0, source.size, CHUNK)
    buffers = [memoryview(bytearray(min(CHUNK, source.size))) for _ in starts[:2]]

    def fill(index: int) -> memoryview:
        part = buffers[index % 2][: min(CHUNK, source.size - starts[index])]
        source.read_into(starts[index], part)
        return part

    if len(starts) < 2 or sys.platform == "emscripten":  # a browser has no threads
        yield from ((start, fill(index)) for index, start in enumerate(starts))
        return
    with ThreadPoolExecutor(1, "ckpt-read") as reader:
        ahead = reader.submit(fill, 0)
        for index, start in enumerate(starts):
            block = ahead.result()
            if index + 1 < len(starts):
                ahead = reader.submit(fill, index + 1)
            yield start, block


# --- a checkpoint


@dataclass(slots=True, unsafe_hash=True)
class DamagedRecord:
    """A record that does not match its CRC-32; `found` is what its bytes have, None when they cannot be inflated."""

    source: Source
    record: Record
    found: int | None

    @property
    def other_writer(self) -> bool:
        """Whether the data descriptor behind the record has the CRC-32 of its bytes, while the directory has another."""
        record = self.record
        if record.deflated or self.found is None or record.end + 8 > self.source.size:
            return False
        return self.source.read(record.end, 8) == b"PK\x07\x08" + self.found.to_bytes(4, "little")


@dataclass(slots=True)
class Read:
    """What reading every byte found."""

    storages: list[Storage] = field(default_factory=list)
    bytes: int = 0
    records: int = 0
    mismatches: list[DamagedRecord] = field(default_factory=list)
    digests: list[digests.Digest] = field(default_factory=list)
    counted: list[values.Counted] = field(default_factory=list)
    skipped: list[Where] = field(default_factory=list)


@dataclass(slots=True)
class _View:
    """One view on a storage, under every path that it has."""

    entry: Entry
    wheres: list[Where]
    hash: hashlib._Hash | None
    count: ValueCount | None

    def take(self, data: memoryview | bytes) -> None:
        if self.hash is not None:
            self.hash.update(data)
        if self.count is not None:
            self.count.take(data)


def read_checkpoint(
    checkpoint: Checkpoint, *, digest: bool = False, count_values: bool = False, heads: frozenset[Where] = frozenset(),
    advance: Advance = lambda _: None,
) -> Read:  # fmt: skip
    """Read every byte of a checkpoint's files once; twice where tensors are strided and values count."""
    read = Read(list(storages_of(checkpoint)))
    contents = [storage.content for storage in read.storages if isinstance(storage.content, Range | Deflated)]
    own = list(checkpoint.source.members.values()) if isinstance(checkpoint.source, Files) else [checkpoint.source]
    files = (in_file(part, 0)[0] for part in (*own, *(content.source for content in contents)))
    spans: dict[Source, list[Span]] = {source: [] for source in files}
    checks = [(source, record, Crc()) for source, record in _records(checkpoint, contents)]
    for source, record, crc in checks:
        if not record.deflated:
            file, offset = in_file(source, record.data)
            spans[file].append(Span(offset, record.size, crc.take))
    views = _views(checkpoint, read, digest, count_values, heads) if digest or count_values else []
    gathered = [view for view in views if not _streams(view, checkpoint.byteorder, spans)]
    for source, wanted in spans.items():
        _read_through(source, wanted, advance)
        source.check_unchanged()
        read.bytes += source.size
    read.records = len(checks)
    for source, record, crc in checks:
        found = _inflated_crc(source, record) if record.deflated else crc.value
        if found != record.crc:
            read.mismatches.append(DamagedRecord(source, record, found))
    _gather(gathered, checkpoint.byteorder, read)
    _collect(views, checkpoint, read)
    return read


def storages_of(checkpoint: Checkpoint) -> Iterator[Storage]:
    """The storages of the tensors, each once. To look at every node of the tree for others can take hundreds of megabytes."""
    found: dict[int, Storage] = {}
    for tensor in checkpoint.tensors:
        below = (tensor.node.storage,) if type(tensor.node) is Entry else reachable(tensor.node)
        found.update((id(node), node) for node in below if type(node) is Storage)
    return iter(found.values())


def in_file(source: Source, offset: int) -> tuple[Source, int]:
    """An offset in a part of a file as one in the file."""
    while isinstance(source, Window):
        offset, source = source.start + offset, source.source
    return source, offset


def _records(checkpoint: Checkpoint, contents: Sequence[Range | Deflated]) -> list[tuple[Source, Record]]:
    """The records that have a CRC-32, each once: of the zip, of every zip, of the archives in the parts of many ranks."""
    found = {id(record): (checkpoint.source, record) for record in checkpoint.records if checkpoint.has_checksums}
    for content in contents:
        if isinstance(content, RecordRange):
            found[id(content.record)] = (content.source, content.record)
    if isinstance(checkpoint.source, Files):
        for source in checkpoint.source.members.values():
            if source.path.suffix == ".distcp" or checkpoint.container in PART_CONTAINERS:
                archives: Sequence[Place | None] = split(source)[0] or [None]  # one, or in a dcp one a tensor
                for place in archives if is_zip(source.read(0, min(4, source.size))) else ():
                    found |= {id(record): (source, record) for record in read_directory(source, place).records}
    places = {(*in_file(source, record.data), record.size): (source, record) for source, record in found.values()}
    checked = list(places.values())
    return checked if any(record.crc for _, record in checked) else []


def _inflated_crc(source: Source, record: Record) -> int | None:
    crc = Crc()
    try:
        for chunk in chunks(Deflated(source, record.data, record.compressed, record.size, 0)):
            crc.take(memoryview(chunk))
    except DamagedFileError:
        return None
    return crc.value


def _views(checkpoint: Checkpoint, read: Read, digest: bool, count: bool, heads: frozenset[Where]) -> list[_View]:
    """Every view once; tied tensors are hashed and counted once."""
    views: dict[tuple[int, str], _View] = {}
    # Tensors may overlap and be expanded: together they may be hashed and counted for so many bytes, and no more.
    left = limits.STREAMED * limits.MEMORY.most(checkpoint.file_bytes)
    for tensor in checkpoint.tensors:
        entry = tensor.node
        if type(entry) is not Entry or not entry.dtype.in_torch:
            read.skipped.append(tensor.where)
            continue
        key = view_of(entry)
        if key not in views:
            left -= entry.nbytes
            if left < 0:
                read.skipped.append(tensor.where)
                left += entry.nbytes
                continue
            views[key] = _View(entry, [], digests.begin(entry) if digest else None, ValueCount(entry.dtype) if count else None)
        views[key].wheres.append(tensor.where)
        if tensor.where in heads and (counter := views[key].count) is not None:
            counter.moments = True
    return list(views.values())


def _streams(view: _View, byteorder: str, spans: dict[Source, list[Span]]) -> bool:
    """Whether a view's bytes lie row-major in a file, so that they are taken in as the file is read."""
    content, entry = view.entry.storage.content, view.entry
    swapped = byteorder == "big" and max(entry.dtype.swap_width, entry.storage.swap_width) > 1
    if swapped or not isinstance(content, Range) or not entry.is_contiguous or entry.lazy_bits:
        return False
    file, start = in_file(content.source, content.offset + entry.offset * entry.dtype.itemsize)
    if entry.nbytes:
        spans[file].append(Span(start, entry.nbytes, view.take))
    return True


def _gather(views: list[_View], byteorder: str, read: Read) -> None:
    """Take in what does not lie in the file as it is: strided, deflated, big-endian. What cannot be inflated is skipped."""
    for view in views:
        entry = to_little_endian(view.entry, byteorder)
        assert type(entry) is Entry
        try:
            for chunk in chunks(row_major(entry)):
                view.take(chunk)
        except DamagedFileError:
            if not read.mismatches:  # else it was said already, with the record's name
                raise
            view.hash = view.count = None
            read.skipped += view.wheres


def _collect(views: list[_View], checkpoint: Checkpoint, read: Read) -> None:
    order = {tensor.where: index for index, tensor in enumerate(checkpoint.tensors)}
    found = ((where, view) for view in views for where in view.wheres)
    for where, view in sorted(found, key=lambda row: order[row[0]]):
        if view.hash is not None:
            read.digests.append(digests.Digest(where, view.entry.dtype.name, view.entry.shape, view.hash.hexdigest()))
        if view.count is not None:
            read.counted.append(values.Counted(where, view.entry, view.count))
