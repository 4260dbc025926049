"""The names in a zip as torch looks them up: below the folder of the first record, and without regard to case.

Source: caffe2/serialize/inline_container.cc (`PyTorchStreamReader::init`, `getRecordID`), miniz
(`mz_zip_reader_locate_file_v2`), torch/serialization.py (`_is_torchscript_zip`), torch/csrc/jit/serialization/import.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.errors import TWO_FILES, ZipError
from ckpt_tools.formats.zip.directory import Record
from ckpt_tools.text import some

_PICKLE, _CONSTANTS, _EXPORTED = "data.pkl", "constants.pkl", "archive_format"  # what load, jit.load and export.load go by
_OTHERS = ("model.json", "version", ".data/version", "byteorder", ".format_version", ".storage_alignment")
_LONGEST = 511  # bytes of a name that torch reads where it lists the records, and cuts the rest
_LOOKED_UP = frozenset((_PICKLE, _CONSTANTS, _EXPORTED, *_OTHERS))


def single_folder(records: Sequence[Record]) -> str | None:
    """The folder that holds every record, or None."""
    root = records[0].name.partition("/")[0] if records else ""
    folder = f"{root}/"
    return root if records and all(record.name.startswith(folder) for record in records) else None


def _roots(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.name.partition("/")[0] for record in records))


def refuse_two_readings(records: Sequence[Record]) -> None:
    """Raise ZipError for names in which two of torch's loaders, or torch and another program, would find different files.

    Of a zip that none of the loaders would open the names are free.
    """
    data = f"{records[0].name.partition('/')[0]}/data/" if records else ""  # storages, which nobody looks up so
    below = {record.name.partition("/")[2] for record in records if not record.name.startswith(data)}
    if not {name.lower() for name in below} & {_PICKLE, _CONSTANTS, _EXPORTED}:
        return
    if single_folder(records) is None:
        roots = _roots(records)
        raise ZipError(f"The zip has {len(roots)} root folders ({some(roots)}); torch writes one.", why=TWO_FILES)
    if any(len(record.name.encode()) > _LONGEST for record in records):
        raise ZipError(f"The zip has record names of more than {_LONGEST} bytes: torch cuts them where it lists them.")
    for name in below:
        if name not in _LOOKED_UP and name.lower() in _LOOKED_UP:
            raise ZipError(f"The zip record {name!r} is not written as torch writes it; torch takes it for {name.lower()!r}.")
    if _PICKLE in below and _CONSTANTS not in below and "model.json" in below:
        raise ZipError("torch.load would read the zip's data.pkl, torch.jit.load its model.json.", why=TWO_FILES)
    if _EXPORTED in below and below & {_PICKLE, _CONSTANTS}:
        raise ZipError("torch.load would read the zip's pickle, torch.export.load its exported program.", why=TWO_FILES)
