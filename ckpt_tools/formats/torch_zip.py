"""torch-zip: what `torch.save` has written since 1.6. A zip of stored records under one root folder.

    ROOT/data.pkl           MUST   the pickle; tensors are persistent ids ("storage", class, key, location, size)
    ROOT/data/KEY           MUST   one record a storage, its bytes aligned to 64 by an `FB` extra field
    ROOT/byteorder          MAY    "little" or "big" (absent before 2.1: little)
    ROOT/version            MUST for torch   "3"
    ROOT/.format_version, .storage_alignment, .data/serialization_id   MAY   not kept: they describe the file, not the model

Source: torch/serialization.py (`_save`, `_load`), caffe2/serialize/inline_container.cc, miniz.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import ChecksumError, CkptError, DamagedFileError, TensorError
from ckpt_tools.formats.base import Warned, trailing, validate_tree
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_directory import Directory, Record, RecordRange
from ckpt_tools.io.content import Content, Deflated, crc32, read
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.tree.findings import mending

_RECORD = b"PK\x03\x04"


def decode(
    source: Source, directory: Directory, folder: str, member: str = "",
    storages_of: type[Storages] = Storages,
) -> Checkpoint:  # fmt: skip
    records = by_name(directory, member)
    odd, unreadable = _small_records(source, records, folder)
    refuse_more_archives(source, directory)
    warnings = [*trailing(directory.trailing, "the archive"), *odd]
    has_checksums = any(record.crc for record in directory.records)
    byteorder, order = "little", records.get(f"{folder}/byteorder")
    if order is not None:
        byteorder = record_head(source, order, 16).decode("latin-1")
        if byteorder not in ("little", "big") or order.size > 16:
            raise DamagedFileError(f"The record 'byteorder' says {byteorder!r}; it must be 'little' or 'big'.")
    storages = storages_of(partial(_locate, source, records, f"{folder}/data"))
    pickle = records[f"{folder}/data.pkl"]
    check_pickle(source, pickle.size, deflated=pickle.deflated)
    stream = read_record(source, pickle, check=has_checksums)
    if b"_load_from_bytes" in stream:  # pickled storages in strings of bytes, which few files have
        from ckpt_tools.formats.torch_legacy import Blobs

        blobs = Blobs()
        machine = blobs.watch(Machine(stream, blobs.makers, storages.storage))
    else:
        machine = Machine(stream, MAKERS, storages.storage)
    root = machine.load()
    if any(name.name.endswith(_OLD_CLASSES) for name in machine.globals):
        from ckpt_tools.pickling.old_tensors import modernise

        root = modernise(root, machine.globals)
    storages.check_found()
    warnings += [*validate_tree(root), *trailing(len(stream) - machine.position, "the pickle", "trailing-pickle-bytes")]
    data = f"{folder}/data/"
    return Checkpoint(
        "torch-zip", root, source, list(machine.globals), [*machine.unusual, *unreadable], warnings=warnings,
        storage_bytes=sum(record.compressed for name, record in records.items() if name.startswith(data)),
        byteorder=byteorder, has_checksums=has_checksums, root_folder=folder, records=directory.records,
        dead_bytes=partial(_dead_bytes, directory, records, storages, data),
    )  # fmt: skip


_OLD_CLASSES = ("Tensor", "Parameter", "Variable")


def _dead_bytes(directory: Directory, records: Mapping[str, Record], storages: Storages, data: str) -> int:
    """Bytes that nothing refers to: what an edit in place left behind, storages that no tensor is built on."""
    contents = [storage.content for _, storage in storages.by_key.values()]
    used = {content.offset for content in contents if type(content) is RecordRange or type(content) is Deflated}
    unused = [row.compressed for name, row in records.items() if row.data not in used and name.startswith(data)]
    head = directory.records[0].header if directory.records else 0
    return head + sum([row.dead for row in directory.records]) + sum(unused)


def by_name(directory: Directory, member: str = "") -> dict[str, Record]:
    return {record.name.removeprefix(member): record for record in directory.records}


def _locate(source: Source, records: Mapping[str, Record], folder: str, key: str, nbytes: int) -> Content | None:
    record = records.get(f"{folder}/{key}")
    if record is None:
        return None
    if record.size != nbytes:
        raise TensorError(
            f"Storage {key!r} should have {nbytes} bytes; its record has {record.size}.",
            why="The pickle and the zip were not written together, or the file is damaged.",
        )
    return record_content(source, record)


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


def check_pickle(source: Source, size: int, *, deflated: bool) -> None:
    if deflated and size > limits.budget(source.size).room(limits.MEMORY):
        raise limits.MEMORY.error(f"The pickle claims {size} bytes, deflated; the file has fewer.", size)


@contextmanager
def json_of(source: Source, record: Record, *, check: bool, pairs: Callable[[Pairs], Any] | None = None) -> Iterator[Any]:
    """The JSON in a record; what a reader stumbles over inside the block says that it is malformed."""
    from ckpt_tools.io.parsers import load_json  # few records are JSON

    if record.size > limits.budget(source.size).room(limits.MEMORY):  # it is counted once it is read
        raise limits.MEMORY.error(f"{record.name} claims {record.size} bytes.", record.size)
    try:
        yield load_json(read_record(source, record, check=check), pairs=pairs)
    except CkptError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedFileError(f"{record.name} is malformed.", why=f"{type(error).__name__}: {error}"[:200]) from None


Pairs = list[tuple[str, Any]]


def read_record(source: Source, record: Record, *, check: bool) -> bytes:
    data = read(record_content(source, record))
    if check and crc32(data) != record.crc:
        raise ChecksumError(
            f"The bytes of {record.name} do not match their CRC-32: the file is damaged.",
            fix=f"Get the file again, or save what is whole: {mending('repair', str(source.path))}",
        )
    return data


def refuse_more_archives(source: Source, directory: Directory) -> None:
    """Refuse a file in which another archive begins behind the one that has its end, and goes on to the file's end."""
    left = directory.trailing
    if left and _RECORD.startswith(source.read(source.size - left, min(left, len(_RECORD)))):
        raise DamagedFileError(
            "Another archive begins behind the first, and is cut off.", why=f"It is {left} bytes: {_PART}.",
            fix="Get it again, or save what is whole: " + mending("repair", str(source.path), suffix=".pth"),
        )  # fmt: skip


