"""zip-bundle: a zip whose members are checkpoints, as stable-baselines3 saves an agent, or as people pack a folder.

What starts as a checkpoint becomes a subtree under its member's name, JSON plain values, text text; anything else is kept as
bytes, up to a limit. Source: stable_baselines3/common/save_util.py, `save_to_zip_file`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, LimitError
from ckpt_tools.formats import numpy_files, plain_pickle
from ckpt_tools.formats.base import Keys, Warned, trailing
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.registry import container_of
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
    return any(head.startswith(SIGNATURE_LOCAL) or container_of(head, in_zips=True) is not None for head in heads)


def decode(source: Source, directory: Directory) -> Checkpoint:
    records = directory.records
    if all(numpy_files.sniff(record_head(source, record, _HEAD)) for record in records):  # whatever they are called
        return numpy_files.decode_npz(source, directory)
    items: list[tuple[Node, Node]] = []
    unusual = ["an archive around checkpoints"]
    decoded = Checkpoint("zip-bundle", Dict(items), source, unusual=unusual, has_checksums=True, records=records)
    decoded.warnings += trailing(directory.trailing, "the archive")
    keys, inflated = Keys(), Spooled(source, ()) if any(record.deflated for record in records) else None

    def members() -> Iterator[tuple[str, Checkpoint]]:
        for record in records:
            if (part := _member(source, record, inflated, decoded.warnings)) is None:
                items.extend(_value(source, record, decoded.warnings))
                continue
            items.append((record.name, keys.renew(part.root)))
            if part.source is source:
                decoded.records = [*decoded.records, *part.records]
            yield record.name, part

    decoded.merge(members())
    if len(items) == len(records) == 1:  # around one file: that itself
        decoded.root = items[0][1]
    return decoded


def _member(source: Source, record: Record, inflated: Spooled | None, warnings: list[Warned]) -> Checkpoint | None:
    """A member that is a checkpoint; a deflated one is inflated behind the others, into a temporary file."""
    head = record_head(source, record, _HEAD)
    is_zip, reader = head.startswith(SIGNATURE_LOCAL), container_of(head, in_zips=True)
    if not (is_zip or reader is not None or plain_pickle.sniff(head)):
        return None
    try:
        place, start, stored = source, record.data, None
        if inflated is None or not record.deflated:  # checked by its CRC-32 when bytes leave, a deflated one when inflated
            stored = RecordRange(source, record.data, record.size, record)
        else:
            place, start = inflated, inflated.size
            inflated.add(chunks(record_content(source, record)))
        if is_zip:
            return decode_inner(place, (start, record.size), record.name)
        window = Window(place, start, record.size, stored)
        if reader is not None:
            refuse_polyglot(window, head)
        part: Checkpoint = (reader or plain_pickle).decode(window)
        return part
    except CkptError as error:
        if reader is None and not is_zip and not isinstance(error, LimitError):
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
    value: Node
    value = data = read(record_content(source, record))
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
