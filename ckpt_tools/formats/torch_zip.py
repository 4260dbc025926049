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
from ckpt_tools.formats.base import CUT_ARCHIVE, Decoded, Warned, trailing, validate_tree
from ckpt_tools.formats.zip_directory import DESCRIPTOR, LOCAL, Directory, Record, RecordRange
from ckpt_tools.io.content import Content, Deflated, crc32, read
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.machine import Machine, Maker
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.tree.findings import mending
from ckpt_tools.tree.nodes import Global

_RECORD = b"PK\x03\x04"


def decode(
    source: Source, directory: Directory, folder: str, member: str = "",
    storages_of: type[Storages] = Storages, makers: Mapping[Global, Maker] = MAKERS,
) -> Decoded:  # fmt: skip
    records = by_name(directory, member)
    small = _small_records(source, records, folder)
    warnings = [*behind(source, directory), *_odd_records(small)]
    has_checksums = any(record.crc for record in directory.records)
    byteorder = read_byteorder(source, records.get(f"{folder}/byteorder"))
    storages = storages_of(partial(_locate, source, records, f"{folder}/data"))
    pickle = records[f"{folder}/data.pkl"]
    check_pickle(source, pickle.size, deflated=pickle.deflated)
    stream = read_record(source, pickle, check=has_checksums)
    machine = _machine(stream, storages, makers)
    root = machine.load()
    if any(name.name.endswith(_OLD_CLASSES) for name in machine.globals):
        from ckpt_tools.pickling.old_tensors import modernise

        root = modernise(root, machine.globals)
    storages.check_found()
    warnings += _misplaced(source, records, folder, storages)
    warnings += [*validate_tree(root), *trailing(len(stream) - machine.position, "the pickle", "trailing-pickle-bytes")]
    data = f"{folder}/data/"
    return Decoded(
        "torch-zip",
        root,
        source,
        globals=list(machine.globals),
        unusual=[*machine.unusual, *_unreadable(source, small, records.get(f"{folder}/.data/serialization_id"))],
        warnings=warnings,
        storage_bytes=sum(record.compressed for name, record in records.items() if name.startswith(data)),
        byteorder=byteorder,
        has_checksums=has_checksums,
        root_folder=folder,
        records=directory.records,
        dead_bytes=partial(_dead_bytes, directory, records, storages, data),
    )


_SMALL = 64  # bytes of a record that says one word
_NEWEST = 10  # version of the format (kMaxSupportedFileFormatVersion in caffe2/serialize/versions.h)
_OLD_CLASSES = ("Tensor", "Parameter", "Variable")


def _machine(stream: bytes, storages: Storages, makers: Mapping[Global, Maker]) -> Machine:
    """A machine over the pickle; pickled storages in strings of bytes, which few files have, bring their reader along."""
    if b"_load_from_bytes" not in stream or makers is not MAKERS:
        return Machine(stream, makers, storages.storage)

    from ckpt_tools.formats.legacy_stream import Blobs

    blobs = Blobs()
    return blobs.watch(Machine(stream, blobs.makers, storages.storage))


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
    """The first bytes of a record, `length` of them at most, inflated where it is deflated."""
    packed = source.read(record.data, min(record.compressed, length))
    if not record.deflated:
        return packed
    try:
        return zlib.decompressobj(-15).decompress(packed, length)
    except zlib.error as error:
        raise DamagedFileError(f"The zip record {record.name!r} cannot be inflated.", why=f"{error}.") from None


def check_pickle(source: Source, size: int, *, deflated: bool) -> None:
    """Raise LimitError where a deflated record claims a longer pickle than a file of this size lists records."""
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


def read_byteorder(source: Source, record: Record | None) -> str:
    if record is None:
        return "little"
    text = read_record(source, record, check=False) if record.size <= 16 else b"..."
    if text not in (b"little", b"big"):
        raise DamagedFileError(f"The record 'byteorder' says {text!r}; it must be 'little' or 'big'.")
    return text.decode()


