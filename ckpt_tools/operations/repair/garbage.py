"""Bytes that are too many or too few around a checkpoint: garbage before and behind it, a missing tail, text-mode transfers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckpt_tools.edit.devices import map_storages
from ckpt_tools.errors import DamagedFileError
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.legacy import torch_legacy
from ckpt_tools.formats.safetensors import MAX_HEADER
from ckpt_tools.io.content import CHUNK, Range
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Window
from ckpt_tools.operations.repair.salvage import Salvaged, filled
from ckpt_tools.tree.findings import counted_bytes
from ckpt_tools.tree.nodes import Storage

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
    return next((start for start in starts if torch_legacy.sniff(data[start : start + 64])), None)


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
