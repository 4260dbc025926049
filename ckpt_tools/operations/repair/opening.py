"""Open a file that may be damaged: as it is where it opens, else by whatever still tells where its tensors are."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.edit.devices import map_storages
from ckpt_tools.errors import (
    CkptError,
    DamagedFileError,
    LimitError,
    NotACheckpointError,
    PickleError,
    RepairError,
    UnsupportedContainerError,
)
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import CUT_ARCHIVE, PART_CONTAINERS, PROGRAMS, Decoded, Keys, is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.safetensors import MAX_HEADER
from ckpt_tools.formats.single import HEAD, collector_paused, may_be_packed, naming
from ckpt_tools.formats.torch_legacy import is_stream
from ckpt_tools.formats.zip_directory import END, END64, LOCAL, LOCATOR64, PROGRAM, SIGNATURE_LOCAL, RecordRange, is_mended
from ckpt_tools.io import temporaries
from ckpt_tools.io.content import CHUNK, Content, Deflated, Range
from ckpt_tools.io.member_paths import archive_and_member
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Files, Window
from ckpt_tools.operations.check.reading import DamagedRecord, read_checkpoint
from ckpt_tools.operations.repair.flipped_bits import FlippedBits, flipped_back, told
from ckpt_tools.operations.repair.salvage import LostArchive, Salvaged, filled, salvage_legacy, salvage_walked
from ckpt_tools.operations.repair.zip_walk import Found, Walked, follows, pickles_of, walk_zip
from ckpt_tools.parts import dcp
from ckpt_tools.parts.names import DCP_METADATA
from ckpt_tools.parts.open import open_checkpoint, open_source
from ckpt_tools.tree.findings import counted_bytes, mending
from ckpt_tools.tree.nodes import List, Node, Storage
from ckpt_tools.tree.visit import reachable

# --- several archives in one file, as a part of a `torch.distributed.checkpoint` has them


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
    if any(re.search(PROGRAM, found.name) for found in walked.records):
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
    """The parts as a list, as `formats.zip_archives` reads a whole file; those without a pickle are lost archives."""
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


# --- bytes that are too many or too few around a checkpoint


_SEARCHED = 1 << 20
_HEADER = re.compile(rb'\{\s*"')


class TruncatedSource(Window):
    """A source that claims another size than its file has: bytes are read where they are, those beyond the end cannot be."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        super().__init__(source, start, min(size, source.size - start))
        self.available, self.size = self.size, size


def is_text_mode(source: Source) -> bool:
    """Whether every line feed of a file has a carriage return before it, as no file of this size has by chance."""
    pairs, last = 0, b""
    for start in range(0, source.size, CHUNK):
        block = last + source.read(start, min(CHUNK, source.size - start))
        pairs += block.count(b"\r\n")
        if block.count(b"\n") - block.startswith(b"\n") * bool(last) != block.count(b"\r\n"):
            return False
        last = block[-1:]
    return pairs > 0


def without_carriage_returns(source: Source) -> Iterator[bytes]:
    """The bytes with every CR LF as LF: the exact undoing of a transfer that made CR LF of every LF."""
    last = b""
    for start in range(0, source.size, CHUNK):
        block = last + source.read(start, min(CHUNK, source.size - start))
        last = b"\r" if block.endswith(b"\r") else b""
        yield block[: len(block) - len(last)].replace(b"\r\n", b"\n")
    yield last


def undo_text_mode(source: Source, target: Path) -> None:
    """Write the file without its carriage returns."""
    with target.open("wb") as file:
        for block in without_carriage_returns(source):
            file.write(block)


def find_safetensors(source: Source) -> int | None:
    """Where in the first megabyte a safetensors file begins, that is eight bytes before a header of that length."""
    data = source.read(0, min(_SEARCHED, source.size))
    for match in _HEADER.finditer(data, 8):
        length = int.from_bytes(data[match.start() - 8 : match.start()], "little")
        if (
            2 <= length <= MAX_HEADER
            and match.start() + length <= source.size
            and _end(source, match.start(), length) is not None
        ):
            return match.start() - 8
    return None


