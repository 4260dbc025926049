"""zip-bundle: a zip whose members are checkpoints, as stable-baselines3 saves an agent, or as people pack a folder.

What starts as a checkpoint becomes a subtree under its member's name, JSON plain values, text text; anything else is kept as
bytes, up to a limit. Source: stable_baselines3/common/save_util.py, `save_to_zip_file`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError
from ckpt_tools.formats import numpy_files, plain_pickle
from ckpt_tools.formats.base import Keys, Warned, trailing
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.registry import Decode, containers
from ckpt_tools.formats.single import refuse_polyglot
from ckpt_tools.formats.torch_zip import decode_inner
from ckpt_tools.formats.zip_directory import SIGNATURE_LOCAL, Directory, Record, RecordRange, record_content, record_head
from ckpt_tools.io.content import chunks, read
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Spooled, Window
from ckpt_tools.tree.nodes import Dict, List, Node

_HEAD = 512  # bytes of a member that tell what it is
_MAX_MEMBERS, _MAX_JSON_DEPTH = 1000, 100
_JSON_STARTS = frozenset('{["-0123456789tfn')


def sniff(source: Source, directory: Directory) -> bool:
    """Whether some member starts as a checkpoint does: a zip of its own, or another container than a plain pickle."""
    records = directory.records
    if len(records) > _MAX_MEMBERS:
        return False
    source.prefetch([(record.data, min(record.compressed, _HEAD)) for record in records])
    heads = (record_head(source, record, _HEAD) for record in records)
    return any(head.startswith(SIGNATURE_LOCAL) or _kind(head) is not None for head in heads)


def _kind(head: bytes) -> Decode | None:
    return next((row.decode for row in containers(in_zips=True) if row.sniff(head)), None)


def decode(source: Source, directory: Directory) -> Checkpoint:
    if all(numpy_files.sniff(record_head(source, record, _HEAD)) for record in directory.records):  # whatever they are called
        return numpy_files.decode_npz(source, directory)
    items: list[tuple[Node, Node]] = []
    unusual = ["an archive around checkpoints"]
    decoded = Checkpoint("zip-bundle", Dict(items), source, unusual=unusual, has_checksums=True, records=directory.records)
    decoded.warnings += trailing(directory.trailing, "the archive")
    inflated, keys, byteorders = _Inflated(source), Keys(), set[str]()
    for record in directory.records:
        part = _member(source, record, inflated, decoded.warnings)
        if part is None:
            items += _value(source, record, decoded.warnings)
            continue
        items.append((record.name, keys.renew(part.root)))
        decoded.merge(part, record.name)
        if part.source is source:
            decoded.records = [*decoded.records, *part.records]
        decoded.storage_bytes += part.storage_bytes
        decoded.has_checksums &= part.has_checksums or part.container != "torch-zip"  # others have none to be trusted
        decoded.byteorder = part.byteorder
        byteorders.add(part.byteorder)
    if len(byteorders) > 1:
        what = "The members of the archive are of both byte orders."
        raise DamagedFileError(what, fix="Unpack it and convert them one by one.")
    if len(items) == len(directory.records) == 1:  # around one file: that itself
        decoded.root = items[0][1]
    return decoded


def _member(source: Source, record: Record, inflated: _Inflated, warnings: list[Warned]) -> Checkpoint | None:
    head = record_head(source, record, _HEAD)
    kind = _kind(head)
    if not (head.startswith(SIGNATURE_LOCAL) or kind is not None or plain_pickle.sniff(head)):
        return None
    try:
        place, start = inflated.place(record)
        if head.startswith(SIGNATURE_LOCAL):
            return decode_inner(place, start, record.size, record.name)
        # a stored one is checked by its CRC-32 when bytes leave, a deflated one was when inflated
        stored = None if record.deflated else RecordRange(source, record.data, record.size, record)
        window = Window(place, start, record.size, stored)
        if kind is None:
            return plain_pickle.decode(window)
        refuse_polyglot(window, head)
        return kind(window)
    except CkptError as error:
        if kind is None and not head.startswith(SIGNATURE_LOCAL) and not isinstance(error, LimitError):
            why = error.what.removesuffix(".")
            warnings.append(Warned("unread-member", f"the member {record.name!r}, a pickle that is kept as bytes: {why}"))
            return None
        error.what = f"The member {record.name!r}: {error.what}"
        raise


def _value(source: Source, record: Record, warnings: list[Warned]) -> list[tuple[Node, Node]]:
    """A member that is not a checkpoint: JSON as plain values, text, else bytes; one that is too large is left out."""
    budget = limits.budget(source.size)
    if record.size > budget.room(limits.MEMORY) // 2:
        found = f"the member {record.name!r}, {record.size} bytes that are not a checkpoint: they are not kept"
        warnings.append(Warned("left-out", found))
        return []
    budget.take(limits.MEMORY, record.size, f"The member {record.name!r} is too long.")
    data = read(record_content(source, record))
    value: Node = data
    with contextlib.suppress(UnicodeDecodeError):
        value = text = data.decode()
        if text.lstrip()[:1] in _JSON_STARTS:
            with contextlib.suppress(ValueError, LimitError):
                value = _node(load_json(text), 0)
    return [(record.name, value)]


def _node(value: Any, depth: int) -> Node:
    limits.check_depth(depth, "nested too deep", _MAX_JSON_DEPTH)
    if isinstance(value, dict):
        return Dict([(key, _node(item, depth + 1)) for key, item in value.items()])
    plain: Node = value
    return List([_node(item, depth + 1) for item in value]) if isinstance(value, list) else plain


class _Inflated:
    """Deflated members of an archive, inflated one behind the other into a temporary file that has no name."""

    def __init__(self, archive: Source) -> None:
        self.archive = archive
        self.inflated: Spooled | None = None

    def place(self, record: Record) -> tuple[Source, int]:
        """The source that a member can be read from by position, and where it starts there; a deflated one is inflated."""
        if not record.deflated:
            return self.archive, record.data
        self.inflated = self.inflated or Spooled(self.archive, ())
        start = self.inflated.size
        self.inflated.add(chunks(record_content(self.archive, record)))
        return self.inflated, start
