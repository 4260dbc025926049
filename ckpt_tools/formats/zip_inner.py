"""A zip that torch.save wrote inside another file: in a zip, or in bytes of a pickle."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ckpt_tools.errors import TWO_FILES, DamagedFileError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_directory import Directory, Record, read_directory
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.text import some


def decode_inner(source: Source, start: int, size: int, name: str) -> Checkpoint:
    """A zip inside a file, as a checkpoint of its own; its records are placed where they are in the source."""
    window = Window(source, start, size)
    inner = read_directory(window)
    refuse_two_readings(inner.records)
    member = f"{name}!"
    placed = [
        replace(row, name=member + row.name, header=row.header + start, data=row.data + start,
                following=row.following + start) for row in inner.records
    ]  # fmt: skip
    names = {row.name for row in inner.records}
    folder = single_folder(inner.records) or ""
    if is_npz(names):
        from ckpt_tools.formats import numpy_files

        return numpy_files.decode_npz(window, inner)
    if f"{folder}/data.pkl" not in names or is_torchscript(names, folder):
        raise UnsupportedContainerError(
            f"{name!r} is a zip, but not one that torch.save wrote.",
            fix="Unpack the archive and convert its members one by one.",
        )
    return torch_zip.decode(source, Directory(placed, inner.start + start, inner.trailing), folder, member)


def is_npz(names: Collection[str]) -> bool:
    return bool(names) and all(name.endswith(".npy") for name in names)


def is_torchscript(names: Collection[str], folder: str) -> bool:
    return f"{folder}/constants.pkl" in names or f"{folder}/model.json" in names


_PICKLE, _CONSTANTS, _EXPORTED = "data.pkl", "constants.pkl", "archive_format"  # what load, jit.load and export.load go by
_OTHERS = ("model.json", "version", ".data/version", "byteorder", ".format_version", ".storage_alignment")
_LONGEST = 511  # bytes of a name that torch reads where it lists the records, and cuts the rest
_LOOKED_UP = frozenset((_PICKLE, _CONSTANTS, _EXPORTED, *_OTHERS))


def single_folder(records: Sequence[Record]) -> str | None:
    root = records[0].name.partition("/")[0] if records else ""
    folder = f"{root}/"
    return root if records and all(record.name.startswith(folder) for record in records) else None


def refuse_two_readings(records: Sequence[Record]) -> None:
    """Refuse names in which two of torch's loaders, or torch and another program, would find different files."""
    data = f"{records[0].name.partition('/')[0]}/data/" if records else ""  # storages, which nobody looks up so
    below = {record.name.partition("/")[2] for record in records if not record.name.startswith(data)}
    if not {name.lower() for name in below} & {_PICKLE, _CONSTANTS, _EXPORTED}:
        return
    if single_folder(records) is None:
        roots = list(dict.fromkeys(record.name.partition("/")[0] for record in records))
        raise DamagedFileError(f"The zip has {len(roots)} root folders ({some(roots)}); torch writes one.", why=TWO_FILES)
    if any(len(record.name.encode()) > _LONGEST for record in records):
        raise DamagedFileError(f"The zip has record names of more than {_LONGEST} bytes: torch cuts them where it lists them.")
    for name in below:
        if name not in _LOOKED_UP and name.lower() in _LOOKED_UP:
            raise DamagedFileError(
                f"The zip record {name!r} is not written as torch writes it; torch takes it for {name.lower()!r}."
            )
    if _PICKLE in below and _CONSTANTS not in below and "model.json" in below:
        raise DamagedFileError("torch.load would read the zip's data.pkl, torch.jit.load its model.json.", why=TWO_FILES)
    if _EXPORTED in below and below & {_PICKLE, _CONSTANTS}:
        raise DamagedFileError("torch.load would read the zip's pickle, torch.export.load its exported program.", why=TWO_FILES)
