"""zip-bundle: a zip whose members are checkpoints, as stable-baselines3 saves an agent, or as people pack a folder.

    policy.pth, policy.optimizer.pth, model.safetensors   what starts as a checkpoint: subtrees under their member names
    data, config.json                                     JSON: plain values (pickles in it stay text)
    system_info.txt, _stable_baselines3_version           text

Anything else is kept as bytes, up to a limit. A stored member is read where it lies; a deflated one that is a checkpoint is
inflated into a temporary file without a name first. Source: stable_baselines3/common/save_util.py, `save_to_zip_file`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError
from ckpt_tools.formats import numpy_files, plain_pickle, torch_zip
from ckpt_tools.formats.base import Keys, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.registry import Decode, containers
from ckpt_tools.formats.single import refuse_polyglot
from ckpt_tools.formats.zip_directory import Directory, Record, RecordRange
from ckpt_tools.formats.zip_inner import decode_inner
from ckpt_tools.io.content import chunks, read
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Spooled, Window
from ckpt_tools.tree.nodes import Dict, List, Node, as_dict

_ZIP = b"PK\x03\x04"
_HEAD = 512  # bytes of a member that tell what it is
_MAX_MEMBERS = 1000
_MAX_JSON_DEPTH = 100
_JSON_STARTS = frozenset('{["-0123456789tfn')


def sniff(source: Source, directory: Directory) -> bool:
    """Whether some member starts as a checkpoint does: a zip of its own, or another container than a plain pickle."""
    records = directory.records
    if len(records) > _MAX_MEMBERS:
        return False
    source.prefetch([(record.data, min(record.compressed, _HEAD)) for record in records])
    heads = (torch_zip.record_head(source, record, _HEAD) for record in records)
    return any(head.startswith(_ZIP) or _kind(head) is not None for head in heads)


def is_npz(source: Source, directory: Directory) -> bool:
    """Whether every member is an array of NumPy's by its first bytes; `numpy.load` takes one without `.npy` in its name too."""
    return all(numpy_files.sniff(torch_zip.record_head(source, record, _HEAD)) for record in directory.records)


def _kind(head: bytes) -> Decode | None:
    return next((row.decode for row in containers() if row.in_zips and row.sniff(head)), None)


def decode(source: Source, directory: Directory) -> Checkpoint:
    """Every member as a part of one tree; no tensor bytes, but of deflated members, which are inflated whole."""
    unusual = ["an archive around checkpoints"]
    decoded = Checkpoint("zip-bundle", Dict(), source, unusual=unusual, has_checksums=True, records=directory.records)
    decoded.warnings += torch_zip.behind(source, directory)
    bundle = _Bundle(source, decoded)
    for record in directory.records:
        bundle.add(record)
    if len(bundle.byteorders) > 1:
        what = "The members of the archive are of both byte orders."
        raise DamagedFileError(what, fix="Unpack it and convert them one by one.")
    return decoded


class _Bundle:
    def __init__(self, source: Source, decoded: Checkpoint) -> None:
        self.source, self.decoded = source, decoded
        self.inflated = Inflated(source)
        self.keys = Keys()
        self.byteorders: set[str] = set()
        self.budget = limits.budget(source.size)

    def add(self, record: Record) -> None:
        head = torch_zip.record_head(self.source, record, _HEAD)
        decode = _kind(head)
        if head.startswith(_ZIP):
            self._merge(record.name, decode_archive(*self.inflated.place(record), record))
        elif decode is not None:
            window = self._window(record)
            with _named(record):
                refuse_polyglot(window, head)
                member = decode(window)
            self._merge(record.name, member)
        elif not plain_pickle.sniff(head) or not self._add_pickle(record):
            self._keep(record)

    def _window(self, record: Record) -> Window:
        """A member as a file; a stored one is checked by its CRC-32 when bytes leave, a deflated one was when inflated."""
        stored = None if record.deflated else RecordRange(self.source, record.data, record.size, record)
        return Window(*self.inflated.place(record), record.size, stored)

    def _add_pickle(self, record: Record) -> bool:
        """A member that looks like a pickle; False when it is not one of those that can be read, and is kept as bytes."""
        try:
            part = plain_pickle.decode(self._window(record))
        except LimitError:
            raise
        except CkptError as error:
            why = error.what.removesuffix(".")
            found = f"the member {record.name!r}, a pickle that is kept as bytes: {why}"
            self.decoded.warnings.append(Warned("unread-member", found))
            return False
        self._merge(record.name, part)
        return True

    def _keep(self, record: Record) -> None:
        """A member that is not a checkpoint: a value; one that is too large to be one is left out."""
        if record.size > self.budget.room(limits.MEMORY) // 2:
            found = f"the member {record.name!r}, {record.size} bytes that are not a checkpoint: they are not kept"
            self.decoded.warnings.append(Warned("left-out", found))
            return
        self.budget.take(limits.MEMORY, record.size, f"The member {record.name!r} is too long.")
        as_dict(self.decoded.root).items.append((record.name, _value(read(torch_zip.record_content(self.source, record)))))

    def _merge(self, name: str, part: Checkpoint) -> None:
        bundle = self.decoded
        as_dict(bundle.root).items.append((name, self.keys.renew(part.root)))
        bundle.merge(part, name)
        if part.source is self.source:
            bundle.records = [*bundle.records, *part.records]
        bundle.storage_bytes += part.storage_bytes
        bundle.byteorder = part.byteorder
        bundle.has_checksums &= part.has_checksums or part.container != "torch-zip"  # others have none to be trusted
        self.byteorders.add(part.byteorder)


@contextlib.contextmanager
def _named(record: Record) -> Iterator[None]:
    try:
        yield
    except CkptError as error:
        error.what = f"The member {record.name!r}: {error.what}"
        raise


def decode_archive(source: Source, start: int, record: Record) -> Checkpoint:
    with _named(record):
        return decode_inner(source, start, record.size, record.name)


def _value(data: bytes) -> Node:
    """A member that is not a checkpoint: JSON as plain values, text as text, anything else as bytes."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    if text.lstrip()[:1] not in _JSON_STARTS:
        return text
    try:
        return _node(load_json(text), 0)
    except (ValueError, LimitError):
        return text


def _node(value: Any, depth: int) -> Node:
    if depth > _MAX_JSON_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        return Dict([(key, _node(item, depth + 1)) for key, item in value.items()])
    plain: Node = value
    return List([_node(item, depth + 1) for item in value]) if isinstance(value, list) else plain


class Inflated:
    """Deflated members of an archive, inflated one behind the other into a temporary file that has no name."""

    def __init__(self, archive: Source) -> None:
        self.archive = archive
        self.inflated: Spooled | None = None

    def place(self, record: Record) -> tuple[Source, int]:
        """The source that a member can be read from by position, and where it starts there; a deflated one is inflated."""
        if not record.deflated:
            return self.archive, record.data
        try:
            if self.inflated is None:
                self.inflated = Spooled(self.archive, ())
            start = self.inflated.size
            self.inflated.add(chunks(torch_zip.record_content(self.archive, record)))
        except CkptError:  # some of ours are an OSError too
            raise
        except OSError as error:
            raise LimitError(
                f"The deflated member {record.name!r} cannot be inflated into a temporary file of {record.size} bytes.",
                why=f"{error.strerror or error}.", fix="Unpack the archive, or set TMPDIR to a folder with room.",
            ) from None  # fmt: skip
        return self.inflated, start
