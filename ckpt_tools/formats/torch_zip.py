"""torch-zip: what `torch.save` has written since 1.6. A zip of stored records under one root folder.

    ROOT/data.pkl           MUST   the pickle; tensors are persistent ids ("storage", class, key, location, size)
    ROOT/data/KEY           MUST   one record a storage, its bytes aligned to 64 by an `FB` extra field
    ROOT/byteorder          MAY    "little" or "big" (absent before 2.1: little)
    ROOT/version            MUST for torch   "3"

Source: torch/serialization.py (`_save`, `_load`), caffe2/serialize/inline_container.cc, miniz.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ckpt_tools.errors import TWO_FILES, DamagedFileError, TensorError
from ckpt_tools.formats.base import Warned, trailing, validate_tree
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_directory import Directory, Record, RecordRange, read_record, record_content, record_head
from ckpt_tools.io.content import Content, Deflated
from ckpt_tools.io.source import Source
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.text import some

_OLD_CLASSES = ("Tensor", "Parameter", "Variable")


def decode(source: Source, directory: Directory, folder: str, storages_of: type[Storages] = Storages) -> Checkpoint:
    """What the records of a torch-zip, or of a program, hold."""
    records = {record.name: record for record in directory.records}
    odd, unreadable = _small_records(source, records, folder)
    has_checksums = any(record.crc for record in directory.records)
    byteorder, order = "little", records.get(f"{folder}/byteorder")
    if order is not None:
        byteorder = record_head(source, order, 16).decode("latin-1")
        if byteorder not in ("little", "big") or order.size > 16:
            raise DamagedFileError(f"The record 'byteorder' says {byteorder!r}; it must be 'little' or 'big'.")
    storages = storages_of(partial(_locate, source, records, f"{folder}/data"))
    stream = read_record(source, records[f"{folder}/{PICKLE}"], check=has_checksums)
    if b"_load_from_bytes" in stream:  # pickled storages in strings of bytes, which few files have
        from ckpt_tools.formats.torch_legacy import Blobs

        machine = Blobs().machine(stream, storages.storage)
    else:
        machine = Machine(stream, MAKERS, storages.storage)
    root = machine.load()
    if any(name.name.endswith(_OLD_CLASSES) for name in machine.globals):
        from ckpt_tools.pickling.old_tensors import modernise

        root = modernise(root, machine.globals)
    storages.check_found()
    warnings = [*trailing(directory.trailing, "the archive"), *odd, *validate_tree(root)]
    warnings += trailing(len(stream) - machine.position, "the pickle", "trailing-pickle-bytes")
    data = f"{folder}/data/"
    return Checkpoint(
        "torch-zip", root, source, list(machine.globals), [*machine.unusual, *unreadable], warnings=warnings,
        storage_bytes=sum(record.compressed for name, record in records.items() if name.startswith(data)),
        byteorder=byteorder, has_checksums=has_checksums, root_folder=folder, records=directory.records,
        dead_bytes=partial(_dead_bytes, directory, records, storages, data),
    )  # fmt: skip


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


def _dead_bytes(directory: Directory, records: Mapping[str, Record], storages: Storages, data: str) -> int:
    """Bytes that nothing refers to: what an edit in place left behind, storages that no tensor is built on."""
    contents = [storage.content for _, storage in storages.by_key.values()]
    used = {content.offset for content in contents if type(content) is RecordRange or type(content) is Deflated}
    unused = [row.compressed for name, row in records.items() if row.data not in used and name.startswith(data)]
    head = directory.records[0].header if directory.records else 0
    return head + sum([row.dead for row in directory.records]) + sum(unused)


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


# --- what the names in a zip say it is

PICKLE, CONSTANTS, _EXPORTED = "data.pkl", "constants.pkl", "archive_format"  # what load, jit.load and export.load go by
_OTHERS = ("model.json", "version", ".data/version", "byteorder", ".format_version", ".storage_alignment")
_LOOKED_UP = frozenset((PICKLE, CONSTANTS, _EXPORTED, *_OTHERS))
_LONGEST = 511  # bytes of a name that torch reads where it lists the records, and cuts the rest


def is_npz(names: Collection[str]) -> bool:
    return bool(names) and all(name.endswith(".npy") for name in names)


def single_folder(records: Sequence[Record]) -> str | None:
    root = records[0].name.partition("/")[0] if records else ""
    folder = f"{root}/"
    return root if records and all(record.name.startswith(folder) for record in records) else None


def names_of(records: Sequence[Record]) -> tuple[set[str], str | None]:
    """The names and their root folder; refused where two of torch's loaders, or another program, would find other files."""
    names, folder = {record.name for record in records}, single_folder(records)
    data = f"{records[0].name.partition('/')[0]}/data/" if records else ""  # storages, which nobody looks up so
    below = {name.partition("/")[2] for name in names if not name.startswith(data)}
    if not {name.lower() for name in below} & {PICKLE, CONSTANTS, _EXPORTED}:
        return names, folder
    if folder is None:
        roots = list(dict.fromkeys(record.name.partition("/")[0] for record in records))
        raise DamagedFileError(f"The zip has {len(roots)} root folders ({some(roots)}); torch writes one.", why=TWO_FILES)
    if any(len(name.encode()) > _LONGEST for name in names):
        raise DamagedFileError(f"The zip has record names of more than {_LONGEST} bytes: torch cuts them where it lists them.")
    for name in below - _LOOKED_UP:
        if name.lower() in _LOOKED_UP:
            what = f"The zip record {name!r} is not written as torch writes it; torch takes it for {name.lower()!r}."
            raise DamagedFileError(what)
    if "model.json" in below and below & {PICKLE, CONSTANTS}:
        raise DamagedFileError("torch.load would read the zip's data.pkl, torch.jit.load its model.json.", why=TWO_FILES)
    if _EXPORTED in below and below & {PICKLE, CONSTANTS}:
        raise DamagedFileError("torch.load would read the zip's pickle, torch.export.load its exported program.", why=TWO_FILES)
    return names, folder
