"""torch-zip: what `torch.save` has written since 1.6. A zip of stored records under one root folder.

    ROOT/data.pkl           MUST   the pickle; tensors are persistent ids ("storage", class, key, location, size)
    ROOT/data/KEY           MUST   one record a storage, its bytes aligned to 64 by an `FB` extra field
    ROOT/byteorder          MAY    "little" or "big" (absent before 2.1: little)
    ROOT/version            MUST for torch   "3"
    ROOT/.format_version, .storage_alignment, .data/serialization_id   MAY   not kept: they describe the file, not the model

Source: torch/serialization.py (`_save`, `_load`), caffe2/serialize/inline_container.cc, miniz.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.containers.base import Decoded, Warned
from ckpt_tools.containers.legacy_stream import Blobs
from ckpt_tools.containers.zip_directory import ALIGNMENT, Directory, Record, RecordRange, is_record_name
from ckpt_tools.containers.zip_layout import ZipLayout
from ckpt_tools.errors import ChecksumError, ContainerLimitError, LimitError, TensorError, ZipError
from ckpt_tools.files import Source
from ckpt_tools.pickling.checks import settle
from ckpt_tools.pickling.old_tensors import modernise
from ckpt_tools.pickling.reader import Machine
from ckpt_tools.pickling.torch_objects import Storages
from ckpt_tools.pickling.writer import Survey, write_pickle
from ckpt_tools.plan import Content, Deflated, Literal, Piece, read
from ckpt_tools.tree import Node, Storage

# Storages keep their offsets when that leaves a gap before them of at most this many bytes, or a 64th of all.
_SMALL_GAP = 4096
_PICKLE_LIMIT, _INFLATED = 1 << 30, 1 << 20


def sniff(head: bytes) -> bool:
    """Whether a file that starts with these bytes may be a torch-zip (or another zip)."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


# --- reading


def decode(source: Source, directory: Directory, folder: str, member: str = "", keys: str = "") -> Decoded:
    """Read the pickle of a torch-zip; no tensor bytes.

    Args:
        source: the file. directory: its records. folder: their root folder.
        member: for an archive inside another, how its records' names start. keys: what its storage keys get in front.

    Raises:
        ZipError, PickleError, TensorError: the file breaks a promise.
    """
    records = by_name(directory, member)
    warnings = odd_records(source, records, folder, directory)
    has_checksums = any(record.crc for record in directory.records)
    byteorder = read_byteorder(source, records.get(f"{folder}/byteorder"))
    storages = Storages(Locator(source, records, f"{folder}/data").locate, keys)
    stream = read_pickle(source, records[f"{folder}/data.pkl"], check=has_checksums)
    blobs = Blobs(prefix=keys)
    machine = blobs.watch(Machine(stream, blobs.makers, storages.load))
    root = modernise(machine.load(), machine.globals)
    storages.check_found()
    warnings += [Warned("repeated-key", f"the key {key!r} is set twice; the last value wins") for key in settle(root)[:20]]
    if machine.position != len(stream):
        count = len(stream) - machine.position
        warnings.append(Warned("trailing-pickle-bytes", f"{count} bytes after the pickle", "nothing; they are not kept"))
    return Decoded(
        "torch-zip", root, source, list(machine.globals), list(machine.unusual), {}, warnings,
        sum(record.compressed for name, record in records.items() if name.startswith(f"{folder}/data/")),
        byteorder, has_checksums, folder, directory.records, _dead_bytes(directory, records, storages, f"{folder}/data/"),
    )  # fmt: skip


def _dead_bytes(directory: Directory, records: Mapping[str, Record], storages: Storages, data: str) -> int:
    """Bytes that nothing refers to: what an edit in place left behind, storages that no tensor is built on."""
    contents = (storage.content for _, storage in storages.by_key.values())
    used = {content.offset for content in contents if isinstance(content, RecordRange | Deflated)}
    unused = (row.compressed for name, row in records.items() if name.startswith(data) and row.data not in used)
    head = directory.records[0].header if directory.records else 0
    return head + sum(row.dead for row in directory.records) + sum(unused)