def find_legacy(source: Source) -> int | None:
    """Where in the first megabyte a torch-legacy stream begins: at the pickled magic number."""
    data = source.read(0, min(_SEARCHED, source.size))
    starts = (match.start() for match in re.finditer(rb"\x80[\x02-\x05]", data))
    return next((start for start in starts if is_stream(data[start : start + 64])), None)


def salvage_safetensors(source: Source, start: int) -> Salvaged:
    """A safetensors file that begins at an offset, and whose tail may be missing or be followed by other bytes."""
    length, end = int.from_bytes(source.read(start, 8), "little"), header_end(source, start)
    if end is None:
        raise DamagedFileError("The safetensors header is cut or damaged.", why="Without it no name and no shape is known.")
    claimed = TruncatedSource(source, start, 8 + length + end)
    unread: dict[str, str] = {}
    salvaged = Salvaged(safetensors.decode(claimed, unread))
    entries = safetensors.entries_of(salvaged.decoded)
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
            changed = replace(storage, key=f"{storage.key} unread")
            salvaged.lost[id(changed)] = why[storage.key]
            return changed
        left = max(0, claimed.available - content.offset)
        if left >= content.length:
            return storage
        changed = Storage(
            storage.key, storage.dtype, storage.nbytes, None, filled(Range(claimed, content.offset, left), storage.nbytes)
        )
        salvaged.lost[id(changed)] = f"the file ends after {left} of its {storage.nbytes} bytes"
        return changed

    salvaged.decoded.root = map_storages(salvaged.decoded.root, cut_short)
    return salvaged


def header_end(source: Source, start: int) -> int | None:
    """Where the tensors of a safetensors file that begins here end; None where its header is cut or damaged."""
    length = int.from_bytes(source.read(start, 8), "little")
    return _end(source, start + 8, length) if start + 8 + length <= source.size else None


def _end(source: Source, at: int, length: int) -> int | None:
    """Where the last tensor ends, as a header says; None when it is not one."""
    try:
        header = load_json(source.read(at, length))
        rows = [info["data_offsets"] for name, info in header.items() if name != "__metadata__"]
        ends = [end for _, end in rows]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return max(ends, default=0) if all(type(end) is int and 0 <= end < 1 << 60 for end in ends) else None


