"""What kind of zip a file is, by its names: what torch.save wrote, a program, NumPy arrays, or an archive of such files.

In an archive whatever starts as a checkpoint becomes a subtree under its member's name, JSON plain values, text text; anything
else is kept as bytes, up to a limit. So stable-baselines3 saves an agent, and people pack a folder. Several torch-zips one
after another in one file are one rank's part of a distributed checkpoint, shown as a list.

Source: stable_baselines3/common/save_util.py, `save_to_zip_file`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, LimitError, PickleError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats import zip_directory as zips
from ckpt_tools.formats.base import Keys, Warned, is_zip, trailing
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import IN_ZIPS, container_of, reader, refuse_polyglot
from ckpt_tools.formats.zip_directory import Directory, Record
from ckpt_tools.io.content import Literal, chunks, read
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Spooled, Window
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.text import some
from ckpt_tools.tree.nodes import Dict, Entry, List, Node
from ckpt_tools.tree.visit import walk

sniff = is_zip


def decode(source: Source) -> Checkpoint:
    places, reads_first = split(source)
    if places:
        return _decode_several(source, places, reads_first=reads_first)
    try:
        directory = zips.read_directory(source)
    except zips.MissingDirectoryError:
        raise _cut_off(source) from None
    names, folder = torch_zip.names_of(directory.records)
    if (decoded := _saved(source, directory, names, folder)) is not None:
        return decoded
    if folder is not None:
        from ckpt_tools.formats import programs  # few files are anything else

        if f"{folder}/{torch_zip.CONSTANTS}" in names:
            return programs.decode_script(source, directory, folder)
        if programs.is_exported(names, folder):
            return programs.decode_exported(source, directory, folder)
    kinds = _kinds_of(source, directory.records)
    if kinds and set(kinds) <= {"npy"}:  # whatever they are called
        from ckpt_tools.formats import numpy_files

        return numpy_files.decode_npz(source, directory)
    if not set(kinds) <= {"", "pickle"}:
        return _decode_bundle(source, directory, kinds)
    why = f"It holds {some(sorted(names)) or 'nothing'}."
    raise UnsupportedContainerError("This is a zip file, but not one that torch.save wrote.", why=why)


def decode_inside(source: Source, place: zips.Place, name: str) -> Checkpoint:
    """What torch.save or NumPy wrote inside a file, whose records are called by this name."""
    directory = zips.read_directory(source, place)
    decoded = _saved(source, directory, *torch_zip.names_of(directory.records))
    if decoded is None:
        what, fix = f"{name!r} is a zip, but not one that torch.save wrote.", "Unpack it and convert its members one by one."
        raise UnsupportedContainerError(what, fix=fix)
    for record in decoded.records:
        record.name = f"{name}!{record.name}"
    return decoded


def _saved(source: Source, directory: Directory, names: set[str], folder: str | None) -> Checkpoint | None:
    if f"{folder}/{torch_zip.PICKLE}" in names and f"{folder}/{torch_zip.CONSTANTS}" not in names:
        return torch_zip.decode(source, directory, folder or "")
    if not torch_zip.is_npz(names):
        return None
    from ckpt_tools.formats import numpy_files

    return numpy_files.decode_npz(source, directory)


# --- an archive around checkpoints

_HEAD = 512  # bytes of a member that tell what it is
_MAX_MEMBERS, _MAX_JSON_DEPTH = 1000, 100
_JSON_STARTS = frozenset('{["-0123456789tfn')


def _kinds_of(source: Source, records: Sequence[Record]) -> list[str]:
    """The container that each member starts as, "" for none; of too many members of none."""
    if len(records) > _MAX_MEMBERS:
        return []
    source.prefetch([(record.data, min(record.compressed, _HEAD)) for record in records])
    return [container_of(zips.record_head(source, record, _HEAD), IN_ZIPS) for record in records]


def _decode_bundle(source: Source, directory: Directory, kinds: Sequence[str]) -> Checkpoint:
    records = directory.records
    items: list[tuple[Node, Node]] = []
    unusual = ["an archive around checkpoints"]
    decoded = Checkpoint("zip-bundle", Dict(items), source, unusual=unusual, has_checksums=True, records=records)
    decoded.warnings += trailing(directory.trailing, "the archive")
    keys, inflated = Keys(), Spooled(source, ()) if any(record.deflated for record in records) else None

    def members() -> Iterator[tuple[str, Checkpoint]]:
        for record, kind in zip(records, kinds, strict=True):
            part = _member(source, record, kind, inflated, decoded.warnings) if kind else None
            if part is None:
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


def _member(
    source: Source, record: Record, kind: str, inflated: Spooled | None, warnings: list[Warned]
) -> Checkpoint | None:  # fmt: skip
    """A member that starts as a checkpoint; a deflated one is inflated behind the others, into a temporary file."""
    try:
        place, start, stored = source, record.data, None
        if inflated is None or not record.deflated:  # checked by its CRC-32 when bytes leave, a deflated one when inflated
            stored = zips.RecordRange(source, record.data, record.size, record)
        else:
            place, start = inflated, inflated.size
            inflated.add(chunks(zips.record_content(source, record)))
        if kind == "torch-zip":
            return decode_inside(place, (start, record.size), record.name)
        window = Window(place, start, record.size, stored)
        if kind != "pickle":
            refuse_polyglot(window, window.read(0, min(_HEAD, window.size)))
        part: Checkpoint = reader(kind).decode(window)
        return part
    except CkptError as error:
        if kind == "pickle" and not isinstance(error, LimitError):
            why = error.what.removesuffix(".")
            warnings.append(Warned("unread-member", f"the member {record.name!r}, a pickle that is kept as bytes: {why}"))
            return None
        error.what = f"The member {record.name!r}: {error.what}"
        raise


def _value(source: Source, record: Record, warnings: list[Warned]) -> list[tuple[Node, Node]]:
    """A member that is not a checkpoint: JSON as plain values, text, else bytes; one that is too large is left out."""
    from ckpt_tools.io.parsers import load_json

    budget = limits.budget(source.size)
    if record.size > budget.room(limits.MEMORY) // 2:
        found = f"the member {record.name!r}, {record.size} bytes that are not a checkpoint: they are not kept"
        warnings.append(Warned("left-out", found))
        return []
    budget.take(limits.MEMORY, record.size, f"The member {record.name!r} is too long.")
    value: Node
    value = data = read(zips.record_content(source, record))
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


# --- several archives one after another

_ENDS = zips.END64.size + zips.LOCATOR64.size + zips.END.size  # as torch ends every archive, without a comment


def split(source: Source) -> tuple[list[zips.Place], bool]:
    """The place of each archive, when the file is several of torch's one after another and nothing else; else none.

    And whether torch opens the first of them. Refused where it would find yet another one.
    """
    found: list[zips.Place] = []
    end = source.size
    while end >= _ENDS:
        ends = source.read(end - _ENDS, _ENDS)
        signature, *_, size, start = zips.END64.unpack_from(ends)
        begin = end - _ENDS - start - size
        if signature != zips.SIGNATURE_END64 or ends[-zips.END.size :][:4] != zips.SIGNATURE_END or begin < 0:
            break
        found.append((begin, end - begin))
        limits.RECORDS.check(len(found), f"{source.path} holds more archives than any checkpoint.")
        end = begin
    if len(found) < 2 or end > 0:
        return [], False
    return found[::-1], _torch_reads_the_first(source, found[-1][1])


def _decode_several(source: Source, places: Sequence[zips.Place], *, reads_first: bool) -> Checkpoint:
    first = "; torch.load gives the first of them alone" if reads_first else ""
    found = f"{len(places)} archives one after another: one rank's part of a distributed checkpoint, without names{first}"
    roots, keys = List(), Keys()
    decoded = Checkpoint("dcp-part", roots, source, has_checksums=True)

    def parts() -> Iterator[tuple[str, Checkpoint]]:
        for index, place in enumerate(places):
            part = decode_inside(source, place, str(index))
            roots.items.append(keys.renew(part.root))
            yield str(index), part

    decoded.merge(parts())
    decoded.warnings = [Warned("several-archives", found, "the folder that it is from, with its .metadata")]
    return decoded


def _torch_reads_the_first(source: Source, first: int) -> bool:
    """Whether torch opens the file, as the first archive, which is so long; mostly it opens none."""
    ends = source.size - _ENDS
    _, _, at, _ = zips.LOCATOR64.unpack(source.read(ends + zips.END64.size, zips.LOCATOR64.size))
    *_, start, _ = zips.END.unpack(source.read(source.size - zips.END.size, zips.END.size))
    if at + zips.END64.size <= source.size and source.read(at, 4) == zips.SIGNATURE_END64:
        *_, start = zips.END64.unpack(source.read(at, zips.END64.size))
    if start + 4 > source.size or source.read(start, 4) != zips.SIGNATURE_CENTRAL:
        return False
    if at != first - _ENDS:
        what = f"{source.path} is several archives one after another, and torch.load would find another one in it."
        raise DamagedFileError(what, why=TWO_FILES)
    return True


# --- a torch-zip whose end is missing: sizes stand in the pickle, since `torch.save` writes none in the headers before records

_BETWEEN = 4096  # bytes between what is known of a record and the header of the next: descriptor, small records


def _cut_off(source: Source) -> DamagedFileError:
    from ckpt_tools.pickling.stream import Part, Pickles  # few files need it

    what, ends = "The zip directory at the end of the file is missing", f"The file ends after {source.size} bytes"
    storages = Storages(lambda _key, _nbytes: Literal(b""))
    try:
        name, start = _header(source, 0)
        if not name.endswith(f"/{torch_zip.PICKLE}") or start > source.size:
            raise PickleError("There is none.")
        pickles = Pickles(Part(source, start, source.size))
        root = pickles.load(lambda stream, offset: Machine(stream, MAKERS, storages.storage, offset))[1]
        validate(root)
    except CkptError as error:
        why = "The pickle that lists them is cut off or missing." if isinstance(error, PickleError) else error.what
        return DamagedFileError(f"{what}; no tensor can be told from what is left.", why=f"{ends}. {why}", whole=0)
    folder = f"{name.removesuffix('.pkl')}/"
    whole, end, last = set[str](), pickles.position, ""
    while (found := source.read(end, min(_BETWEEN, source.size - end)).find(zips.SIGNATURE_LOCAL)) >= 0:
        name, end = _header(source, end + found)
        _, storage = storages.by_key.get(name.removeprefix(folder), (None, None))
        end += storage.nbytes if storage is not None else 0
        if end > source.size:
            last = f", in the record {name!r}" if name else ""
            break
        whole.add(name.removeprefix(folder))
    keys = [node.storage.key for _, node in walk(root, plain=False) if type(node) is Entry]
    count = sum(key in whole for key in keys)
    return DamagedFileError(f"{what}: {count} of {len(keys)} tensors complete.", why=f"{ends}{last}.", whole=count)


def _header(source: Source, at: int) -> tuple[str, int]:
    """The name in a local header, and where its bytes start; behind the end of the file for one that is cut itself."""
    if at + zips.LOCAL.size > source.size:
        return "", source.size + 1
    header = zips.LocalHeader.at(source, at)
    return header.name.decode("utf-8", "replace"), header.data
