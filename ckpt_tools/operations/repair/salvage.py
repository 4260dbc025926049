"""What is whole in a file that does not open: a tree in which the storages that are lost are marked."""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckpt_tools.edit.casts import map_storages
from ckpt_tools.errors import ChecksumError, DamagedFileError, PickleError, TensorError
from ckpt_tools.formats import torch_legacy
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.formats.zip_directory import check_pickle
from ckpt_tools.io.content import CHUNK, Computed, Content, Range, chunks, read
from ckpt_tools.io.output import Source
from ckpt_tools.operations.repair.flipped_bits import told
from ckpt_tools.operations.repair.zip_walk import Found, Walked, ambiguous, by_name, follows, pickles_of, without_contradicted
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.text import listed
from ckpt_tools.tree.exchange import DROP, Drop, replace
from ckpt_tools.tree.nodes import Entry, Node, Object, Storage, Where
from ckpt_tools.tree.visit import reachable

NO_CHECKSUMS = "The file carries no checksums: bytes of tensors that were changed look whole."


@dataclass(slots=True)
class Salvaged:
    """A decoded checkpoint with missing tensors."""

    checkpoint: Checkpoint
    lost: dict[int, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)


def filled(content: Content | None, nbytes: int) -> Computed:
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


def salvage_walked(source: Source, walked: Walked, *, keep_damaged: bool = False) -> Salvaged:
    """A torch-zip from its records, without trusting its directory."""
    walked = without_contradicted(walked)
    pickle = _pickle(source, walked)
    folder = pickle.name.removesuffix("/data.pkl")
    locator = _Locator(source, by_name(walked.records), ambiguous(walked.records), folder)
    storages = Storages(locator.locate)
    machine = Machine(read(pickle.content(source)), MAKERS, storages.storage)
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
    locator.tell_misplaced(walked.records, storages.by_key)
    made = {key: storage for key, (_, storage) in storages.by_key.items()}
    checkpoint = Checkpoint(
        "torch-zip", root, source, list(machine.globals), list(machine.unusual), {}, [],
        sum(storage.nbytes for storage in made.values()), locator.byteorder() or "little", walked.has_checksums, folder,
    )  # fmt: skip
    lost = {id(made[key]): why for key, why in locator.lost.items()}
    notes = list(_notes(walked, locator, source))
    if made and locator.assumes_order(pickle):
        text = "The record that says the order of bytes is lost: little-endian is assumed, and may be wrong."
        notes.append(("assumed-byteorder", text))
    if not pickle.proof:
        notes.append(("damaged-pickle", "The pickle matches no checksum: names, shapes and values in it may be wrong."))
    return Salvaged(checkpoint, lost, notes)


def _pickle(source: Source, walked: Walked) -> Found:
    """The pickle that lists the tensors: the last that is proved, else the last."""
    pickles = list(by_name(pickles_of(walked.records)).values())
    if not pickles:
        raise DamagedFileError(
            "No pickle that lists tensors is left in the file.", why="Without it no name and no shape is known."
        )
    proved = [found for found in pickles if found.proof]
    chosen = (proved or pickles)[-1]
    check_pickle(source, chosen.size or 0, deflated=chosen.deflated)
    return chosen


