"""What the journal of an edit in place says, and whose it is: it applies only to the very bytes that it was made for.

    .NAME.ckpt-journal    magic, device and inode of the file, its size before and after, a mark, the number of regions,
                          (offset, old length, new length, old bytes, new bytes) of each, CRC-32

The device is written and not compared: btrfs, NFS and overlays number devices anew with every mount, and the journal is for the
time after a crash.

While the edit is under way, the file's first eight bytes are the mark: 0xFF, "CKP" and a number drawn for this journal. No
program takes such a file for a checkpoint, so that a half-edited one that lost its journal is refused, and one that begins
otherwise is whole, whatever lies beside it. A file is half edited when it is the journal's by inode, begins with its mark, and
every byte of its regions is the old one or the new one. It is read through the journal then; only an edit writes to it. No file
that torch opens is: of all that it reads only a tar can begin so, with a member of that name, and no tar is half edited. Where
the first eight bytes are a part of the mark and a part of the old or new ones ("torn": no kill leaves that, a disk may), torch
may open the file as it lies: no command reads it, and the next edit rolls it back.
"""

from __future__ import annotations

import os
import shlex
import stat
import struct
import tarfile
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_tools.errors import DamagedFileError, OutputError
from ckpt_tools.io.marks import BINARY, MARK, MARKED, SUFFIX, Reader, is_journal_of, is_marked, journal_path, read_at

_MAGIC = b"ckpt journal 2\n"
_HEAD = struct.Struct("<4Q8sQ")  # device, inode, size before, size after, mark, number of regions
_REGION = struct.Struct("<3Q")  # offset, length of the old bytes, length of the new ones
_BLOCK = 1 << 16  # bytes of a file that are compared at once
_MAX_JOURNAL = 1 << 30  # bytes; it holds a pickle, a directory or a header
_MAX_REGIONS = 10_000
_FOREIGN = "it is another user's"
_TAR_HEADER = 512  # bytes
State = Literal["before", "torn", "between", "after"]
_WHY: dict[State | None, str] = {None: "it is not whole", "torn": "the file's first bytes are written in part"}


