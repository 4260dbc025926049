"""torch-zip: what `torch.save` has written since 1.6. A zip of stored records under one root folder.

    ROOT/data.pkl           MUST   the pickle; tensors are persistent ids ("storage", class, key, location, size)
    ROOT/data/KEY           MUST   one record a storage, its bytes aligned to 64 by an `FB` extra field
    ROOT/byteorder          MAY    "little" or "big" (absent before 2.1: little)
    ROOT/version            MUST for torch   "3"
    ROOT/.format_version, .storage_alignment, .data/serialization_id   MAY   not kept: they describe the file, not the model

Source: torch/serialization.py (`_save`, `_load`), caffe2/serialize/inline_container.cc, miniz.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.containers.base import Decoded, Warned
from ckpt_tools.containers.zip_directory import CENTRAL, END, END64, LOCAL, LOCATOR64, Directory, Record, read_directory
from ckpt_tools.errors import ChecksumError, PickleError, TensorError, UnsupportedContainerError, ZipError
from ckpt_tools.files import Source
from ckpt_tools.pickling.checks import settle
from ckpt_tools.pickling.reader import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.pickling.writer import write_pickle
from ckpt_tools.plan import Checksum, Content, Deflated, Late, Literal, Piece, Range, read
from ckpt_tools.tree import Node, Storage, reachable

ALIGNMENT = 64
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_DESCRIPTOR, _DESCRIPTOR_64 = 16, 24
_FLAGS = 0x0808  # UTF-8 names, and a data descriptor after the bytes: what torch's miniz writes
# Above this size the new pickle is padded so that tensor bytes keep their offset modulo 64 KiB: then the kernel's copy
# runs at its best speed, and a file system with reflinks can share the blocks (docs/benchmarks.md).
_CONGRUENT, _CONGRUENT_FROM = 65536, 32 << 20
_PICKLE_LIMIT = 1 << 30


def sniff(head: bytes) -> bool:
    """Whether a file that starts with these bytes may be a torch-zip (or another zip)."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


# --- reading


def decode(source: Source) -> Decoded:
    """Read the directory and the pickle of a torch-zip; no tensor bytes.

    Raises:
        ZipError, PickleError, TensorError: the file breaks a promise. UnsupportedContainerError: another kind of zip.
    """
    directory = read_directory(source)
    records = {record.name: record for record in directory.records}
    folder = _root_folder(directory.records)
    warnings = _odd_records(source, records, folder, directory)
    has_checksums = any(record.crc for record in directory.records)
    byteorder = _byteorder(source, records.get(f"{folder}/byteorder"))
    storages = Storages(_Locator(source, records, folder).locate)
    stream = _read_record(source, records[f"{folder}/data.pkl"], check=has_checksums)
    machine = Machine(stream, MAKERS, storages.load)
    root = machine.load()
    missing = [key for key, (_, storage) in storages.by_key.items() if storage.content is _MISSING]
    if missing:
        raise ZipError(
            f"{len(missing)} of {len(storages.by_key)} storages are not in the file: {_some(missing)}.",
            why="The pickle refers to them, and the zip has no such records.",
        )
    warnings += [Warned("repeated-key", f"the key {key!r} is set twice; the last value wins") for key in settle(root)[:20]]
    if machine.position != len(stream):
        count = len(stream) - machine.position
        warnings.append(Warned("trailing-pickle-bytes", f"{count} bytes after the pickle", "nothing; they are not kept"))
    return Decoded(
        "torch-zip", root, source, list(machine.globals), list(machine.unusual), {}, warnings,
        sum(record.compressed for record in directory.records if record.name.startswith(f"{folder}/data/")),
        byteorder, has_checksums, folder,
    )  # fmt: skip


_MISSING = Literal(b"")


@dataclass(frozen=True, slots=True)
class _Locator:
    source: Source
    records: dict[str, Record]
    folder: str

    def locate(self, key: str, nbytes: int) -> Content:
        """Where a storage's bytes are; `_MISSING` when there is no such record."""
        record = self.records.get(f"{self.folder}/data/{key}")
        if record is None:
            return _MISSING
        if record.size != nbytes:
            raise TensorError(
                f"Storage {key!r} should have {nbytes} bytes; its record has {record.size}.",
                why="The pickle and the zip were not written together, or the file is damaged.",
            )
        return record_content(self.source, record)


def record_content(source: Source, record: Record) -> Content:
    """The bytes of a record."""
    if record.deflated:
        return Deflated(source, record.data, record.compressed, record.size, record.crc)
    return RecordRange(source, record.data, record.size, record)


@dataclass(frozen=True, slots=True)
class RecordRange(Range):
    """The bytes of a stored record, which may be copied together with the zip header before them."""

    record: Record


