"""Several archives in one file, as a part of a `torch.distributed.checkpoint` has them: each is saved for itself.

All of them call their records `archive/data.pkl`, `archive/data/0` ..., so that a record says nothing of whose it is. The file
is cut into parts where an archive ends, and where a second pickle begins; no part ever sees the records of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckpt_tools.errors import CkptError, NotACheckpointError, UnsupportedContainerError, ZipError
from ckpt_tools.formats.base import Decoded
from ckpt_tools.formats.sharded import Keys
from ckpt_tools.formats.zip.headers import END, END64, LOCATOR64
from ckpt_tools.io.content import CHUNK
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.operations.repair.salvage import LostArchive, Salvaged, salvage_walked
from ckpt_tools.operations.repair.zip_walk import Found, Walked, names_of_pickles, walk_zip
from ckpt_tools.tree.findings import mending
from ckpt_tools.tree.nodes import List, Node, Storage
from ckpt_tools.tree.visit import reachable

_LAST = END64.size + LOCATOR64.size + END.size  # as torch ends every archive
# Signature -> how many bytes from there to the archive's end: one of the three tells it.
_ENDS = {b"PK\x06\x06": _LAST, b"PK\x06\x07": LOCATOR64.size + END.size, b"PK\x05\x06": END.size}
_ANY_END = re.compile(b"|".join(map(re.escape, _ENDS)))
_PROGRAM = re.compile(r"/code/|/constants\.pkl$|/archive_format$")
_PART = "The file is a part of a distributed checkpoint; its tensors have no names."
_CUT = "The file ends within an archive or behind one; only the .metadata of its folder says which others there were."


def salvage_zips(source: Source, *, keep_damaged: bool) -> Salvaged:
    """What is whole in a file of one archive or of several.

    Raises:
        ZipError, ChecksumError, PickleError: nothing is. See `salvage.salvage_walked`.
    """
    walked = walk_zip(source)
    if any(_PROGRAM.search(found.name) for found in walked.records):
        raise no_program(str(source.path))
    spans = list(_spans(source, walked))
    if len(spans) < 2:
        salvaged = salvage_walked(source, walked, keep_damaged=keep_damaged)
    else:
        salvaged = _joined(source, spans, keep_damaged)
    if any(name.module.split(".")[0] == "__torch__" for name in salvaged.decoded.globals):  # cut before its code
        raise no_program(str(source.path))
    if len(spans) > 1 or source.path.suffix == ".distcp":
        salvaged.notes.append(("several-archives", _PART))
        if not _ends_whole(source):
            salvaged.notes.append(("cut-archives", _CUT))
    return salvaged


def no_program(path: str) -> UnsupportedContainerError:
    """The error for a program, damaged or not: its code is a part of it, and nothing here would prove or write that."""
    fix = f"If it opens, its state dict can be taken out: {mending('convert', path, '--objects plain')}"
    return UnsupportedContainerError(f"{path} is a program, and ckpt repair does not mend programs.", fix=fix)


def _ends_whole(source: Source) -> bool:
    return source.size >= END.size and source.read(source.size - END.size, 4) == b"PK\x05\x06"


def _spans(source: Source, walked: Walked) -> Iterator[tuple[int, int]]:
    """Start and end of every part that has records."""
    start = 0
    for end in [*_boundaries(source, walked.records), source.size]:
        records = [found for found in walked.records if start <= found.header < end]
        if records:
            pickles = sorted(found.header for found in names_of_pickles(records))
            for begin in pickles[1:]:
                yield start, begin
                start = begin
            yield start, end
            start = end


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


def _joined(source: Source, spans: Sequence[tuple[int, int]], keep_damaged: bool) -> Salvaged:
    """The parts as a list, as `formats.zip.concatenated` reads a whole file; those without a pickle are lost archives."""
    parts: list[Salvaged | None] = []
    lost: list[LostArchive] = []
    for index, (start, end) in enumerate(spans):
        window = Window(source, start, end - start)
        walked = walk_zip(window)
        try:
            parts.append(salvage_walked(window, walked, keep_damaged=keep_damaged))
        except NotACheckpointError:  # the disk failed
            raise
        except CkptError as error:
            sizes = sum(found.compressed for found in walked.records if "/data/" in found.name)
            parts.append(None)
            lost.append(LostArchive(index, sizes, f"{error.what} {error.why}".strip().rstrip(".")))
    if len({part.decoded.byteorder for part in parts if part is not None}) != 1:
        why = lost[0].why if lost else "Some are big-endian, others little-endian."
        raise ZipError(f"None of the file's {len(spans)} archives can be saved.", why=why)
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