def new_mark() -> bytes:
    """The first bytes of a file that is half edited, as one journal knows them."""
    number = 0
    while not number:  # as a safetensors header's length it is four gigabytes and more
        number = int.from_bytes(os.urandom(MARKED - len(MARK)))
    return MARK + number.to_bytes(MARKED - len(MARK))


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of the file that the edit changes; old ones are missing beyond the old end, new ones beyond the new end."""

    offset: int
    old: bytes
    new: bytes

    @property
    def length(self) -> int:
        """How many bytes of the file it may be about."""
        return max(len(self.old), len(self.new))

    def mixed(self, data: bytes) -> bool:
        """Whether every byte of `data` is the old or the new one, or was never written."""
        old, new = self.old.ljust(self.length, b"\0"), self.new.ljust(self.length, b"\0")
        return all(_mixed(data[at : at + _BLOCK], old[at : at + _BLOCK], new[at : at + _BLOCK]) for at in _blocks(data))


def _blocks(data: bytes) -> range:
    return range(0, len(data), _BLOCK)


def _mixed(data: bytes, old: bytes, new: bytes) -> bool:
    return not _differing(data, old[: len(data)]) & _differing(data, new[: len(data)])


def _differing(one: bytes, two: bytes) -> int:
    """The highest bit of every byte that differs: of a byte that is not zero adding 0x7f to the rest sets it."""
    difference, low = int.from_bytes(one) ^ int.from_bytes(two), int.from_bytes(b"\x7f" * len(one))
    return ((difference & low) + low | difference) & low + int.from_bytes(b"\1" * len(one))


@dataclass(frozen=True, slots=True)
class Record:
    """One journal."""

    device: int
    inode: int
    size: int
    new_size: int
    mark: bytes
    regions: tuple[Region, ...]

    def is_sound(self) -> bool:
        """Whether an edit could have written this: a checksum is easily made right."""
        if not 2 <= len(self.regions) <= _MAX_REGIONS or not self.mark.startswith(MARK) or self.size < MARKED:
            return False
        first, *others, last = self.regions
        ends = (0, MARKED, MARKED, self.new_size, max(0, self.size - self.new_size), b"")
        if (first.offset, len(first.old), len(first.new), last.offset, len(last.old), last.new) != ends:
            return False
        at = MARKED
        for row in others:
            there = max(0, min(len(row.new), self.size - row.offset))
            if row.offset < at or not row.new or len(row.old) != there:
                return False
            at = row.offset + len(row.new)
        return at <= self.new_size and self.size < 1 << 62

    def state(self, status: os.stat_result, read: Reader) -> State | None:
        """How far the edit of a file came; None when these are not the bytes that the journal was made for."""
        if status.st_ino != self.inode:
            return None
        first, *others = self.regions
        start = read(0, MARKED)
        if start == first.old and status.st_size == self.size and _are(others, read, new=False):
            return "before"
        if start == first.new and status.st_size == self.new_size and _are(others, read, new=True):
            return "after"
        ends = (self.size, self.new_size)
        state: State | None = "between" if start == self.mark else "torn" if self.tore(start) else None
        if state is None or not min(ends) <= status.st_size <= max(ends) or _is_tar(read):
            return None
        return state if all(row.mixed(read(row.offset, row.length)) for row in others) else None

    def tore(self, start: bytes) -> bool:
        """Whether a file that begins so was left while its first bytes, or the mark in their place, were written."""
        whole = [row for region in self.regions[:1] for row in (region.old, region.new)]
        pairs = [pair for row in whole for pair in ((row, self.mark), (self.mark, row))]
        return start not in whole and any(start == one[:at] + two[at:] for one, two in pairs for at in range(1, MARKED))

    def over(self, offset: int, length: int, data: bytes) -> bytes:
        """The old bytes of a range whose bytes in the half-edited file are `data`."""
        length = max(0, min(length, self.size - offset))
        whole = bytearray(data[:length].ljust(length, b"\0"))
        first = max(0, bisect_right(self.regions, offset, key=_start) - 1)
        for region in self.regions[first : bisect_left(self.regions, offset + length, key=_start)]:
            start, end = max(offset, region.offset), min(offset + length, region.offset + len(region.old))
            if start < end:
                whole[start - offset : end - offset] = region.old[start - region.offset : end - region.offset]
        return bytes(whole)

    def pack(self) -> bytes:
        """The journal's bytes."""
        parts = [_MAGIC, _HEAD.pack(self.device, self.inode, self.size, self.new_size, self.mark, len(self.regions))]
        for region in self.regions:
            parts += [_REGION.pack(region.offset, len(region.old), len(region.new)), region.old, region.new]
        body = b"".join(parts)
        return body + struct.pack("<I", zlib.crc32(body))


def _start(region: Region) -> int:
    return region.offset


def _are(regions: Sequence[Region], read: Reader, *, new: bool) -> bool:
    wanted = ((region.offset, region.new if new else region.old) for region in regions)
    return all(read(offset, len(data)) == data for offset, data in wanted)