def by_name(directory: Directory, member: str = "") -> dict[str, Record]:
    """The records by the names that they have in their own archive."""
    return {record.name.removeprefix(member): record for record in directory.records}


@dataclass(frozen=True, slots=True)
class Locator:
    """Finds the record of a storage in a folder of an archive."""

    source: Source
    records: Mapping[str, Record]
    folder: str

    def locate(self, key: str, nbytes: int) -> Content | None:
        """Where a storage's bytes are; None when there is no such record."""
        record = self.records.get(f"{self.folder}/{key}")
        if record is None:
            return None
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


def read_pickle(source: Source, record: Record, *, check: bool) -> bytes:
    """The pickle. A deflated one may be as long as the file: the records that it lists take more than their names in it."""
    limit = max(source.size, _INFLATED) if record.deflated else _PICKLE_LIMIT
    if record.size > limit:
        raise LimitError(f"The pickle claims {record.size} bytes; {limit} is the limit for this file.")
    return read_record(source, record, check=check)


def read_record(source: Source, record: Record, *, check: bool) -> bytes:
    data = read(record_content(source, record))
    if check and zlib.crc32(data) != record.crc:
        raise ChecksumError(
            f"The bytes of {record.name} do not match their CRC-32: the file is damaged.",
            fix="Get the file again; ckpt check and ckpt repair tell what is whole.",
        )
    return data


def read_byteorder(source: Source, record: Record | None) -> str:
    if record is None:
        return "little"
    text = read_record(source, record, check=False) if record.size <= 16 else b"..."
    if text not in (b"little", b"big"):
        raise ZipError(f"The record 'byteorder' says {text!r}; it must be 'little' or 'big'.")
    return text.decode()


def odd_records(source: Source, records: dict[str, Record], folder: str, directory: Directory) -> list[Warned]:
    warnings = []
    if directory.trailing:
        warnings.append(Warned("trailing-bytes", f"{directory.trailing} bytes after the archive", "nothing; they are not kept"))
    for name, good in ((".format_version", ("1",)), (".storage_alignment", ("64",)), ("version", ("2", "3", "4"))):
        record = records.get(f"{folder}/{name}") or (records.get(f"{folder}/.data/version") if name == "version" else None)
        text = None
        if record is not None:
            text = read_record(source, record, check=False).decode("utf-8", "replace").strip() if record.size < 64 else "..."
        if text not in good and (text is not None or name == "version"):
            code = f"odd-{name.strip('.').replace('_', '-')}"
            warnings.append(Warned(code, f"{name} is {text!r}" if text is not None else f"no {name}", f"{name} {good[-1]!r}"))
    return warnings


# --- laying out