def _root_folder(records: Sequence[Record]) -> str:
    roots = dict.fromkeys(record.name.partition("/")[0] for record in records)
    names = {record.name for record in records}
    folder = next(iter(roots), "")
    if len(roots) == 1:
        if f"{folder}/constants.pkl" in names or f"{folder}/model.json" in names:
            raise UnsupportedContainerError(
                "This is a TorchScript program, not a plain checkpoint.",
                why="ckpt reads torch-zip and safetensors files.",
                fix="Where you trust it: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth').",
            )
        if f"{folder}/data.pkl" in names:
            return folder
    elif any(name.endswith("/data.pkl") for name in names):
        raise ZipError(f"The zip has {len(roots)} root folders ({_some(list(roots))}); torch writes one.")
    raise UnsupportedContainerError(
        "This is a zip file, but not one that torch.save wrote.", why=f"It holds {_some(sorted(names)) or 'nothing'}."
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _read_record(source: Source, record: Record, *, check: bool) -> bytes:
    if record.size > _PICKLE_LIMIT:
        raise PickleError(f"The pickle claims {record.size} bytes; {_PICKLE_LIMIT} is the limit.")
    data = read(record_content(source, record))
    if check and zlib.crc32(data) != record.crc:
        raise ChecksumError(f"The bytes of {record.name} do not match their CRC-32: the file is damaged.")
    return data


def _byteorder(source: Source, record: Record | None) -> str:
    if record is None:
        return "little"
    text = _read_record(source, record, check=False) if record.size <= 16 else b"..."
    if text not in (b"little", b"big"):
        raise ZipError(f"The record 'byteorder' says {text!r}; it must be 'little' or 'big'.")
    return text.decode()


def _odd_records(source: Source, records: dict[str, Record], folder: str, directory: Directory) -> list[Warned]:
    warnings = []
    if directory.trailing:
        warnings.append(Warned("trailing-bytes", f"{directory.trailing} bytes after the archive", "nothing; they are not kept"))
    for name, good in ((".format_version", ("1",)), (".storage_alignment", ("64",)), ("version", ("2", "3", "4"))):
        record = records.get(f"{folder}/{name}") or (records.get(f"{folder}/.data/version") if name == "version" else None)
        text = None
        if record is not None:
            text = _read_record(source, record, check=False).decode("utf-8", "replace").strip() if record.size < 64 else "..."
        if text not in good and (text is not None or name == "version"):
            code = f"odd-{name.strip('.').replace('_', '-')}"
            warnings.append(Warned(code, f"{name} is {text!r}" if text is not None else f"no {name}", f"{name} {good[-1]!r}"))
    return warnings


# --- laying out


def lay_out(
    root: Node, *, folder: str = "archive", byteorder: str = "little", trust_crc: bool = True, verify: bool = False
) -> list[Piece]:
    """The pieces of a torch-zip with this tree.

    Storages that lie one after another in the source file are copied in one piece, zip headers included: renaming a
    checkpoint is one new pickle, one long copy and a new directory.

    Args:
        root: the tree.
        folder: the root folder; copied records keep theirs, so it must be the source's.
        byteorder: how the storages' bytes are stored.
        trust_crc: whether the CRC-32s of copied records are the source's; else they are computed.
        verify: check every copied record against the source's CRC-32.
    """
    storages = sorted(_storages(root), key=_source_order)
    layout = _Layout(folder)
    layout.add("data.pkl", Literal(write_pickle(root)), align=True)
    layout.add("byteorder", Literal(byteorder.encode()), end_at=_anchor(storages, folder))
    for storage in storages:
        content = storage.content
        if isinstance(content, RecordRange) and trust_crc:
            layout.add_record(
                storage.key, content, whole=not verify and _is_whole(content.record, folder, storage.key), verify=verify
            )
        else:
            layout.add(f"data/{storage.key}", content, align=True)
    layout.add("version", Literal(b"3\n"))
    return layout.finish()


def _storages(root: Node) -> list[Storage]:
    found: dict[str, Storage] = {}
    for node in reachable(root):
        if type(node) is Storage and found.setdefault(node.key, node) is not node:
            raise TensorError(f"Two storages have the key {node.key!r}.")
    return list(found.values())


def _source_order(storage: Storage) -> tuple[int, int, str]:
    if isinstance(storage.content, RecordRange):
        return 0, storage.content.record.header, ""
    return 1, int(storage.key) if storage.key.isdecimal() and len(storage.key) < 20 else 0, storage.key


def _is_whole(record: Record, folder: str, key: str) -> bool:
    """Whether a record can be copied with its header and descriptor: same name, aligned, nothing else behind it."""
    gap = record.following - record.end
    return record.name == f"{folder}/data/{key}" and record.data % ALIGNMENT == 0 and gap < _DESCRIPTOR_64 + ALIGNMENT


def _anchor(storages: list[Storage], folder: str) -> tuple[int, int] | None:
    """(offset, modulus) at which the first storage should start, so that all that follow keep their alignment."""
    if not storages or not isinstance(storages[0].content, RecordRange):
        return None
    record = storages[0].content.record
    if not _is_whole(record, folder, storages[0].key):
        return None
    large = sum(storage.nbytes for storage in storages) >= _CONGRUENT_FROM
    return record.header, _CONGRUENT if large else ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Listed:
    """A record as the central directory will list it."""

    name: bytes
    flags: int
    crc: int | Checksum
    size: int
    header: int

    def entry(self) -> bytes:
        crc = self.crc.value if isinstance(self.crc, Checksum) else self.crc
        wide = self.extra()
        size, header = (_FULL32, _FULL32) if wide else (self.size, self.header)
        fields = (0, 0, self.flags, 0, 0, 0, crc, size, size, len(self.name), len(wide), 0, 0, 0, 0, header)
        return CENTRAL.pack(b"PK\x01\x02", *fields) + self.name + wide

    def extra(self) -> bytes:
        if self.size < _FULL32 and self.header < _FULL32:
            return b""
        return struct.pack("<2H3Q", 1, 24, self.size, self.size, self.header)


class _Layout:
    def __init__(self, folder: str) -> None:
        self.folder, self.position = folder, 0
        self.pieces: list[Piece] = []
        self.listed: list[_Listed] = []

    def put(self, content: Content | Late, checksum: Checksum | None = None) -> None:
        """Add a piece; a range that goes on where the last one ended makes that one longer."""
        self.position += content.length
        if checksum is None and self.pieces and self.pieces[-1].checksum is None:
            before = self.pieces[-1].content
            if isinstance(before, Range) and isinstance(content, Range) and _goes_on(before, content):
                self.pieces[-1] = Piece(Range(before.source, before.offset, before.length + content.length))
                return
        self.pieces.append(Piece(content, checksum))

    def add_record(self, key: str, content: RecordRange, *, whole: bool, verify: bool) -> None:
        """A stored record of the source: with its zip header where that can stay, else under a new one."""
        record = content.record
        if not whole:
            self.add(f"data/{key}", content, align=True, crc=record.crc, verify=verify)
            return
        if gap := (record.header - self.position) % ALIGNMENT:
            self.put(Literal(bytes(gap)))
        self.listed.append(_Listed(record.name.encode(), record.flags, record.crc, record.size, self.position))
        self.put(Range(content.source, record.header, record.following - record.header))

    def add(
        self, name: str, content: Content, *, align: bool = False, end_at: tuple[int, int] | None = None,
        crc: int | None = None, verify: bool = False,
    ) -> None:  # fmt: skip
        """A record under a new header, as torch's miniz writes it: sizes in a descriptor behind the bytes.

        Args:
            name: its name in the root folder.
            content: its bytes.
            align: whether the bytes start at a multiple of 64.
            end_at: (offset, modulus) for what follows the record.
            crc: its CRC-32 where known.
            verify: whether to check the bytes against `crc`.
        """
        size, path = content.length, f"{self.folder}/{name}".encode()
        wide = struct.pack("<2H2Q", 1, 16, 0, 0) if size >= _FULL32 else b""
        start = self.position + LOCAL.size + len(path) + len(wide) + 4
        descriptor = (_DESCRIPTOR_64 if wide else _DESCRIPTOR) if size else 0
        padding = -start % ALIGNMENT if align else 0
        if end_at is not None:
            padding = _padding(start + size + descriptor, *end_at)
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = _FLAGS if size else _FLAGS & ~8
        checksum = Checksum(size, crc if verify else None, path.decode()) if crc is None or verify else None
        self.listed.append(_Listed(path, flags, checksum if checksum is not None else crc or 0, size, self.position))
        self.put(Literal(LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra))
        self.put(content, checksum)
        if size:
            self.put(Late(descriptor, lambda: _descriptor(checksum.value if checksum else crc or 0, size)))

    def finish(self) -> list[Piece]:
        """Add the central directory and the end records."""
        start = self.position
        size = sum(CENTRAL.size + len(listed.name) + len(listed.extra()) for listed in self.listed)
        self.put(Late(size, lambda: b"".join(listed.entry() for listed in self.listed)))
        count, end = len(self.listed), self.position
        wide = END64.pack(b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
        locator = LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
        few, small, near = min(count, _FULL16), min(size, _FULL32), min(start, _FULL32)
        self.put(Literal(wide + locator + END.pack(b"PK\x05\x06", 0, 0, few, few, small, near, 0)))
        return self.pieces


def _goes_on(before: Range, after: Range) -> bool:
    return before.source is after.source and before.offset + before.length == after.offset


def _padding(end: int, target: int, modulus: int) -> int:
    """How far to push `end` so that it equals `target` modulo `modulus`, as far as one extra field can hold it."""
    padding = (target - end) % modulus
    return padding if padding + 4 <= _FULL16 else padding % 4096


def _descriptor(crc: int, size: int) -> bytes:
    return struct.pack("<4sI2Q" if size >= _FULL32 else "<4sI2I", b"PK\x07\x08", crc, size, size)