def behind(source: Source, directory: Directory) -> list[Warned]:
    """What is to be said of the bytes behind an archive: nothing that anybody wants, or another archive without its end."""
    left = directory.trailing
    start = source.read(source.size - left, min(left, len(_RECORD)))
    if not left or not _RECORD.startswith(start):
        return trailing(left, "the archive")
    found = f"{left} bytes of another archive behind this one: a part of a distributed checkpoint, and it is cut"
    fix = "Get it again, or save what is whole: " + mending("repair", str(source.path), suffix=".pth")
    return [Warned(CUT_ARCHIVE, found, "the whole part, with its folder's .metadata", "problem", fix)]


_GOOD = {".format_version": ("1",), ".storage_alignment": ("64",), "version": ("2", "3", "4")}
_LONGEST_ID = 1 << 10  # bytes; torch writes 40
_Small = Mapping[str, str | None]


def _small_records(source: Source, records: Mapping[str, Record], folder: str) -> _Small:
    """What records of a few bytes say, or begin with; None where there is none. torch takes `.data/version` first."""
    small: dict[str, str | None] = dict.fromkeys(_GOOD)
    for name in (*_GOOD, ".data/version"):
        if (record := records.get(f"{folder}/{name}")) is not None:
            text = record_head(source, record, _SMALL).decode("utf-8", "replace").strip()
            small[name.removeprefix(".data/")] = text if record.size <= _SMALL else f"{text}..."
    return small


def _odd_records(small: _Small) -> Iterator[Warned]:
    """Small records that say something else than torch writes; `version` where it is missing, too."""
    for name, good in _GOOD.items():
        text = small[name]
        if text not in good and (text is not None or name == "version"):
            code = f"odd-{name.strip('.').replace('_', '-')}"
            yield Warned(code, f"{name} is {text!r}" if text is not None else f"no {name}", f"{name} {good[-1]!r}")


def _unreadable(source: Source, small: _Small, id_record: Record | None) -> Iterator[str]:
    """Small records for which torch refuses the file: no number, or too large a one, or a serialization id that is not text."""
    version, alignment = small["version"], small[".storage_alignment"]
    number = re.match(r"\d{1,9}", version or "")
    if number is None or not 1 <= int(number[0]) <= _NEWEST:
        yield f"version {version!r} of the format, which torch does not read" if version else "no version of the format"
    if alignment is not None and not re.fullmatch(r"\d{1,9}", alignment):
        yield f"the .storage_alignment {alignment!r}, which is not a number"
    try:
        if id_record is not None and id_record.size <= _LONGEST_ID:
            record_head(source, id_record, _LONGEST_ID).decode()
    except UnicodeDecodeError:
        yield ".data/serialization_id is not text"


_FB_HEADER = 4  # bytes of the extra field that pads, before its padding
_WIDE = 2**32 - 1  # from here on the sizes of headers change


def _misplaced(source: Source, records: dict[str, Record], folder: str, storages: Storages) -> list[Warned]:
    """The warning for a storage that torch would compute to be somewhere else, where the file says that it may compute."""
    version, aligned = (records.get(f"{folder}/{name}") for name in (".format_version", ".storage_alignment"))
    if version is None or max(version.size, aligned.size if aligned else 0) > _SMALL:
        return []
    alignment = read_record(source, aligned, check=False) if aligned else b"64"
    if read_record(source, version, check=False) < b"1" or not alignment.isdigit() or not 0 < int(alignment[:9]) < _WIDE:
        return []
    step, end, data = int(alignment), -1, f"{folder}/data/"
    header = LOCAL.size + len(data.encode()) + _FB_HEADER
    for key, (_, storage) in storages.by_key.items():
        content, nbytes = storage.content, storage.nbytes
        if type(content) is not RecordRange or content.offset >= _WIDE or nbytes >= _WIDE or (end < 0 and key != "0"):
            return []  # torch refuses, or computes in another way
        place = content.offset if end < 0 else -(-(end + header + len(key.encode())) // step) * step
        if place != content.offset:
            at = f"the bytes of {data + key!r} are at {content.offset}"
            found = f"{at}, torch with calculate_storage_offsets takes those at {place}"
            expected = "records where .format_version and .storage_alignment have them"
            return [Warned("odd-storage-alignment", found, expected, "info")]
        end = place + nbytes + (DESCRIPTOR if nbytes else 0)
    return []