@dataclass(slots=True)
class _Locator:
    """Where a storage's bytes are; what is wrong with those that are not whole."""

    source: Source
    records: dict[str, Found]
    ambiguous: set[str]
    folder: str
    lost: dict[str, str] = field(default_factory=dict)

    def locate(self, key: str, nbytes: int) -> Content:
        """The bytes of a storage; for one that is lost what there is of it, and zeros."""
        found = self.records.get(f"{self.folder}/data/{key}")
        if not nbytes:
            return Range(self.source, 0, 0)
        if found is None:
            self.lost[key] = "its record is not in the file"
            return filled(None, nbytes)
        if found.proof and found.size == nbytes and found.name not in self.ambiguous:
            return found.content(self.source)
        there = min(nbytes, self.source.size - found.data)
        if found.name in self.ambiguous:
            self.lost[key] = "two whole records have its name, with different bytes"
        elif found.proof:
            self.lost[key] = f"its record has {found.size} bytes, and the pickle says {nbytes}"
        elif there < nbytes:
            self.lost[key] = f"the file ends after {there} of its {nbytes} bytes"
        else:
            self.lost[key] = "its bytes match no checksum"
        return filled(found.content(self.source) if found.deflated else Range(self.source, found.data, there), nbytes)

    def tell_misplaced(self, records: Sequence[Found], keys: Collection[str]) -> None:
        """Those whose bytes may be another's are lost too."""
        prefix = f"{self.folder}/data/"
        for name in misplaced(records, prefix, keys):
            self.lost.setdefault(name.removeprefix(prefix), "its record is not where its name belongs: the name may be damaged")

    def byteorder(self) -> str:
        """What the record of that name says; "" where it is lost."""
        found = self.records.get(f"{self.folder}/byteorder")
        if found is None or not found.proof or (found.size or 0) > 16 or found.name in self.ambiguous:
            return ""
        return "big" if read(found.content(self.source)) == b"big" else "little"

    def assumes_order(self, pickle: Found) -> bool:
        """Whether the order of bytes is not known: before torch 2.1 the storages came right behind the pickle, without it."""
        prefix = f"{self.folder}/data/"
        storages = [found for name, found in self.records.items() if name.startswith(prefix) and found.header > pickle.header]
        first = min(storages, key=lambda found: found.header, default=None)
        return not self.byteorder() and (first is None or not follows(first, pickle))


def _notes(walked: Walked, locator: _Locator, source: Source) -> Iterator[tuple[str, str]]:
    first = min((found.header for found in walked.records), default=0)
    if first:
        yield "leading-bytes", f"{first} bytes before the archive are left out."
    if not walked.has_checksums:
        yield "no-checksums", f"{NO_CHECKSUMS} Records were checked by their sizes only."
    records = locator.records.values()
    yield from (told(found.name, found.bit, found.size or 0) for found in records if found.proof == "flipped bit")
    others = [found for found in records if found.proof in ("descriptor", "header") and walked.contradicts(found)]
    if others:
        text = f"{len(others)} records are whole, and not those of the directory: two processes wrote to the file at once."
        yield ("mixed-writers", f"{text} Whose each of these is, is unknown: {listed([found.name for found in others])}.")
    elif not walked.directory and (text := _of_several(walked.records, f"{locator.folder}/.data/serialization_id", source)):
        yield "mixed-writers", text
    twice = len(walked.records) - len(locator.records)
    if twice:
        yield "repeated-records", f"{twice} records have the name of another; of each name the last whole one was taken."
    # A checkpoint that is a member of another archive: what else that held is not in it
    prefix = f"{locator.folder}/"
    mine = (row for row in walked.records if row.name.startswith(prefix) and _OWN.fullmatch(row.name, len(prefix)))
    first = min((found.header for found in mine), default=0)
    if outside := [found.name for found in walked.records if found.header < first]:
        yield "enclosed", f"It is in another archive, after {listed(outside)}; the rest of that archive is not recovered."


