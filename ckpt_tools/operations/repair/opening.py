"""Open a file that may be damaged: as it is where it opens, else by whatever still tells where its tensors are."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.edit.casts import map_storages
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
from ckpt_tools.formats.base import PART_CONTAINERS, PROGRAMS, is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.safetensors import MAX_HEADER
from ckpt_tools.formats.single import HEAD, may_be_packed, naming
from ckpt_tools.formats.torch_legacy import is_stream
from ckpt_tools.formats.zip_directory import PROGRAM, RecordRange, is_mended
from ckpt_tools.io import temporaries
from ckpt_tools.io.content import CHUNK, Content, Deflated, Range
from ckpt_tools.io.member_paths import archive_and_member
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Files, Window
from ckpt_tools.operations.check.reading import DamagedRecord, read_checkpoint
from ckpt_tools.operations.repair.flipped_bits import FlippedBits, flipped_back, told
from ckpt_tools.operations.repair.salvage import Salvaged, filled, salvage_legacy, salvage_walked
from ckpt_tools.operations.repair.zip_walk import Found, pickles_of, walk_zip
from ckpt_tools.parts.open import open_checkpoint, open_source
from ckpt_tools.tree.findings import counted_bytes, mending
from ckpt_tools.tree.nodes import Storage

# --- one archive, whose records have names of their own


# Where an archive ends: one of three records tells it.
_ANY_END = re.compile(rb"PK\x06\x06|PK\x06\x07|PK\x05\x06")


def salvage_zip(source: Source, *, keep_damaged: bool) -> Salvaged:
    """What is whole in a file of one archive; of several nothing tells which record is of which."""
    walked = walk_zip(source)
    if any(re.search(PROGRAM, found.name) for found in walked.records):
        raise no_program(str(source.path))
    later = sorted(found.header for found in pickles_of(walked.records))[1:2]
    walked.records = [found for found in walked.records if not later or found.header < later[0]]  # the first archive's
    if source.path.suffix == _PART or _goes_on(source, walked.records):
        raise _several_archives(source.path)
    salvaged = salvage_walked(source, walked, keep_damaged=keep_damaged)
    if any(name.module.split(".")[0] == "__torch__" for name in salvaged.checkpoint.globals):  # cut before its code
        raise no_program(str(source.path))
    if later:
        text = f"Another archive begins at byte {later[0]}: what is behind that is left out."
        salvaged.notes.append(("several-archives", text))
    return salvaged


def _goes_on(source: Source, records: Sequence[Found]) -> bool:
    """Whether records stand behind the end of an archive, which does not lie in a tensor's bytes."""
    inside = [(found.data, found.data + found.compressed) for found in records if found.proof]
    last = max((found.header for found in records), default=0)
    for start in range(0, last, CHUNK):
        for match in _ANY_END.finditer(source.read(start, min(CHUNK + 3, last - start))):
            if not any(first <= start + match.start() < end for first, end in inside):
                return True
    return False


def _several_archives(path: Path) -> UnsupportedContainerError:
    what = "is a part of a distributed checkpoint" if path.suffix == _PART else "holds several archives"
    fix = "Get the file again, or take an earlier checkpoint."
    return UnsupportedContainerError(f"{path} {what}, and ckpt repair takes files of one archive.", fix=fix)


def no_program(path: str) -> UnsupportedContainerError:
    """The error for a program, damaged or not: its code is a part of it, and nothing here would prove or write that."""
    fix = f"If it opens, its state dict can be taken out: {mending('convert', path, '--objects plain')}"
    return UnsupportedContainerError(f"{path} is a program, which ckpt repair does not take.", fix=fix)


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


def find_safetensors(source: Source) -> int | None:
    """Where in the first megabyte a safetensors file begins, that is eight bytes before a header of that length."""
    data = source.read(0, min(_SEARCHED, source.size))
    for match in _HEADER.finditer(data, 8):
        length = int.from_bytes(data[match.start() - 8 : match.start()], "little")
        fits = 2 <= length <= MAX_HEADER and match.start() + length <= source.size
        if fits and _end(source, match.start(), length) is not None:
            return match.start() - 8
    return None


def salvage_safetensors(source: Source, start: int) -> Salvaged:
    """A safetensors file that begins at an offset, and whose tail may be missing or be followed by other bytes."""
    length, end = int.from_bytes(source.read(start, 8), "little"), header_end(source, start)
    if end is None:
        raise DamagedFileError("The safetensors header is cut or damaged.", why="Without it no name and no shape is known.")
    claimed = TruncatedSource(source, start, 8 + length + end)
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
            changed = replace(storage, key=f"{storage.key} unread")
            salvaged.lost[id(changed)] = why[storage.key]
            return changed
        left = max(0, claimed.available - content.offset)
        if left >= content.length:
            return storage
        there = filled(Range(claimed, content.offset, left), storage.nbytes)
        changed = Storage(storage.key, storage.dtype, storage.nbytes, None, there)
        salvaged.lost[id(changed)] = f"the file ends after {left} of its {storage.nbytes} bytes"
        return changed

    salvaged.checkpoint.root = map_storages(salvaged.checkpoint.root, cut_short)
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
_PART = ".distcp"
_REPAIRED = ("torch-zip", "torch-legacy", "torch-tar", "safetensors")


