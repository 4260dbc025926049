"""Edit a file in place so that a kill at any moment leaves the old bytes or the new ones: a rollback journal beside it.

The journal (`rollback` has its form) is written and synced before the first byte of the file changes, and removed after the
last one is synced. Its mark goes into the file first and comes out last, each synced by itself. Whoever reads the file in
between reads it through the journal and writes nothing; the next edit, or `ckpt repair FILE`, puts the old bytes back. An
editor holds a lock on the file, which keeps other editors off, and one on the journal, which tells readers that it lives.
Source of the scheme: SQLite's rollback journal (www.sqlite.org/atomiccommit.html).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from ckpt_tools.errors import ChangedFileError, CkptError, ConvertError, OutputError
from ckpt_tools.io import attributes
from ckpt_tools.io.marks import BINARY, MARKED, is_marked, journal_path, read_at
from ckpt_tools.io.rollback import Journal, Record, Region, beside, close, half_edited, most_bytes, new_mark, unpack
from ckpt_tools.io.temporaries import sync_folder

_PATIENCE = 1.0  # seconds for a lock: a reader has it for the moment in which it looks whether an editor lives
_ROOM = 1 << 20  # bytes of a journal for what is not in the file: 24 for each region
_HALF = ("torn", "between")
Patch = tuple[int, bytes]


def patch(path: Path, patches: Sequence[Patch], size: int, identity: object) -> None:
    """Write each patch at its offset and cut the file to `size`: all of it, durably, or nothing."""
    try:
        fd = os.open(path, os.O_RDWR | BINARY)
    except OSError as error:
        raise OutputError(f"{path} cannot be edited in place.", why=f"{error.strerror or error}.") from None
    try:
        _lock(fd)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != identity:
            raise ChangedFileError(f"{path} changed while it was read.", fix="Run this again.")
        record = Record(status.st_dev, status.st_ino, status.st_size, size, new_mark(), tuple(_regions(fd, patches, size)))
        _check_room(path, record)
        with _journal(path, fd, record):
            _put(fd, record, new=True)
    except CkptError:  # some of ours are an OSError too
        raise
    except OSError as error:
        raise OutputError(f"{path} cannot be edited in place.", why=f"{error.strerror or error}. Nothing is changed.") from None
    finally:
        close(fd)


def _check_room(path: Path, record: Record) -> None:
    """Raise ConvertError where the journal would not be believed, since it has to be held in memory."""
    held = sum(len(region.old) + len(region.new) for region in record.regions)
    if not record.is_sound() or held > most_bytes(min(record.size, record.new_size)) - _ROOM:
        why = "The old bytes and the new ones have to be kept beside it until the edit is done."
        raise ConvertError(f"{held} bytes of {path} would change.", why=why, fix="Convert it to another file.")


def _regions(fd: int, patches: Sequence[Patch], size: int) -> Iterator[Region]:
    """What changes, the first bytes by themselves: while the rest changes, the mark is in their place."""
    old = read_at(fd, 0, MARKED)
    first = bytearray(old)
    for offset, data in patches:
        head = data[: max(0, MARKED - offset)]
        first[offset : offset + len(head)] = head
    yield Region(0, old, bytes(first))
    for offset, data in sorted(patches):
        skipped = max(0, MARKED - offset)
        if data[skipped:]:
            yield Region(offset + skipped, read_at(fd, offset + skipped, len(data) - skipped), data[skipped:])
    yield Region(size, read_at(fd, size, max(os.fstat(fd).st_size - size, 0)), b"")  # what is cut off


def _put(fd: int, record: Record, *, new: bool) -> None:
    """Make the bytes the new ones, or the old ones. Until the last of them are there, the file begins with the mark."""
    first, *others = record.regions
    _write(fd, 0, record.mark)
    os.fsync(fd)
    for region in others:
        _write(fd, region.offset, region.new if new else region.old)
    os.ftruncate(fd, record.new_size if new else record.size)
    os.fsync(fd)
    _write(fd, 0, first.new if new else first.old)
    os.fsync(fd)


@contextlib.contextmanager
def _journal(path: Path, fd: int, record: Record) -> Iterator[None]:
    """Write the journal, let the block change the file, remove the journal; when the block fails, roll back."""
    place, journal = _create(path)
    try:
        attributes.keep(path, journal)  # whoever may read the file may read it through its journal, and its owner mends it
        _write(journal, 0, record.pack())
        os.fsync(journal)
        sync_folder(path.parent)
        if not (_lies_at(path, fd) and _lies_at(place, journal)):
            raise ChangedFileError(f"{path} was renamed, or its journal removed.", fix="Run this again.")
    except BaseException:
        _remove(place, journal)
        raise
    try:
        yield
    except BaseException:
        _undo(path, fd, record, place, journal)
        _remove(place, journal)
        raise
    try:
        _remove(place, journal)
    except OSError as error:
        raise OutputError(
            f"{path} is edited, but its journal cannot be removed.",
            why=f"{place}: {error.strerror or error}.", fix="The edit is complete; remove the journal.",
        ) from None  # fmt: skip


def _create(path: Path) -> tuple[Path, int]:
    """A new journal, locked, and its descriptor. The file is locked: a journal in its place has no living editor."""
    own = journal_path(path)
    for number in itertools.count(2):
        place = own if number == 2 else own.with_name(f".{path.name}.{number - 1}.ckpt-journal")
        try:
            journal = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o600)
        except FileExistsError:
            continue
        try:
            _lock(journal)
        except BaseException:
            _remove(place, journal)
            raise
        return place, journal
    raise AssertionError("numbers do not end")


def _undo(path: Path, fd: int, record: Record, place: Path, journal: int) -> None:
    """Put the old bytes back after an edit that failed. Where that fails too the journal stays: nothing else has them."""
    try:
        _put(fd, record, new=False)
    except BaseException as error:
        close(journal)
        if not isinstance(error, OSError):
            raise
        why = f"{error.strerror or error}, and the same for putting the old bytes back."
        fix = f"{place} has them: leave it there. The file is read through it, and ckpt repair {path} puts them back."
        raise OutputError(f"{path} may be half edited.", why=why, fix=fix) from None


def _lies_at(path: Path, fd: int) -> bool:
    """Whether an open file is still the one that has this name."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove(place: Path, journal: int) -> None:
    """Unlink a journal, whatever comes in between; not where it was removed already, and its name is another's."""
    is_there = True
    try:
        with contextlib.suppress(OSError):
            is_there = _lies_at(place, journal)
    finally:
        if is_there:
            _unlink(place, journal)
        else:
            close(journal)


