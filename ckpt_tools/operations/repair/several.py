"""Several archives in one file, as a part of a `torch.distributed.checkpoint` has them: each is saved for itself.

All of them call their records `archive/data.pkl`, `archive/data/0` ..., so that a record says nothing of whose it is. The file
is cut into parts where an archive ends, and where a second pickle or a second record of any name begins; no part ever sees
the records of another. Where bytes are gone, what is left of two archives may stand in one part: a record counts as the
pickle's own where the directory places it, or where whole records lead from the pickle to it without a gap.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ckpt_tools.errors import CkptError, DamagedFileError, NotACheckpointError, UnsupportedContainerError
from ckpt_tools.formats import dcp
from ckpt_tools.formats.base import Decoded
from ckpt_tools.formats.folders import DCP_METADATA
from ckpt_tools.formats.sharded import Keys
from ckpt_tools.formats.zip.headers import END, END64, LOCAL, LOCATOR64, PROGRAM, SIGNATURE_LOCAL
from ckpt_tools.io.content import CHUNK
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.operations.repair.salvage import LostArchive, Salvaged, salvage_walked
from ckpt_tools.operations.repair.zip_walk import Found, Walked, follows, pickles_of, walk_zip
from ckpt_tools.tree.findings import mending
from ckpt_tools.tree.nodes import List, Node, Storage
from ckpt_tools.tree.visit import reachable

_LAST = END64.size + LOCATOR64.size + END.size  # as torch ends every archive
# Signature -> how many bytes from there to the archive's end: one of the three tells it.
_ENDS = {b"PK\x06\x06": _LAST, b"PK\x06\x07": LOCATOR64.size + END.size, b"PK\x05\x06": END.size}
_ANY_END = re.compile(b"|".join(map(re.escape, _ENDS)))
_SUFFIX = ".distcp"
_PART = "The file is a part of a distributed checkpoint; its tensors have no names."
_CUT = "The file ends within an archive or behind one; only the .metadata of its folder says which others there were."
_GAP = "Between its archives are bytes of none; only the .metadata of its folder says which others there were."


def salvage_zips(source: Source, *, keep_damaged: bool) -> Salvaged:
    """What is whole in a file of one archive or of several."""
    walked = walk_zip(source)
    if any(PROGRAM.search(found.name) for found in walked.records):
        raise no_program(str(source.path))
    spans = list(_spans(source, walked))
    is_part = len(spans) > 1 or source.path.suffix == _SUFFIX
    if len(spans) < 2:
        salvaged = salvage_walked(source, _own(walked) if is_part else walked, keep_damaged=keep_damaged)
    else:
        salvaged = _joined(source, spans, keep_damaged)
    if any(name.module.split(".")[0] == "__torch__" for name in salvaged.decoded.globals):  # cut before its code
        raise no_program(str(source.path))
    if is_part:
        salvaged.notes.append(("several-archives", _PART))
        if not _ends_whole(source, source.size):
            salvaged.notes.append(("cut-archives", _CUT))
        elif not all(_begins_whole(source, start) and _is_long(source, start, end) for start, end in spans):
            salvaged.notes.append(("cut-archives", _GAP))
    return salvaged


def cut_by_metadata(source: Source) -> Iterator[tuple[str, str]]:
    """A note where the `.metadata` beside a part says that it had more: a cut between two archives leaves no trace in it."""
    beside = source.path.parent / DCP_METADATA
    if source.path.suffix != _SUFFIX or not os.path.isfile(beside):
        return
    with contextlib.suppress(CkptError), contextlib.closing(Source(beside)) as metadata:  # a damaged one tells nothing
        length = dcp.length_of(metadata, source.path.name)
        if length > source.size:
            yield "cut-archives", f"The file has {source.size} bytes, and the folder's .metadata says that it had {length}."


def no_program(path: str) -> UnsupportedContainerError:
    """The error for a program, damaged or not: its code is a part of it, and nothing here would prove or write that."""
    fix = f"If it opens, its state dict can be taken out: {mending('convert', path, '--objects plain')}"
    return UnsupportedContainerError(f"{path} is a program, and ckpt repair does not mend programs.", fix=fix)


def _begins_whole(source: Source, start: int) -> bool:
    """Whether a record begins here; its signature may be damaged, and not gone."""
    head = source.read(start, min(LOCAL.size, source.size - start))
    return sum(one != other for one, other in zip(head, SIGNATURE_LOCAL, strict=False)) < 2


def _ends_whole(source: Source, end: int) -> bool:
    """Whether an archive ends here, as one of the three records at its end says."""
    return any(end >= size and source.read(end - size, 4) == signature for signature, size in _ENDS.items())


def _is_long(source: Source, start: int, end: int) -> bool:
    """Whether one of the two records at an archive's end that know its length says this one."""
    if end - start < _LAST:
        return False
    raw = source.read(end - _LAST, _LAST)
    *_, wide, wide_at = END64.unpack_from(raw)
    *_, size, at, _ = END.unpack_from(raw, _LAST - END.size)
    return end - start - _LAST in (wide + wide_at, size + at)


