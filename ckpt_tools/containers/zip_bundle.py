"""zip-bundle: a zip whose members are torch files, as stable-baselines3 and others save an agent.

    policy.pth, policy.optimizer.pth, pytorch_variables.pth   stored torch-zips: subtrees under their member names
    data                                                      JSON: plain values (pickles in it stay text)
    system_info.txt, _stable_baselines3_version               text

Anything else is kept as bytes. Source: stable_baselines3/common/save_util.py, `save_to_zip_file`.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ckpt_tools.containers import torch_zip, torchscript
from ckpt_tools.containers.base import Decoded, Warned
from ckpt_tools.containers.zip_directory import Directory, Record, read_directory
from ckpt_tools.errors import LimitError, UnsupportedContainerError, ZipError
from ckpt_tools.files import Source
from ckpt_tools.plan import read
from ckpt_tools.sources import Window
from ckpt_tools.tree import Dict, List, Node

_ZIP = b"PK\x03\x04"
_MAX_MEMBERS, _MAX_INLINE, _MAX_JSON_DEPTH = 1000, 16 << 20, 100


def sniff(source: Source, directory: Directory) -> bool:
    """Whether some member is a zip of its own, stored as it is."""
    return len(directory.records) <= _MAX_MEMBERS and any(_is_archive(source, record) for record in directory.records)


def _is_archive(source: Source, record: Record) -> bool:
    return not record.deflated and record.size >= len(_ZIP) and source.read(record.data, len(_ZIP)) == _ZIP


def decode(source: Source, directory: Directory) -> Decoded:
    """Every member as a part of one tree; no tensor bytes.

    Raises:
        ZipError, PickleError, TensorError: a member breaks a promise. LimitError: a member that is no checkpoint and too large.
    """
    unusual = ["an archive around checkpoints"]
    bundle = Decoded("zip-bundle", Dict(), source, unusual=unusual, has_checksums=True, records=directory.records)
    if directory.trailing:
        bundle.warnings.append(Warned("trailing-bytes", f"{directory.trailing} bytes after the archive", "nothing; not kept"))
    seen: set[str] = set()
    for number, record in enumerate(directory.records):
        if _is_archive(source, record):
            part = _part(source, record, f"{number}_" if seen else "")
            seen.add(part.byteorder)
            _merge(bundle, record.name, part)
        else:
            bundle.root.items.append((record.name, _value(source, record)))
    if len(seen) > 1:
        raise ZipError("The members of the archive are of both byte orders.", fix="Unpack it and convert them one by one.")
    return bundle


def _part(source: Source, record: Record, keys: str) -> Decoded:
    """A member as a checkpoint of its own, its records placed where they are in the whole file."""
    window = Window(source, record.data, record.size)
    inner = read_directory(window)
    member = f"{record.name}!"
    placed = [
        replace(row, name=member + row.name, header=row.header + record.data, data=row.data + record.data,
                following=row.following + record.data) for row in inner.records
    ]  # fmt: skip
    names = {row.name for row in inner.records}
    folder = next((name.partition("/")[0] for name in names), "")
    if f"{folder}/data.pkl" not in names or torchscript.sniff(names, folder):
        raise UnsupportedContainerError(
            f"The member {record.name!r} is a zip, but not one that torch.save wrote.",
            fix="Unpack the archive and convert its members one by one.",
        )
    return torch_zip.decode(source, Directory(placed, inner.start + record.data, inner.trailing), folder, member, keys)


def _merge(bundle: Decoded, name: str, part: Decoded) -> None:
    bundle.root.items.append((name, part.root))
    bundle.globals = list(dict.fromkeys((*bundle.globals, *part.globals)))
    bundle.unusual = list(dict.fromkeys((*bundle.unusual, *part.unusual)))
    bundle.warnings += [replace(warned, found=f"{warned.found} in {name}") for warned in part.warnings]
    bundle.records = [*bundle.records, *part.records]
    bundle.storage_bytes += part.storage_bytes
    bundle.byteorder = part.byteorder
    bundle.has_checksums &= part.has_checksums


def _value(source: Source, record: Record) -> Node:
    """A member that is no checkpoint: JSON as plain values, text as text, anything else as bytes."""
    if record.size > _MAX_INLINE:
        raise LimitError(
            f"The member {record.name!r} is no checkpoint and has {record.size} bytes; {_MAX_INLINE} is the limit.",
            fix="Unpack the archive and convert its members one by one.",
        )
    data = read(torch_zip.record_content(source, record))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    try:
        return _node(json.loads(text), 0)
    except (ValueError, RecursionError):
        return text


def _node(value: object, depth: int) -> Node:
    if depth > _MAX_JSON_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        return Dict([(key, _node(item, depth + 1)) for key, item in value.items()])
    return List([_node(item, depth + 1) for item in value]) if isinstance(value, list) else value