def _unlink(place: Path, journal: int) -> None:
    """Unlink before unlocking, so that no process sees an unwanted journal; Windows unlinks closed files only."""
    if os.name != "posix":
        close(journal)
        journal = -1
    try:
        os.unlink(place)
    finally:
        close(journal)
    sync_folder(place.parent)


def recover(path: Path) -> bool:
    """Roll back an edit of `path` that was killed, if one was; its journals go, others stay."""
    try:
        if not _concerns(path):
            return False
        fd = os.open(path, os.O_RDWR | BINARY)
        try:
            _lock(fd)  # from here on no other process edits the file, makes a journal of it or removes one
            return _recover(path, fd)
        finally:
            close(fd)
    except CkptError:  # some of ours are an OSError too
        raise
    except OSError as error:
        why = f"{error.strerror or error}."
        raise OutputError(f"An edit of {path} was interrupted, and cannot be rolled back.", why=why) from None


def _concerns(path: Path) -> bool:
    """Whether there is something to roll back, or a journal to remove."""
    try:
        fd = os.open(path, os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0))
    except OSError:  # whoever reads or replaces it says what is wrong
        return False
    try:
        read = partial(read_at, fd)
        return is_marked(read) or any(not found.why for found in beside(path, os.fstat(fd), read, every=True))
    finally:
        close(fd)


def _recover(path: Path, fd: int) -> bool:
    rolled_back, read = False, partial(read_at, fd)
    found = list(beside(path, os.fstat(fd), read, every=True))
    if is_marked(read) and not any(journal.state in _HALF for journal in found):
        raise half_edited(str(path), found)
    for journal in found:
        if journal.state in _HALF and journal.record is not None:
            _put(fd, journal.record, new=False)
            rolled_back = True
        if not journal.why:  # the file is whole: the old one, or the new one
            os.fsync(fd)
            _put_away(path, journal)
    return rolled_back


def _put_away(path: Path, found: Journal) -> None:
    """Remove the journal of a file that is whole."""
    try:
        if found.record is None:
            _remove_unfinished(found.place)
        else:
            os.unlink(found.place)
            sync_folder(path.parent)
    except CkptError:  # some of ours are an OSError too
        raise
    except OSError as error:
        raise OutputError(
            f"{path} is whole, but the journal of an edit that was interrupted cannot be removed.",
            why=f"{found.place}: {error.strerror or error}.", fix="Remove the journal.",
        ) from None  # fmt: skip


def _remove_unfinished(place: Path) -> None:
    """Remove a journal that is not whole; not one that another process makes for a file that had this name before."""
    journal = os.open(place, os.O_RDWR | BINARY | getattr(os, "O_NOFOLLOW", 0))
    try:
        _lock(journal)
        if unpack(read_at(journal, 0, os.fstat(journal).st_size)) is not None:
            raise OutputError("The file is being edited by another process.", why=f"{place} is its journal.")
    except BaseException:
        close(journal)
        raise
    _remove(place, journal)


def _write(fd: int, offset: int, data: bytes) -> None:
    os.lseek(fd, offset, os.SEEK_SET)
    write_all(fd, memoryview(data))


def write_all(fd: int, left: memoryview) -> None:
    """Write all of the bytes, in as many calls as the system takes for them."""
    while len(left):
        left = left[os.write(fd, left) :]


def _lock(fd: int) -> None:
    """Take the lock of a file or a journal, which goes with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # Windows: an open file cannot be removed there, which protects an edit under way
        return None
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise OutputError("The file is being edited by another process.", why="It is locked.") from None
            time.sleep(0.01)