_PART = "the file is a part of a distributed checkpoint, whose folder has a .metadata"
# Of records that say one word: what torch writes, and what it reads, a pattern.
_WORDS = {
    ".format_version": (("1",), ""), ".storage_alignment": (("64",), r"\d{1,9}$"),
    "version": (("2", "3", "4"), r"0*(?:[1-9]|10)(?!\d)"),  # to kMaxSupportedFileFormatVersion in caffe2/serialize/versions.h
}  # fmt: skip
_SMALL, _LONGEST_ID = 64, 1 << 10  # bytes of a record that says one word; of an id, for which torch writes 40


def _small_records(source: Source, records: Mapping[str, Record], folder: str) -> tuple[list[Warned], list[str]]:
    """What records of a few bytes say otherwise than torch writes it, and for what of that torch refuses the file."""
    odd, refused = [], []
    for name, (good, taken) in _WORDS.items():
        record, text = records.get(f"{folder}/.data/{name}") or records.get(f"{folder}/{name}"), ""  # in torch's order
        if record is not None:
            text = record_head(source, record, _SMALL).decode("utf-8", "replace").strip() + "..." * (record.size > _SMALL)
        elif name != "version":
            continue
        if text not in good:
            found = f"no {name}" if record is None else f"{name} is {text!r}"
            odd.append(Warned(f"odd-{name.strip('.').replace('_', '-')}", found, f"{name} {good[-1]!r}"))
            if not re.match(taken, text):
                refused.append(f"{name} {text!r}, which torch does not read" if text else f"no {name} of the format")
    serialization_id = records.get(f"{folder}/.data/serialization_id")
    try:
        if serialization_id is not None and serialization_id.size <= _LONGEST_ID:
            record_head(source, serialization_id, _LONGEST_ID).decode()
    except UnicodeDecodeError:
        refused.append(".data/serialization_id is not text")
    return odd, refused
