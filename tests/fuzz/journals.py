"""Edits in place that were killed, their journals changed, lost or copied: the old file, the new one, or our error."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import ckpt_tools
from ckpt_tools import CkptError
from ckpt_tools.io.marks import MARK, journal_path
from ckpt_tools.io.output import Source
from ckpt_tools.io.rollback import Record, Region, unpack
from ckpt_tools.operations.repair.run import roll_back
from tests.fuzz import raw
from tests.fuzz.guard import FindingError
from tests.fuzz.values import number

_FIXTURES = Path(__file__).parents[2] / "fixtures"
_EDITS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp.pth", {"strip_module": True}), ("single.safetensors", {"rename": "^features=f"}),
    ("found/legacy.pth", {"rename": "^.=z"}),
)  # fmt: skip


@dataclass(frozen=True)
class _Killed:
    """What a kill left: the file's bytes, its journal's, and the whole bytes before and after the edit."""

    name: str
    file: bytes
    journal: bytes
    whole: tuple[bytes, bytes]


@lru_cache(maxsize=1)
def states() -> list[_Killed]:
    """Every edit, killed in the middle of every write."""
    with tempfile.TemporaryDirectory() as name:
        return [state for edit in _EDITS for state in _killed(Path(name) / "in", *edit)]


def _killed(folder: Path, name: str, edit: dict[str, Any]) -> list[_Killed]:
    found: list[_Killed] = []
    old = (_FIXTURES / name).read_bytes()
    path = folder / Path(name).name
    for writes in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path.write_bytes(old)
        try:
            with mock.patch.object(os, "write", _dying(writes)), mock.patch.object(os, "urandom", Random(writes).randbytes):
                ckpt_tools.edit_in_place(path, **edit)
        except KeyboardInterrupt:
            if journal_path(path).exists():  # else the kill came while it was written, and it was removed
                found.append(_Killed(path.name, path.read_bytes(), journal_path(path).read_bytes(), (old, old)))
        else:
            break
    new = path.read_bytes()
    return [replace(state, whole=(old, new)) for state in found]


def _dying(writes: int) -> Callable[[int, Any], int]:
    """A system whose first writes succeed; the last of them does half, and then there is nobody who writes."""
    real, count = os.write, 0

    def write(fd: int, data: Any) -> int:
        nonlocal count
        count += 1
        if count > writes:
            raise KeyboardInterrupt
        return real(fd, data if count < writes else data[: (len(data) + 1) // 2])

    return write


def journal(rng: Random, folder: Path) -> Callable[[], object]:
    """A half-edited file with something else beside it than it should be, read, rolled back or edited."""
    state, other = rng.choice(states()), rng.choice(states())
    path = folder / state.name
    path.write_bytes(state.file)
    beside, allowed = _beside(rng, state, other, path)
    if beside is not None:
        place = (
            journal_path(path)
            if rng.random() < 0.8
            else folder / rng.choice((".x.ckpt-journal", f".{path.name}.1.ckpt-journal"))
        )
        place.write_bytes(beside)
        if place != journal_path(path) and allowed is not None:
            allowed = (*allowed, state.file)  # whole as it stands, for all that can be known
    use = rng.choice((_read, _roll_back, _edit))
    return lambda: use(path, allowed)


Allowed = tuple[bytes, ...] | None  # what the file may be taken for; None where somebody forged a whole journal


def _beside(rng: Random, state: _Killed, other: _Killed, path: Path) -> tuple[bytes | None, Allowed]:
    """The bytes of the journal, and what may be read."""
    own, foreign = (_of(found.journal, path) for found in (state, other))
    pick, allowed = rng.random(), (*state.whole, *(() if state.file.startswith(MARK) else (state.file,)))
    if pick < 0.1:
        return own, allowed
    if pick < 0.2:
        return state.journal, state.whole  # copied: another inode
    if pick < 0.3:
        return None, allowed
    if pick < 0.4:
        return foreign, allowed
    if pick < 0.65:
        return raw.mutate(rng, own, foreign), allowed
    if pick < 0.75:
        path.write_bytes(raw.mutate(rng, state.file, other.file))
        return own, None
    return _forged(rng, own), None


def _of(data: bytes, path: Path) -> bytes:
    """The journal with the inode of this file in it."""
    record = unpack(data)
    return data if record is None else replace(record, inode=path.stat().st_ino).pack()


def _forged(rng: Random, data: bytes) -> bytes:
    """A journal whose checksum is right, and that says something else."""
    record = unpack(data)
    if record is None:
        return raw.mutate(rng, data, data)
    for _ in range(rng.choice((1, 1, 2))):
        record = _changed(rng, record)
    return record.pack()


def _changed(rng: Random, record: Record) -> Record:
    pick = rng.random()
    if pick < 0.4:
        size = number(rng, record.size) % 2**64
        return replace(record, size=size) if pick < 0.2 else replace(record, new_size=size)
    if pick < 0.5:
        return replace(record, mark=rng.choice((MARK + bytes(4), bytes(8), rng.randbytes(8))))
    regions = list(record.regions)
    at = rng.randrange(len(regions))
    row = regions[at]
    if pick < 0.6:
        regions.insert(at, rng.choice(regions))
    elif pick < 0.7:
        del regions[at]
    elif pick < 0.85:
        regions[at] = Region(number(rng, row.offset) % 2**64, row.old, row.new)
    else:
        regions[at] = Region(row.offset, raw.mutate(rng, row.old, row.new), row.new)
    return replace(record, regions=tuple(regions))


def _read(path: Path, allowed: Allowed) -> None:
    before = path.read_bytes()
    try:
        with contextlib.closing(Source(path)) as source:
            _expect(allowed, source.read(0, source.size), "read")
        ckpt_tools.inspect(path)
    finally:
        if path.read_bytes() != before:
            raise FindingError("reading wrote to a half-edited file")


def _roll_back(path: Path, allowed: Allowed) -> None:
    before = path.read_bytes()
    try:
        roll_back(path)
    except CkptError:
        _expect(allowed and (before, *allowed), path.read_bytes(), "refused to roll back, and left")
        raise
    _expect(allowed, path.read_bytes(), "rolled back to")


def _edit(path: Path, allowed: Allowed) -> None:
    before = path.read_bytes()
    try:
        ckpt_tools.edit_in_place(path, map_location="cpu")
    except CkptError:
        _expect(allowed and (before, *allowed), path.read_bytes(), "refused to edit, and left")
        raise
    ckpt_tools.inspect(path)


def _expect(allowed: Allowed, found: bytes, what: str) -> None:
    if allowed is not None and found not in allowed:
        raise FindingError(f"{what} neither the old file nor the new one: {found[:40]!r}")