def _is_tar(read: Reader) -> bool:
    """Whether Python's tarfile takes this for a tar, whose first eight bytes are a name, so that torch may load it."""
    try:
        tarfile.TarInfo.frombuf(read(0, _TAR_HEADER), "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return False
    return True


def unpack(data: bytes) -> Record | None:
    """The journal with these bytes; None when it is not whole."""
    body = memoryview(data)[:-4]
    if not data.startswith(_MAGIC) or struct.pack("<I", zlib.crc32(body)) != data[-4:]:
        return None
    try:
        device, inode, size, new_size, mark, count = _HEAD.unpack_from(body, len(_MAGIC))
        at, regions = len(_MAGIC) + _HEAD.size, []
        for _ in range(min(count, _MAX_REGIONS)):
            offset, old, new = _REGION.unpack_from(body, at)
            at += _REGION.size
            regions.append(Region(offset, bytes(body[at : at + old]), bytes(body[at + old : at + old + new])))
            at += old + new
    except struct.error:
        return None
    record = Record(device, inode, size, new_size, mark, tuple(regions))
    return record if at == len(body) and record.is_sound() else None


def most_bytes(size: int) -> int:
    """How large the journal of a file may be, by its size before or after the edit: what reads it holds it in memory."""
    return min(3 * size + (8 << 20), _MAX_JOURNAL)


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal beside a file."""

    place: Path
    state: State | None = None
    why: str = ""
    record: Record | None = None
    forbidden: bool = False
    torn: bool = False


def beside(path: Path, status: os.stat_result, read: Reader, *, every: bool = False) -> Iterator[Journal]:
    """The journals that may be a file's:"""
    own = journal_path(path)
    places = [own] if os.path.lexists(own) else []
    marked = is_marked(read)
    if marked or every:
        others = [place for place in _journals(path.parent) if place != own]
        places += [place for place in others if marked or is_journal_of(place.name, path.name)]
    for place in places:
        if (found := _judged(path, place, status, read)) is not None:
            yield found


def _journals(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(SUFFIX)]
    except OSError:
        return []


def _judged(path: Path, place: Path, status: os.stat_result, read: Reader) -> Journal | None:
    """What a journal is to a file; None when it is gone."""
    try:
        fd = os.open(place, os.O_RDONLY | BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"it cannot be opened: {error.strerror or error}"
        return Journal(place, why=why, forbidden=isinstance(error, PermissionError))
    try:
        own = os.fstat(fd)
        if why := _distrust(own, status):
            return Journal(place, why=why, forbidden=why == _FOREIGN)
        data = _read(fd, own.st_size, status.st_ino if place != journal_path(path) else None)
        locked = _is_locked(fd)
        if not os.fstat(fd).st_nlink:
            return None
    except OSError as error:
        return Journal(place, why=f"it cannot be read: {error.strerror or error}")
    finally:
        close(fd)
    return _told(path, place, data, locked, status, read)


def _read(fd: int, size: int, inode: int | None) -> bytes:
    """A journal's bytes; the first ones of what is none, or of one that is not made for the file with this inode."""
    head = read_at(fd, 0, len(_MAGIC) + _HEAD.size)
    if head.startswith(_MAGIC) and inode in (None, _inode_in(head)):
        head += read_at(fd, len(head), size - len(head))
    return head


def _inode_in(data: bytes) -> int | None:
    return _HEAD.unpack_from(data, len(_MAGIC))[1] if len(data) >= len(_MAGIC) + _HEAD.size else None


def _distrust(journal: os.stat_result, file: os.stat_result) -> str:
    """Why a journal is not acted upon, from what the system says of it. A file's owner may write it anyway."""
    if not stat.S_ISREG(journal.st_mode):
        return "it is not a regular file"
    if hasattr(os, "geteuid") and journal.st_uid not in (os.geteuid(), file.st_uid, 0):
        return _FOREIGN
    return f"it has {journal.st_size} bytes, and none is so large" if journal.st_size > most_bytes(file.st_size) else ""


def _told(path: Path, place: Path, data: bytes, locked: bool, status: os.stat_result, read: Reader) -> Journal:
    record = unpack(data)
    if record is None and not data.startswith(_MAGIC) and not _MAGIC.startswith(data):
        return Journal(place, why="this version writes no such journal")
    if record is None and place != journal_path(path):  # `.model.1.ckpt-journal` is of `model`, or of `model.1`
        another = _inode_in(data) not in (None, status.st_ino)
        return Journal(place, why="it was made for another file" if another else "it is not whole")
    mine = record is None or record.inode == status.st_ino
    if locked and mine:
        raise OutputError(f"{path} is being edited by another process.", why=f"Its journal {place} is locked.")
    if record is None:  # the kill came before the journal was whole, and so before the file changed
        return Journal(place)
    state = record.state(status, read)
    why = "the file has other bytes than it was made for" if mine else "it was made for another file"
    return Journal(
        place,
        state,
        "" if state else why,
        record if state else None,
        torn=state in (None, "torn") and record.tore(read(0, MARKED)),
    )


def _is_locked(fd: int) -> bool:
    """Whether an editor that lives holds the journal."""
    try:
        import fcntl
    except ImportError:  # Windows: an open file cannot be removed there, which protects an edit under way
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False  # closing it gives the lock back


def half_edited(path: str, journals: Sequence[Journal]) -> DamagedFileError:
    """The error for a file that begins with a mark, and that no journal makes whole."""
    why = "; ".join(f"{found.place}: {found.why or _WHY[found.state]}" for found in journals) or "Its journal is not beside it."
    fix = "Put its journal (.NAME.ckpt-journal) into its folder, and the file where it was edited; else get the file again."
    if any(found.state == "torn" for found in journals):
        fix = f"Put the old bytes back: ckpt repair {shlex.quote(path)}"
    if any(found.forbidden for found in journals):
        fix = f"The journal's owner, or root, puts the old bytes back: ckpt repair {shlex.quote(path)}"
    return DamagedFileError(f"{path} is half edited: an edit in place was interrupted.", why=why, fix=fix)


def close(fd: int) -> None:
    """Close a file whose bytes have been synced, or were never written: nothing can be lost by it any more."""
    try:
        os.close(fd)
    except OSError:
        return
