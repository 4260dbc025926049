"""Open a file that may be damaged: as it is where it opens, else by whatever still tells where its tensors are."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ckpt_tools import limits
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
from ckpt_tools.formats.single import HEAD, may_be_packed, naming
from ckpt_tools.formats.torch_legacy import is_stream
from ckpt_tools.formats.zip_directory import PROGRAM, is_mended, signatures
from ckpt_tools.io import temporaries
from ckpt_tools.io.content import CHUNK
from ckpt_tools.io.source import Source, archive_and_member
from ckpt_tools.io.sources import Files
from ckpt_tools.operations.check.reading import read_checkpoint
from ckpt_tools.operations.repair.salvage import (
    Salvaged,
    find_safetensors,
    safetensors_size,
    salvage_legacy,
    salvage_safetensors,
    salvage_zip,
)
from ckpt_tools.operations.repair.zip_walk import Walk, pickles_of
from ckpt_tools.parts.open import open_checkpoint, open_source
from ckpt_tools.tree.findings import mending

_PART = ".distcp"
_REPAIRED = ("torch-zip", "torch-legacy", "torch-tar", "safetensors")
_ENDS = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"  # one of three records tells where an archive ends
_SEARCHED = 1 << 20


def open_damaged(
    path: str | os.PathLike[str], keep_damaged: bool, scratch: Path, stack: contextlib.ExitStack
) -> tuple[Salvaged, str]:
    """What can be had of a file, and what was wrong with it as a whole ("" where it opens); open until the stack closes."""
    try:
        return _opened(path, keep_damaged, stack), ""
    except (UnsupportedContainerError, LimitError, RepairError):
        raise
    except CkptError as error:
        error.__traceback__ = None  # which holds everything that was read so far
        source = open_source(archive_and_member(path)[0])
        stack.callback(source.close)
        _refuse_packed(source)
        if isinstance(source, Files) or source.path.suffix == ".json":
            raise _of_several_files(path, f"{error.what} {error.why}") from None
        if source.size and is_text_mode(source):
            salvaged = _without_carriage_returns(source, error, keep_damaged, scratch, stack)
        else:
            salvaged = _salvage(source, error, keep_damaged)
        return salvaged, error.what


def _opened(path: str | os.PathLike[str], keep_damaged: bool, stack: contextlib.ExitStack) -> Salvaged:
    """A file that opens; where a record of it does not match its CRC-32 what is whole in it."""
    checkpoint = stack.enter_context(open_checkpoint(path))
    if checkpoint.packed is not None:
        _refuse_packed(checkpoint.packed.source)
    if checkpoint.container == "dcp-part" or checkpoint.path.suffix == _PART:
        raise _several_archives(checkpoint.path)
    if checkpoint.container not in _REPAIRED:
        raise _not_repaired(path, checkpoint.container)
    if not read_checkpoint(checkpoint).mismatches:
        return Salvaged(checkpoint)
    checkpoint.root = None
    return _salvage(checkpoint.source, DamagedFileError("Records do not match."), keep_damaged)


def _salvage(source: Source, error: CkptError, keep_damaged: bool) -> Salvaged:
    """What is whole in the container that begins first in the file; in a zip where no other does."""
    try:
        with naming(source), limits.of_file(source.size):
            kind, start = _begins(source)
            if kind == "safetensors":
                return salvage_safetensors(source, start)
            return salvage_legacy(source, start) if kind == "torch-legacy" else _salvage_zip(source, keep_damaged)
    except (NotACheckpointError, UnsupportedContainerError):  # the disk failed; a program
        raise
    except CkptError as problem:
        said = error if isinstance(error, NotACheckpointError) and not _has_zip(source) else problem
        raise RepairError(
            f"Nothing can be saved from {source.path}.", why=f"{said.what} {said.why}".strip(), fix=said.fix
        ) from None


def _salvage_zip(source: Source, keep_damaged: bool) -> Salvaged:
    """What is whole in a file of one archive; of several nothing tells which record is of which."""
    walk = Walk(source)
    if any(re.search(PROGRAM, found.name.encode()) for found in walk.records):
        raise _not_taken(str(source.path))
    later = sorted(found.header for found in pickles_of(walk.records))[1:2]
    records = [found for found in walk.records if not later or found.header < later[0]]  # the first archive's
    last = max((found.header for found in records), default=0)
    if source.path.suffix == _PART or any(at < last and not walk.is_inside(at) for _, at in signatures(source, *_ENDS)):
        raise _several_archives(source.path)
    salvaged = salvage_zip(walk, records, keep_damaged=keep_damaged)
    if any(name.module.split(".")[0] == "__torch__" for name in salvaged.checkpoint.globals):  # cut before its code
        raise _not_taken(str(source.path))
    if later:
        text = f"Another archive begins at byte {later[0]}: what is behind that is left out."
        salvaged.notes.append(("several-archives", text))
    return salvaged


def _begins(source: Source) -> tuple[str, int]:
    """Which container begins first in the file, and where; "" for none that is known by its beginning."""
    data = source.read(0, min(_SEARCHED, source.size))
    if is_zip(data):
        return "zip", 0
    if (start := 0 if safetensors.sniff(data[:HEAD]) else find_safetensors(source, data)) is not None:
        return "safetensors", start
    starts = (match.start() for match in re.finditer(rb"\x80[\x02-\x05]", data))  # of a pickled magic number
    return next((("torch-legacy", start) for start in starts if is_stream(data[start : start + 64])), ("", 0))


def _has_zip(source: Source) -> bool:
    return b"PK\x03\x04" in source.read(0, min(_SEARCHED, source.size))


def may_be_saved(source: Source, error: DamagedFileError) -> bool:
    """Whether repair may help with a damaged file, told from what is wrong with it and from its first megabyte."""
    if not source.size or source.path.suffix == _PART or may_be_packed(source.read(0, min(HEAD, source.size))):
        return False
    if is_text_mode(source):
        return is_mended(source)
    kind, start = _begins(source)
    if kind == "safetensors":
        return safetensors_size(source, start) is not None
    if kind == "torch-legacy" or isinstance(error, PickleError):
        return kind == "torch-legacy" and start > 0
    return _has_zip(source) and is_mended(source)


# --- a transfer that made CR LF of every LF


def is_text_mode(source: Source) -> bool:
    """Whether every line feed of a file has a carriage return before it, as no file of this size has by chance."""
    pairs, last = 0, b""
    for start in range(0, source.size, CHUNK):
        block = last + source.read(start, min(CHUNK, source.size - start))
        found = block.count(b"\r\n")
        if block.count(b"\n", len(last)) != found:
            return False
        pairs, last = pairs + found, block[-1:]
    return pairs > 0


def _line_feeds(source: Source) -> Iterator[bytes]:
    last = b""
    for start in range(0, source.size, CHUNK):
        block = last + source.read(start, min(CHUNK, source.size - start))
        last = b"\r" if block.endswith(b"\r") else b""
        yield block[: len(block) - len(last)].replace(b"\r\n", b"\n")
    yield last


def _without_carriage_returns(
    source: Source, error: CkptError, keep_damaged: bool, scratch: Path, stack: contextlib.ExitStack
) -> Salvaged:
    """What is whole in a copy of the file, which is removed when the stack closes."""
    try:
        prefix = temporaries.prefix_of(scratch.name)
        path, _ = stack.enter_context(temporaries.temporary(scratch.parent, prefix))
        with path.open("wb") as file:
            file.writelines(_line_feeds(source))
    except CkptError:  # some of ours are an OSError too
        raise
    except OSError as problem:
        raise RepairError(f"The copy of {source.path} without carriage returns cannot be written.", why=f"{problem}.") from None
    copy = Source(path)
    stack.callback(copy.close)
    try:
        salvaged = _opened(path, keep_damaged, stack)
    except CkptError:
        salvaged = _salvage(copy, error, keep_damaged)
    text = "The carriage returns that a text-mode transfer put before every line feed are removed."
    salvaged.notes.insert(0, ("text-mode", text))
    return salvaged


# --- what is not repaired, with the command that helps


def _refuse_packed(source: Source) -> None:
    """Raise UnsupportedContainerError for a compressed file or a tar."""
    head = source.read(0, min(HEAD, source.size)) if not isinstance(source, Files) else b""
    if not may_be_packed(head):
        return
    from ckpt_tools.parts.packed import is_packed

    if is_packed(source, head):
        fix = "Unpack it first, and repair the file that was in it."
        raise UnsupportedContainerError(f"{source.path} is packed; unpack it for ckpt repair.", fix=fix)


def _not_repaired(path: str | os.PathLike[str], container: str) -> UnsupportedContainerError:
    if container in ("sharded", "dcp", *PART_CONTAINERS):
        return _of_several_files(path, "Its structure is whole.")
    what = PROGRAMS[container][1] if container in PROGRAMS else f"in the format {container}"
    return _not_taken(str(path), what)


def _of_several_files(path: str | os.PathLike[str], why: str) -> UnsupportedContainerError:
    check = f"ckpt check {shlex.quote(str(path))}"
    return UnsupportedContainerError(
        f"{path} is a checkpoint of several files; ckpt repair takes one file.", why=why.strip(),
        fix=f"Repair the damaged one ({check} names it), or get it again.",
    )  # fmt: skip


def _several_archives(path: Path) -> UnsupportedContainerError:
    what = "is a part of a distributed checkpoint" if path.suffix == _PART else "holds several archives"
    fix = "Get the file again, or take an earlier checkpoint."
    return UnsupportedContainerError(f"{path} {what}, and ckpt repair takes files of one archive.", fix=fix)


def _not_taken(path: str, what: str = "a program") -> UnsupportedContainerError:
    """The error for a container that repair does not write; a program's code is a part of it that nothing here would prove."""
    fix = f"If it opens, what it holds can be written anew: {mending('convert', path, '--objects plain')}"
    return UnsupportedContainerError(f"{path} is {what}, which ckpt repair does not take.", fix=fix)