def _spans(source: Source, walked: Walked) -> Iterator[tuple[int, int]]:
    """Start and end of every part that has records."""
    pickles = {found.header for found in pickles_of(walked.records)}
    several = len(pickles) > 1 or source.path.suffix == _SUFFIX
    start = 0
    for end in [*_boundaries(source, walked.records), source.size]:
        records = [found for found in walked.records if start <= found.header < end]
        for begin in _repeats(records, pickles) if several else ():
            yield start, begin
            start = begin
        if records:
            yield start, end
            start = end


def _repeats(records: Sequence[Found], pickles: Collection[int]) -> Iterator[int]:
    """Where another archive begins without the end of the one before it: at a pickle, or at a whole record of a known name."""
    seen: set[str] = set()
    has_pickle = False
    for found in records:
        is_pickle = found.header in pickles
        if (is_pickle and has_pickle) or (found.proof and found.name in seen):
            yield found.header
            seen, has_pickle = set(), False
        if found.proof:
            seen.add(found.name)
        has_pickle |= is_pickle


def _boundaries(source: Source, records: Sequence[Found]) -> list[int]:
    """Where archives end, as one of the three records at an archive's end says that does not lie in a tensor's bytes."""
    inside = [(found.data, found.data + found.compressed) for found in records if found.proof]
    ends: set[int] = set()
    for start in range(0, source.size, CHUNK):
        block = source.read(start, min(CHUNK + 3, source.size - start))
        for match in _ANY_END.finditer(block):
            at = start + match.start()
            if not any(first <= at < last for first, last in inside):
                ends.add(min(at + _ENDS[match.group()], source.size))
    return sorted(ends)


def _own(walked: Walked) -> Walked:
    """The records of a part with no proof for those that may be another archive's."""
    last = next(iter(pickles_of(walked.records)), None)
    records = []
    for found in walked.records:
        listed = any(claim.header == found.header and claim.crc == found.crc for claim in walked.directory.get(found.name, ()))
        leads_here = last is not None and (found.data == last.data or follows(found, last))
        last = found if leads_here else last
        records.append(found if listed or leads_here else replace(found, proof=""))
    return replace(walked, records=records)


def _joined(source: Source, spans: Sequence[tuple[int, int]], keep_damaged: bool) -> Salvaged:
    """The parts as a list, as `formats.zip.concatenated` reads a whole file; those without a pickle are lost archives."""
    parts: list[Salvaged | None] = []
    lost: list[LostArchive] = []
    for index, (start, end) in enumerate(spans):
        window = Window(source, start, end - start)
        walked = walk_zip(window)
        try:
            parts.append(salvage_walked(window, _own(walked), keep_damaged=keep_damaged))
        except NotACheckpointError:  # the disk failed
            raise
        except CkptError as error:
            sizes = sum(found.compressed for found in walked.records if "/data/" in found.name)
            parts.append(None)
            lost.append(LostArchive(index, sizes, f"{error.what} {error.why}".strip().rstrip(".")))
    if len({part.decoded.byteorder for part in parts if part is not None}) != 1:
        why = lost[0].why if lost else "Some are big-endian, others little-endian."
        raise DamagedFileError(f"None of the file's {len(spans)} archives can be saved.", why=why)
    return _list(source, parts, lost)


def _list(source: Source, parts: Sequence[Salvaged | None], lost: list[LostArchive]) -> Salvaged:
    """One list, with None where an archive is lost, so that the others keep their places."""
    keys, reasons = Keys(), dict[int, str]()
    roots: list[Node] = [None] * len(parts)
    whole = {index: part for index, part in enumerate(parts) if part is not None}
    for index, part in whole.items():
        before = [node for node in reachable(part.decoded.root) if type(node) is Storage]
        root = keys.renew(part.decoded.root)
        after = [node for node in reachable(root) if type(node) is Storage]
        reasons |= {id(new): part.lost[id(old)] for old, new in zip(before, after, strict=True) if id(old) in part.lost}
        roots[index] = root
    decoders = [part.decoded for part in whole.values()]
    decoded = Decoded(
        "dcp-part", List(roots), source,
        list(dict.fromkeys(name for part in decoders for name in part.globals)),
        list(dict.fromkeys(use for part in decoders for use in part.unusual)), {}, [],
        sum(part.storage_bytes for part in decoders), decoders[0].byteorder, all(part.has_checksums for part in decoders),
    )  # fmt: skip
    return Salvaged(decoded, reasons, [note for part in whole.values() for note in part.notes], lost)