_LONG = 1 << 20  # bytes of a header
_REPAIRED = ("torch-zip", "torch-legacy", "torch-tar", "safetensors", "dcp-part")


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], *, keep_damaged: bool, scratch: Path) -> Iterator[tuple[Salvaged, str]]:
    """What can be had of a file, and what was wrong with it as a whole ("" where it opens)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(collector_paused())
        salvaged, was = _open(path, keep_damaged, scratch, stack)
        salvaged.notes += cut_by_metadata(salvaged.decoded.source)
        yield salvaged, was


def _open(path: str | os.PathLike[str], keep_damaged: bool, scratch: Path, stack: contextlib.ExitStack) -> tuple[Salvaged, str]:
    try:
        checkpoint = stack.enter_context(open_checkpoint(path))
    except (UnsupportedContainerError, LimitError):
        raise
    except CkptError as error:
        error.__traceback__ = None  # which holds everything that was read so far
        source = open_source(archive_and_member(path)[0])
        stack.callback(source.close)
        refuse_packed(source)
        if isinstance(source, Files) or source.path.suffix == ".json":
            raise _of_several_files(path, f"{error.what} {error.why}") from None
        return _salvaged(source, error, keep_damaged, scratch, stack)
    if checkpoint.packed is not None:
        refuse_packed(checkpoint.packed.source)
    if checkpoint.container not in _REPAIRED:
        raise _not_repaired(path, checkpoint.container)
    cut = next((warned.found for warned in checkpoint.warnings if warned.code == CUT_ARCHIVE), "")
    if cut:
        return _salvage(checkpoint.decoded.source, DamagedFileError(f"{cut}."), keep_damaged), cut
    salvaged = proved(checkpoint)
    return (_searched(salvaged, keep_damaged) if checkpoint.container == "torch-zip" else salvaged), ""


def _searched(salvaged: Salvaged, keep_damaged: bool) -> Salvaged:
    """What is whole in a file that opens, but has records that do not match: often a header alone is wrong."""
    if not salvaged.lost:
        return salvaged
    try:
        walked = _salvage(salvaged.decoded.source, DamagedFileError("Records do not match."), keep_damaged)
    except RepairError:
        return salvaged
    return walked if len(walked.lost) < len(salvaged.lost) else salvaged


def refuse_packed(source: Source) -> None:
    """Raise UnsupportedContainerError for a compressed file or a tar: what is in it is mended once it is unpacked."""
    head = source.read(0, min(HEAD, source.size)) if not isinstance(source, Files) else b""
    if not may_be_packed(head):
        return
    from ckpt_tools.formats.packed import unpack_command

    if command := unpack_command(source, head):
        raise UnsupportedContainerError(
            f"{source.path} is packed, and ckpt repair mends what is not.",
            fix=f"Unpack it first ({command}), and repair the file that was in it.",
        )


def _not_repaired(path: str | os.PathLike[str], container: str) -> UnsupportedContainerError:
    """The error for what opens, in a container that repair does not mend; with the command that helps."""
    if container in ("sharded", "dcp", *PART_CONTAINERS):
        return _of_several_files(path, "Its structure is whole.")
    if container in PROGRAMS:
        return no_program(str(path))
    taken = "What it holds can be written anew"
    fix = f"{taken}: {mending('convert', str(path), '--objects plain')}"
    return UnsupportedContainerError(f"{path} opens, and ckpt repair does not mend {container}.", fix=fix)


def _of_several_files(path: str | os.PathLike[str], why: str) -> UnsupportedContainerError:
    check = f"ckpt check {shlex.quote(str(path))}"
    return UnsupportedContainerError(
        f"{path} is a checkpoint of several files, and ckpt repair mends one file.", why=why.strip(),
        fix=f"Repair the damaged one ({check} names it) and put the result in its place, or get it again.",
    )  # fmt: skip


def proved(checkpoint: Checkpoint) -> Salvaged:
    """An open checkpoint with the storages marked that do not match their CRC-32."""
    decoded = checkpoint.decoded
    mismatches = read_checkpoint(checkpoint).mismatches
    bad = {(id(row.source), row.record.data): row for row in mismatches}
    salvaged = Salvaged(decoded)
    mended = _flipped(mismatches)

    def mark(storage: Storage) -> Storage:
        content = storage.content
        if not isinstance(content, RecordRange | Deflated) or (id(content.source), content.offset) not in bad:
            return storage
        row = bad[id(content.source), content.offset]
        if type(content) is RecordRange and row in mended:
            return replace(storage, content=flipped_back(content, mended[row]))
        if row.other_writer:
            return replace(storage, content=Range(content.source, content.offset, storage.nbytes))
        changed = replace(storage, content=_as_it_is(content, row))
        salvaged.lost[id(changed)] = f"the record {row.record.name!r} does not match its CRC-32"
        return changed

    decoded.root = map_storages(decoded.root, mark) if bad else decoded.root
    checkpoint.root = None  # the tree is let go of once it is laid out, and has no second owner
    salvaged.notes += [told(row.record.name, bit, row.record.size) for row, bit in mended.items()]
    salvaged.notes += _writers([row for row in mismatches if row not in mended])
    return salvaged


def _flipped(mismatches: list[DamagedRecord]) -> dict[DamagedRecord, int]:
    """The records that a single flipped bit explains, and the bit."""
    bits, found = FlippedBits(), {}
    for row in mismatches:
        if row.found is not None and not row.record.deflated:
            bit = bits.find(row.found, row.record.crc, row.record.size)
            if bit is not None and (bit < 0 or not row.other_writer):
                found[row] = bit
    return found


def _as_it_is(content: RecordRange | Deflated, row: DamagedRecord) -> Content:
    """The bytes of a damaged record, not as a record any more: they get the CRC-32 that they have."""
    if isinstance(content, RecordRange):
        return Range(content.source, content.offset, content.length)
    return replace(content, crc=0) if row.found is not None else filled(None, content.length)


def _writers(mismatches: list[DamagedRecord]) -> list[tuple[str, str]]:
    others = [row for row in mismatches if row.other_writer]
    if not others:
        return []
    text = (
        f"{len(others)} records match the CRC-32 behind them, and not the directory's: two processes wrote to it at once. "
        "Each is whole; which of the two it is from cannot be told."
    )
    return [("mixed-writers", text)]


def _salvaged(
    source: Source, error: CkptError, keep_damaged: bool, scratch: Path, stack: contextlib.ExitStack
) -> tuple[Salvaged, str]:
    """What is left in a file that does not open, and why it does not."""
    was = error.what
    if source.size and is_text_mode(source):
        copy = _undone(source, scratch, stack)
        note = ("text-mode", "The carriage returns that a text-mode transfer put before every line feed are removed.")
        try:
            salvaged = proved(stack.enter_context(open_checkpoint(copy.path)))
        except CkptError:
            salvaged = _salvage(copy, error, keep_damaged)
        salvaged.notes.insert(0, note)
        return salvaged, was
    return _salvage(source, error, keep_damaged), was


def _undone(source: Source, scratch: Path, stack: contextlib.ExitStack) -> Source:
    """A copy of the file without the carriage returns, removed when the stack closes."""
    try:
        path = stack.enter_context(temporaries.scratch(scratch))
        undo_text_mode(source, path)
    except CkptError:  # some of ours are an OSError too
        raise
    except OSError as problem:
        raise RepairError(f"The copy of {source.path} without carriage returns cannot be written.", why=f"{problem}.") from None
    copy = Source(path)
    stack.callback(copy.close)
    return copy


def _salvage(source: Source, error: CkptError, keep_damaged: bool) -> Salvaged:
    """The containers that may be in the file, each tried."""
    try:
        with naming(source), limits.of_file(source.size):
            return _by_kind(source, keep_damaged)
    except (NotACheckpointError, UnsupportedContainerError):  # the disk failed; a program
        raise
    except CkptError as problem:
        told = error if isinstance(error, NotACheckpointError) and not _has_zip(source) else problem
        raise RepairError(
            f"Nothing can be saved from {source.path}.", why=f"{told.what} {told.why}".strip(), fix=told.fix
        ) from None


def _by_kind(source: Source, keep_damaged: bool) -> Salvaged:
    """What is whole in the container that begins first in the file; in a zip where no other does."""
    kind, start = _begins(source)
    if kind == "safetensors":
        return salvage_safetensors(source, start)
    if kind != "torch-legacy":
        return salvage_zips(source, keep_damaged=keep_damaged)
    salvaged = salvage_legacy(Window(source, start, source.size - start))
    if start:
        salvaged.notes.append(("leading-bytes", f"{counted_bytes(start)} before the stream are left out."))
    return salvaged


def _begins(source: Source) -> tuple[str, int]:
    """Which container begins first in the file, and where; "" for none that is known by its beginning."""
    head = source.read(0, min(HEAD, source.size))
    if is_zip(head):
        return "zip", 0
    if (start := 0 if safetensors.sniff(head) else find_safetensors(source)) is not None:
        return "safetensors", start
    start = find_legacy(source)
    return ("torch-legacy", start) if start is not None else ("", 0)


def may_be_saved(source: Source, error: DamagedFileError) -> bool:
    """Whether repair may help with a damaged file, told from what is wrong with it and from its first megabyte."""
    if not source.size or may_be_packed(source.read(0, min(HEAD, source.size))):
        return False
    if is_text_mode(source):
        return is_mended(source)
    kind, start = _begins(source)
    if kind == "safetensors":
        return _has_tensors(source, start)
    if kind == "torch-legacy" or isinstance(error, PickleError):
        return kind == "torch-legacy" and start > 0
    return _has_zip(source) and is_mended(source)


def _has_tensors(source: Source, start: int) -> bool:
    """Whether a safetensors header can be read; a long one is not read twice."""
    if header_end(source, start) is None:
        return False
    try:
        with limits.of_file(source.size):
            return int.from_bytes(source.read(start, 8), "little") > _LONG or bool(salvage_safetensors(source, start))
    except CkptError:
        return False


def _has_zip(source: Source) -> bool:
    """Whether a zip record begins in the first megabyte."""
    return b"PK\x03\x04" in source.read(0, min(1 << 20, source.size))


def scratch_place(target: Path, *, dry_run: bool) -> Path:
    """Beside what temporaries go: the output, which needs the room anyway; in a dry run a file where the system puts them."""
    return Path(tempfile.gettempdir(), target.name) if dry_run else target