def lay_out(
    root: Node, *, folder: str = "archive", byteorder: str = "little", trust_crc: bool = True, verify: bool = False,
    compact: bool = False,
) -> list[Piece]:  # fmt: skip
    """The pieces of a torch-zip with this tree.

    Storages that lie one after another in the source file are copied in one piece, zip headers included, and where they can
    they keep their very offsets: renaming a checkpoint is a clone of the file with a new pickle and a new directory.

    Args:
        root: the tree.
        folder: the root folder; copied records keep theirs, so it must be the source's.
        byteorder: how the storages' bytes are stored.
        trust_crc: whether the CRC-32s of copied records are the source's; else they are computed.
        verify: check every copied record against the source's CRC-32.
        compact: leave no gap, at the price of moving the storages.
    """
    survey = Survey(root)
    storages = _in_source_order(_unique(survey.storages))
    whole = {} if verify or not trust_crc else dict(_whole_records(storages, folder))
    head, tail = _small_records(root, survey, byteorder)
    layout = ZipLayout(folder)
    anchor = whole[storages[0].key].header if storages and storages[0].key in whole else 0
    if not compact and layout.room(head) > anchor >= layout.room(head[1:]):
        tail.insert(0, head.pop(0))  # the pickle has grown: it goes behind the storages, which stay
    _add_small(layout, head)
    gap_limit = 0 if compact else max(_SMALL_GAP, sum(storage.nbytes for storage in storages) // 64)
    if 0 <= anchor - layout.position <= gap_limit:
        layout.pad(anchor - layout.position)
    for run in _runs(storages, whole):
        first = run[0].content
        if run[0].key in whole and type(first) is RecordRange:
            layout.copy(first.source, [whole[storage.key] for storage in run])
        else:
            _add_storage(layout, run[0], trust_crc=trust_crc, verify=verify)
    _add_small(layout, tail)
    return layout.finish()


def lay_out_in_place(root: Node, *, folder: str, byteorder: str = "little") -> list[Piece]:
    """The pieces of the file that the tree was read from with every storage where it is: only the small records change.

    Raises:
        ContainerLimitError: a storage that is not in the file as it is to be.
    """
    survey = Survey(root)
    storages = _in_source_order(_unique(survey.storages))
    contents = [storage.content for storage in storages]
    records = [content.record for content in contents if type(content) is RecordRange]
    names = [record.name for record in records]
    if len(records) != len(storages) or names != [f"{folder}/data/{storage.key}" for storage in storages]:
        raise ContainerLimitError(
            "This edit changes tensor bytes, so it cannot be done in place.", fix="Convert to another file."
        )
    head, tail = _small_records(root, survey, byteorder)
    layout = ZipLayout(folder, in_place=True)
    anchor = records[0].header if records else 0
    while head and layout.room(head) > anchor:
        tail.insert(0, head.pop(0))
    if anchor and not head:  # a zip must begin with a record
        raise ContainerLimitError("The file has no room for a record before its tensors.", fix="Convert to another file.")
    _add_small(layout, head)
    for run in _runs(storages, dict(zip((storage.key for storage in storages), records, strict=True))):
        content = run[0].content
        assert type(content) is RecordRange
        layout.copy(content.source, [storage.content.record for storage in run if type(storage.content) is RecordRange])
    _add_small(layout, tail)
    return layout.finish()


_Small = list[tuple[str, Content]]


def _small_records(root: Node, survey: Survey, byteorder: str) -> tuple[_Small, _Small]:
    """What stands before the storages, and what behind them."""
    pickle = Literal(write_pickle(root, survey))
    return [("data.pkl", pickle), ("byteorder", Literal(byteorder.encode()))], [("version", Literal(b"3\n"))]


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


def _add_storage(layout: ZipLayout, storage: Storage, *, trust_crc: bool, verify: bool) -> None:
    content = storage.content
    if isinstance(content, RecordRange) and trust_crc:
        layout.add(f"data/{storage.key}", content, align=True, crc=content.record.crc, verify=verify)
    else:
        layout.add(f"data/{storage.key}", content, align=True)


def _unique(storages: list[Storage]) -> list[Storage]:
    for storage in storages:
        if not storage.key.isalnum() and not is_record_name(f"data/{storage.key}"):
            raise TensorError(f"A storage has the key {storage.key!r}, which cannot name a record.")
    keys = {storage.key for storage in storages}
    if len(keys) != len(storages):
        twice = next(key for key in keys if sum(storage.key == key for storage in storages) > 1)
        raise TensorError(f"Two storages have the key {twice!r}.")
    return storages


def _in_source_order(storages: list[Storage]) -> list[Storage]:
    """Records file by file as they lie there; then the others by their keys."""
    sources: dict[int, int] = {}

    def place(storage: Storage) -> tuple[int, int, int, str]:
        if isinstance(storage.content, RecordRange):
            source = sources.setdefault(id(storage.content.source), len(sources))
            return 0, source, storage.content.record.header, ""
        return 1, 0, int(storage.key) if storage.key.isdecimal() and len(storage.key) < 20 else 0, storage.key

    return sorted(storages, key=place)


def _whole_records(storages: Sequence[Storage], folder: str) -> Iterator[tuple[str, Record]]:
    """The storages that can be copied with their zip headers and descriptors: same name, aligned."""
    for storage in storages:
        if isinstance(storage.content, RecordRange):
            record = storage.content.record
            if record.name == f"{folder}/data/{storage.key}" and record.data % ALIGNMENT == 0:
                yield storage.key, record
