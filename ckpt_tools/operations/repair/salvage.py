"""What is whole in a file that does not open: a tree in which the storages that are lost are marked."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckpt_tools.edit.casts import map_storages
from ckpt_tools.errors import ChecksumError, DamagedFileError, PickleError, TensorError
from ckpt_tools.formats import safetensors, torch_legacy
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.formats.safetensors import MAX_HEADER
from ckpt_tools.formats.zip_directory import check_pickle
from ckpt_tools.io.content import CHUNK, Computed, Content, Range, chunks, read
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.operations.repair.flipped_bits import reported
from ckpt_tools.operations.repair.mends import Missing
from ckpt_tools.operations.repair.zip_walk import Found, Walk, ambiguous, by_name, pickles_of
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.text import listed
from ckpt_tools.tree.exchange import DROP, Drop, replace
from ckpt_tools.tree.findings import counted_bytes
from ckpt_tools.tree.nodes import Entry, Node, Object, Storage
from ckpt_tools.tree.visit import reachable

NO_CHECKSUMS = "The file carries no checksums: bytes of tensors that were changed look whole."
_OWN = re.compile(r"data\.pkl|data/[^/]+|byteorder|version|\.data/.*|\.format_version|\.storage_alignment")
_ID, _U64 = 40, (1 << 64) - 1  # two numbers of twenty digits; the first is a hash of the names


@dataclass(slots=True)
class Salvaged:
    """A decoded checkpoint; the ids of its storages that are lost, with the reason."""

    checkpoint: Checkpoint
    lost: dict[int, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def cut(self, storage: Storage, content: Content, there: int) -> Storage:
        """A storage of which the file has some bytes only."""
        changed = dataclasses.replace(storage, content=_filled(content, storage.nbytes))
        self.lost[id(changed)] = f"the file ends after {there} of its {storage.nbytes} bytes"
        return changed


def _filled(content: Content | None, nbytes: int) -> Computed:
    """What there is of a damaged storage, cut or filled up with zeros to its size."""

    def work() -> Iterator[bytes | memoryview]:
        left = nbytes
        for chunk in chunks(content) if content is not None else ():
            part = memoryview(chunk)[:left]
            left -= len(part)
            yield part
        for start in range(0, left, CHUNK):
            yield bytes(min(CHUNK, left - start))

    return Computed(nbytes, work)


# --- torch-zip, without trusting its directory


def salvage_zip(walk: Walk, records: Sequence[Found], *, keep_damaged: bool) -> Salvaged:
    """A torch-zip from its records."""
    pickle = _pickle(walk.source, records)
    zipped = _Zip(walk, records, pickle.name.removesuffix("/data.pkl"))
    storages = Storages(zipped.locate)
    machine = Machine(read(pickle.content(walk.source)), MAKERS, storages.storage)
    try:
        root = machine.load()
        validate(root)
    except (PickleError, TensorError) as error:
        if pickle.proof:
            raise
        raise ChecksumError(
            "The pickle that lists the tensors is damaged or cut, and cannot be read to its end.", why=error.what,
            fix="An interrupted download or a full disk does that: get the file again.",
        ) from None  # fmt: skip
    if not pickle.proof and not keep_damaged:
        raise ChecksumError(
            "The pickle that lists the tensors is damaged or cut.", why="Names and shapes could be wrong.",
            fix="Take it as it is: `keep_damaged=True`.",
        )  # fmt: skip
    made = {key: storage for key, (_, storage) in storages.by_key.items()}
    for name in misplaced(records, zipped.chosen, zipped.prefix, made):
        if made[name].nbytes:
            zipped.lost.setdefault(name, "its record is not where its name belongs: the name may be damaged")
    order = zipped.byteorder()
    checkpoint = Checkpoint(
        "torch-zip", root, walk.source, list(machine.globals), list(machine.unusual), {}, [],
        sum(storage.nbytes for storage in made.values()), order or "little", walk.has_checksums, zipped.folder,
    )  # fmt: skip
    notes = list(zipped.notes())
    if made and not order and not zipped.is_older(pickle):
        text = "The record that says the order of bytes is lost: little-endian is assumed, and may be wrong."
        notes.append(("assumed-byteorder", text))
    if not pickle.proof:
        notes.append(("damaged-pickle", "The pickle matches no checksum: names, shapes and values in it may be wrong."))
    return Salvaged(checkpoint, {id(made[key]): why for key, why in zipped.lost.items()}, notes)


def _pickle(source: Source, records: Sequence[Found]) -> Found:
    """The pickle that lists the tensors: the last that is proved, else the last."""
    pickles = list(by_name(pickles_of(records)).values())
    if not pickles:
        raise DamagedFileError(
            "No pickle that lists tensors is left in the file.", why="Without it no name and no shape is known."
        )
    chosen = ([found for found in pickles if found.proof] or pickles)[-1]
    check_pickle(source, chosen.size or 0, deflated=chosen.deflated)
    return chosen


class _Zip:
    """The records of one archive by their names; `lost` says what is wrong with storages that are not whole."""

    def __init__(self, walk: Walk, records: Sequence[Found], folder: str) -> None:
        self.walk, self.source, self.records, self.folder = walk, walk.source, records, folder
        self.prefix = f"{folder}/data/"
        self.chosen = by_name(records)
        self.ambiguous = set(ambiguous(records, self.chosen))
        self.lost: dict[str, str] = {}

    def locate(self, key: str, nbytes: int) -> Content:
        """The bytes of a storage; for one that is lost what there is of it, and zeros."""
        found = self.chosen.get(self.prefix + key)
        if not nbytes:
            return Range(self.source, 0, 0)
        if found is None:
            self.lost[key] = "its record is not in the file"
            return _filled(None, nbytes)
        if found.proof and found.size == nbytes and found.name not in self.ambiguous:
            return found.content(self.source)
        there = min(nbytes, self.source.size - found.data)
        if found.name in self.ambiguous:
            self.lost[key] = "two whole records have its name, with different bytes"
        elif found.proof:
            self.lost[key] = f"its record has {found.size} bytes, and the pickle says {nbytes}"
        elif there < nbytes and not found.deflated:
            self.lost[key] = f"the file ends after {there} of its {nbytes} bytes"
        else:
            self.lost[key] = "its bytes match no checksum"
        if found.deflated:
            return _filled(None if self.walk.sum(found) is None else found.content(self.source), nbytes)
        return _filled(Range(self.source, found.data, there), nbytes)

    def byteorder(self) -> str:
        """What the record of that name says; "" where it is lost."""
        found = self.chosen.get(f"{self.folder}/byteorder")
        if found is None or not found.proof or (found.size or 0) > 16 or found.name in self.ambiguous:
            return ""
        return "big" if read(found.content(self.source)) == b"big" else "little"

    def is_older(self, pickle: Found) -> bool:
        """Whether the storages come right behind the pickle, as before torch 2.1, when nothing said the order of bytes."""
        storages = [found for found in self.chosen.values() if found.name.startswith(self.prefix)]
        behind = [found for found in storages if found.header > pickle.header]
        return bool(behind) and min(behind, key=lambda found: found.header).follows(pickle)

    def notes(self) -> Iterator[tuple[str, str]]:
        first = min((found.header for found in self.records), default=0)
        if first:
            yield "leading-bytes", f"{first} bytes before the archive are left out."
        if not self.walk.has_checksums:
            yield "no-checksums", f"{NO_CHECKSUMS} Records were checked by their sizes only."
        chosen = self.chosen.values()
        yield from (reported(found.name, found.bit, found.size or 0) for found in chosen if found.proof == "flipped bit")
        others = [found for found in chosen if found.proof in ("descriptor", "header") and self.walk.contradicts(found)]
        if others:
            text = f"{len(others)} records are whole, and not those of the directory: two processes wrote to the file at once."
            yield "mixed-writers", f"{text} Whose each of these is, is unknown: {listed([found.name for found in others])}."
        elif not self.walk.directory and (text := self._of_several()):
            yield "mixed-writers", text
        if twice := len(self.records) - len(self.chosen):
            yield "repeated-records", f"{twice} records have the name of another; of each name the last whole one was taken."
        # A checkpoint that is a member of another archive: what else that held is not in it
        own = (row for row in self.records if row.name.startswith(f"{self.folder}/"))
        mine = (row for row in own if _OWN.fullmatch(row.name, len(self.folder) + 1))
        first = min((found.header for found in mine), default=0)
        if outside := [found.name for found in self.records if found.header < first]:
            yield "enclosed", f"It is in another archive, after {listed(outside)}; the rest of that archive is not recovered."

    def _of_several(self) -> str:
        """What torch's number of all records, a hash of their CRC-32s in order (`inline_container.cc`), says of others."""
        names = [found.name for found in self.records]
        name = f"{self.folder}/.data/serialization_id"
        rows = self.records[: names.index(name) + 1] if name in names else self.records[:1]
        if rows[-1].size != _ID or not rows[-1].proof:
            return ""
        apart = any(not found.follows(before) for before, found in pairwise(rows))
        if apart or not all(found.proof or found.crc for found in rows):
            return "A record is damaged and the directory lost: whether all others are from one writer is unknown."
        number = 0
        for found in rows[:-1]:
            if found.size:
                number ^= found.crc + 0x9E3779B9 + (number << 6) + (number >> 2) & _U64
        if read(rows[-1].content(self.source))[_ID // 2 :] == b"%020d" % number:
            return ""
        return "Two processes wrote to the file: its last record describes others. Which record is from which is unknown."


def misplaced(records: Sequence[Found], chosen: dict[str, Found], prefix: str, keys: Collection[str]) -> set[str]:
    """The storages whose names are not certain: neither of the two records beside theirs is as near in torch's order."""
    names = [prefix + key for key in keys]
    found = Counter(record.name for record in records if record.proof)
    if all(found[name] == 1 for name in names):  # a damaged name would leave one of them without a record
        return set()
    unproved = {name for name in names if name in chosen and chosen[name].proof not in ("", "directory")}
    doubtful = []
    for order in (sorted(names, key=lambda name: (len(name), name)), sorted(names)):
        ranks, certain = {name: rank for rank, name in enumerate(order)}, set[int]()
        for distance in (1, 2):
            for row in zip(*(records[start:] for start in range(distance + 1)), strict=False):
                before, behind = row[0], row[-1]
                first = ranks.get(before.name, -1 if distance == 1 and not before.name.startswith(prefix) else -9)
                last = ranks.get(behind.name, len(order) if distance == 1 and not behind.name.startswith(prefix) else -9)
                if last - first == distance and all(two.follows(one) for one, two in pairwise(row)):
                    certain |= {before.header, behind.header}
        doubtful.append({name.removeprefix(prefix) for name in unproved if chosen[name].header not in certain})
    return min(doubtful, key=len)


# --- safetensors and torch-legacy


class _CutSource(Window):
    """A source that claims another size than its file has: bytes beyond the end cannot be read."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        super().__init__(source, start, min(size, source.size - start))
        self.available, self.size = self.size, size


def find_safetensors(source: Source, data: bytes) -> int | None:
    """Where in the first bytes of a file a safetensors file begins: eight bytes before a header of that length."""
    for match in re.finditer(rb'\{\s*"', data[8:]):
        length = int.from_bytes(data[match.start() : match.start() + 8], "little")
        if 2 <= length <= MAX_HEADER and safetensors_size(source, match.start()) is not None:
            return match.start()
    return None


def safetensors_size(source: Source, start: int) -> int | None:
    """The bytes of a safetensors file, as its header says; None where that is cut or damaged."""
    length = int.from_bytes(source.read(start, 8), "little")
    if start + 8 + length > source.size:
        return None
    try:
        header = load_json(source.read(start + 8, length))
        rows = [info["data_offsets"] for name, info in header.items() if name != "__metadata__"]
        ends = [end for _, end in rows]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if not all(type(end) is int and 0 <= end < 1 << 60 for end in ends):
        return None
    return 8 + length + max(ends, default=0)


def salvage_safetensors(source: Source, start: int) -> Salvaged:
    """A safetensors file that begins at an offset, and whose tail may be missing or be followed by other bytes."""
    size = safetensors_size(source, start)
    if size is None:
        raise DamagedFileError("The safetensors header is cut or damaged.", why="Without it no name and no shape is known.")
    claimed = _CutSource(source, start, size)
    unread: dict[str, str] = {}
    salvaged = Salvaged(safetensors.decode(claimed, unread))
    entries = safetensors.entries_of(salvaged.checkpoint)
    why = {entries[name].storage.key: text for name, text in unread.items()}
    if start:
        salvaged.notes.append(("leading-bytes", f"{counted_bytes(start)} before the header are left out."))
    behind = source.size - start - claimed.size
    if behind > 0:
        salvaged.notes.append(("trailing-bytes", f"{counted_bytes(behind)} behind the tensors are left out."))
        text = f"{counted_bytes(behind)} are too many, and nothing proves that they are the last: tensors may begin too early."
        salvaged.notes.append(("unproved-places", text))

    def cut_short(storage: Storage) -> Storage:
        content = storage.content
        assert isinstance(content, Range)
        if storage.key in why:
            changed = dataclasses.replace(storage, key=f"{storage.key} unread")
            salvaged.lost[id(changed)] = why[storage.key]
            return changed
        left = max(0, claimed.available - content.offset)
        return storage if left >= content.length else salvaged.cut(storage, Range(claimed, content.offset, left), left)

    salvaged.checkpoint.root = map_storages(salvaged.checkpoint.root, cut_short)
    return salvaged


def salvage_legacy(source: Source, start: int) -> Salvaged:
    """A torch-legacy file up to its last whole storage: each follows the one before it, behind the pickles."""
    there: dict[int, int] = {}
    salvaged = Salvaged(torch_legacy.decode(Window(source, start, source.size - start), there))
    if start:
        salvaged.notes.append(("leading-bytes", f"{counted_bytes(start)} before the stream are left out."))

    def fill(storage: Storage) -> Storage:
        if id(storage) not in there:
            return storage
        assert storage.content is not None
        return salvaged.cut(storage, storage.content, there[id(storage)])

    salvaged.checkpoint.root = map_storages(salvaged.checkpoint.root, fill)
    return salvaged


# --- missing bytes


def find_missing(root: Node, lost: dict[int, str], *, kept: bool) -> list[Missing]:
    """The tensors that lie on lost storages."""
    found = []
    for tensor in find_tensors(root) if lost else ():
        below = {id(node): node for node in reachable(tensor.node) if type(node) is Storage}
        reason = next((lost[key] for key in below if key in lost), None)
        nbytes = tensor.node.nbytes if type(tensor.node) is Entry else sum(node.nbytes for node in below.values())
        if reason is not None and (type(tensor.node) is not Entry or _needs_storage(tensor.node)):
            found.append(Missing(list(tensor.where), nbytes, reason, kept))
    return found


def _needs_storage(entry: Entry) -> bool:
    """Not an empty view of a storage with bytes; an empty tensor's own storage is lost where its description is."""
    return bool(entry.nbytes) or not entry.storage.nbytes


def leave_out(root: Node, lost: dict[int, str]) -> Node:
    """The tree without tensors on lost storages, and without those storages; None when nothing is left."""
    if not lost:
        return root
    objects = [tensor.node for tensor in find_tensors(root) if type(tensor.node) is Object]
    gone = {id(node) for node in objects if any(type(below) is Storage and id(below) in lost for below in reachable(node))}

    def swap(node: Node) -> Node | Drop:
        if type(node) is Entry and id(node.storage) in lost and _needs_storage(node):
            return DROP
        if (type(node) is Storage and id(node) in lost) or id(node) in gone:
            return DROP
        return node

    return replace(root, swap)