def _of_several(records: Sequence[Found], name: str, source: Source) -> str:
    """What torch's number of all records, a hash of their CRC-32s in order (`inline_container.cc`), says of others."""
    rows = list(records[: 1 + next((index for index, found in enumerate(records) if found.name == name), 0)])
    if rows[-1].size != _ID or not rows[-1].proof:
        return ""
    apart = any(not follows(found, before) for before, found in pairwise(rows))
    if apart or not all(found.proof or found.crc for found in rows):
        return "A record is damaged and the directory lost: whether all others are from one writer is unknown."
    number = 0
    for found in rows[:-1]:
        if found.size:
            number ^= found.crc + 0x9E3779B9 + (number << 6) + (number >> 2) & _U64
    if read(rows[-1].content(source))[_ID // 2 :] == b"%020d" % number:
        return ""
    return "Two processes wrote to the file: its last record describes others. Which record is from which is unknown."


_ID, _U64 = 40, (1 << 64) - 1  # two numbers of twenty digits; the first is a hash of the names
_OWN = re.compile(r"data\.pkl|data/[^/]+|byteorder|version|\.data/.*|\.format_version|\.storage_alignment")


def salvage_legacy(source: Source) -> Salvaged:
    """A torch-legacy file up to its last whole storage: each follows the one before it, behind the pickles."""
    there: dict[int, int] = {}
    salvaged = Salvaged(torch_legacy.decode(source, there))

    def fill(storage: Storage) -> Storage:
        if id(storage) not in there:
            return storage
        changed = dataclasses.replace(storage, content=filled(storage.content, storage.nbytes))
        salvaged.lost[id(changed)] = f"the file ends after {there[id(storage)]} of its {storage.nbytes} bytes"
        return changed

    salvaged.checkpoint.root = map_storages(salvaged.checkpoint.root, fill)
    return salvaged


# --- missing bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """A tensor whose bytes are not whole. `bytes` is what it needs."""

    where: Where
    bytes: int
    why: str


def find_lost(root: Node, lost: dict[int, str]) -> list[Lost]:
    """The tensors that lie on lost storages."""
    found = []
    for tensor in find_tensors(root) if lost else ():
        below = {id(node): node for node in reachable(tensor.node) if type(node) is Storage}
        reason = next((lost[key] for key in below if key in lost), None)
        if reason is not None:
            nbytes = tensor.node.nbytes if type(tensor.node) is Entry else sum(node.nbytes for node in below.values())
            if nbytes or type(tensor.node) is not Entry:
                found.append(Lost(tensor.where, nbytes, reason))
    return found


def leave_out(root: Node, lost: dict[int, str]) -> Node:
    """The tree without tensors on lost storages, and without those storages; None when nothing is left."""
    if not lost:
        return root
    objects = [tensor.node for tensor in find_tensors(root) if type(tensor.node) is Object]
    gone = {id(node) for node in objects if any(type(below) is Storage and id(below) in lost for below in reachable(node))}

    def swap(node: Node) -> Node | Drop:
        if type(node) is Entry and id(node.storage) in lost and node.nbytes:
            return DROP
        if (type(node) is Storage and id(node) in lost) or id(node) in gone:
            return DROP
        return node

    return replace(root, swap)


def misplaced(records: Sequence[Found], prefix: str, keys: Collection[str]) -> set[str]:
    """The names of whole storages that are not known for sure: they do not stand where the order has them."""
    names = [prefix + key for key in keys]
    found = Counter(record.name for record in records if record.proof)
    if all(found[name] == 1 for name in names):  # a damaged name would leave one of them without a record
        return set()
    orders = sorted(names, key=lambda name: (len(name), name)), sorted(names)
    return min((set(_misplaced(records, prefix, order)) for order in orders), key=len)


def _misplaced(records: Sequence[Found], prefix: str, order: Sequence[str]) -> Iterator[str]:
    """The same for one order of the names."""
    rank = {name: index for index, name in enumerate(order)}
    fitting: list[Found] = []
    for row in _rows(records):
        storages = [found for found in row if found.name.startswith(prefix)]
        ranks = [rank[found.name] - index if found.name in rank else None for index, found in enumerate(storages)]
        first = _first(ranks, begins=len(storages) < len(row) and not row[0].name.startswith(prefix))
        for found, at in zip(storages, ranks, strict=True):
            if at is not None and at == first:
                fitting.append(found)
            elif found.proof != "directory" and found.name in rank:
                yield found.name
    in_order = _longest([rank[found.name] for found in fitting])
    yield from (found.name for place, found in enumerate(fitting) if place not in in_order and found.proof != "directory")


def _rows(records: Sequence[Found]) -> Iterator[list[Found]]:
    """Records one right behind the other."""
    row: list[Found] = []
    for found in records:
        if row and not follows(found, row[-1]):
            yield row
            row = []
        row.append(found)
    if row:
        yield row


def _first(ranks: Sequence[int | None], *, begins: bool) -> int | None:
    """Which place in the order a row begins at, as most of its names say; None where that is not told."""
    votes = Counter(rank for rank in ranks if rank is not None)
    if begins:
        votes[0] += 1
    most = votes.most_common(2)
    return most[0][0] if len(most) == 1 or (most and most[0][1] > most[1][1]) else None


def _longest(numbers: Sequence[int]) -> set[int]:
    """The places of the longest row of numbers that grow."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        at = bisect.bisect_left(ends, number)
        ends[at : at + 1] = [number]
        places[at : at + 1] = [place]
        before.append(places[at - 1] if at else -1)
    found: set[int] = set()
    place = places[-1] if places else -1
    while place >= 0:
        found.add(place)
        place = before[place]
    return found