def open_damaged(
    path: str | os.PathLike[str], keep_damaged: bool, scratch: Path, stack: contextlib.ExitStack
) -> tuple[Salvaged, str]:
    """What can be had of a file, and what was wrong with it as a whole ("" where it opens); open until the stack closes."""
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
    if checkpoint.container == "dcp-part" or checkpoint.path.suffix == _PART:
        raise _several_archives(checkpoint.path)
    if checkpoint.container not in _REPAIRED:
        raise _not_repaired(path, checkpoint.container)
    salvaged = proved(checkpoint)
    return (_searched(salvaged, keep_damaged) if checkpoint.container == "torch-zip" else salvaged), ""


def _searched(salvaged: Salvaged, keep_damaged: bool) -> Salvaged:
    """What is whole in a file that opens, but has records that do not match: often a header alone is wrong."""
    if not salvaged.lost:
        return salvaged
    try:
        walked = _salvage(salvaged.checkpoint.source, DamagedFileError("Records do not match."), keep_damaged)
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
            f"{source.path} is packed; unpack it for ckpt repair.",
            fix=f"Unpack it first ({command}), and repair the file that was in it.",
        )


def _not_repaired(path: str | os.PathLike[str], container: str) -> UnsupportedContainerError:
    """The error for what opens, in a container that repair does not mend; with the command that helps."""
    if container in ("sharded", "dcp", *PART_CONTAINERS):
        return _of_several_files(path, "Its structure is whole.")
    if container in PROGRAMS:
        return no_program(str(path))
    fix = f"What it holds can be written anew: {mending('convert', str(path), '--objects plain')}"
    return UnsupportedContainerError(f"{path} opens, and ckpt repair does not take {container}.", fix=fix)


def _of_several_files(path: str | os.PathLike[str], why: str) -> UnsupportedContainerError:
    check = f"ckpt check {shlex.quote(str(path))}"
    return UnsupportedContainerError(
        f"{path} is a checkpoint of several files; ckpt repair takes one file.", why=why.strip(),
        fix=f"Repair the damaged one ({check} names it), or get it again.",
    )  # fmt: skip


def proved(checkpoint: Checkpoint) -> Salvaged:
    """An open checkpoint with the storages marked that do not match their CRC-32."""
    mismatches = read_checkpoint(checkpoint).mismatches
    bad = {(id(row.source), row.record.data): row for row in mismatches}
    salvaged = Salvaged(checkpoint)
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

    salvaged.checkpoint = replace(checkpoint, root=map_storages(checkpoint.root, mark) if bad else checkpoint.root)
    checkpoint.root = None  # the tree is let go of once it is laid out, and has no second owner
    salvaged.notes += [told(row.record.name, bit, row.record.size) for row, bit in mended.items()]
    if others := sum(row.other_writer for row in mismatches if row not in mended):
        text = (
            f"{others} records match the CRC-32 behind them, and not the directory's: two processes wrote to it at once. "
            "Each is intact, but whose it is, is unknown."
        )
        salvaged.notes.append(("mixed-writers", text))
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
        # Write the file without its carriage returns
        with path.open("wb") as file:
            for block in without_carriage_returns(source):
                file.write(block)
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
        return salvage_zip(source, keep_damaged=keep_damaged)
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
    data = source.read(0, min(_SEARCHED, source.size))  # a torch-legacy stream begins at the pickled magic number
    starts = (match.start() for match in re.finditer(rb"\x80[\x02-\x05]", data))
    return next((("torch-legacy", start) for start in starts if is_stream(data[start : start + 64])), ("", 0))


def may_be_saved(source: Source, error: DamagedFileError) -> bool:
    """Whether repair may help with a damaged file, told from what is wrong with it and from its first megabyte."""
    if not source.size or source.path.suffix == _PART or may_be_packed(source.read(0, min(HEAD, source.size))):
        return False
    if is_text_mode(source):
        return is_mended(source)
    kind, start = _begins(source)
    if kind == "safetensors":
        # Whether a safetensors header can be read; a long one is not read twice
        if header_end(source, start) is None:
            return False
        try:
            with limits.of_file(source.size):
                return int.from_bytes(source.read(start, 8), "little") > _LONG or bool(salvage_safetensors(source, start))
        except CkptError:
            return False
    if kind == "torch-legacy" or isinstance(error, PickleError):
        return kind == "torch-legacy" and start > 0
    return _has_zip(source) and is_mended(source)


def _has_zip(source: Source) -> bool:
    """Whether a zip record begins in the first megabyte."""
    return b"PK\x03\x04" in source.read(0, min(1 << 20, source.size))
