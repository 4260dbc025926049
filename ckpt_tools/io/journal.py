"""Edit a file in place so that a kill at any moment leaves the old bytes or the new ones: a rollback journal beside it.

    .NAME.ckpt-journal    magic, device and inode of the file, its size, (offset, length, old bytes) for every patch, CRC-32

The journal is written and synced before the first byte of the file changes, and removed after the last one is synced. Whoever
opens the file next and finds a whole journal puts the old bytes back; one that is not whole was never acted upon. A journal
that names another inode, or belongs to another user, is refused: a stranger's archive must not be able to make us write.
The one who edits holds a lock on the journal, so that a reader never rolls back an edit under way.
Source of the scheme: SQLite's rollback journal (www.sqlite.org/atomiccommit.html).
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpt_tools.errors import ChangedFileError, OutputError

_MAGIC = b"ckpt journal 1\n"
_HEAD = struct.Struct("<4Q")  # device, inode, size of the file, number of patches
_PATCH = struct.Struct("<2Q")  # offset, length
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_STEP = 4 << 20
MAX_JOURNAL = 1 << 30  # bytes; it holds a pickle, a directory or a header
Patch = tuple[int, bytes]


def journal_path(path: Path) -> Path:
    """Where the journal of a file is."""
    return path.with_name(f".{path.name}.ckpt-journal")


def patch(path: Path, patches: Sequence[Patch], size: int, identity: object) -> None:
    """Write each patch at its offset and cut the file to `size`: all of it, durably, or nothing.

    Args:
        path: a regular file, links resolved.
        patches: (offset, new bytes).
        size: the file's new size in bytes.
        identity: what `files.identity_of` gave, (device, inode, size, modification time), and must still give.

    Raises:
        ChangedFileError: the file is not what was read. OutputError: it cannot be written, or another edit is under way;
        the old bytes are back in place then.
    """
    try:
        fd = os.open(path, os.O_RDWR | _BINARY)
    except OSError as error:
        raise OutputError(f"{path} cannot be edited in place.", why=f"{error.strerror or error}.") from None
    try:
        with _journal(path, fd, patches, size, identity):
            for offset, data in patches:
                _write(fd, offset, data)
            os.ftruncate(fd, size)
            os.fsync(fd)
    except OSError as error:
        raise OutputError(f"{path} cannot be edited in place.", why=f"{error.strerror or error}. Nothing is changed.") from None
    finally:
        _close(fd)


@contextlib.contextmanager
def _journal(path: Path, fd: int, patches: Sequence[Patch], size: int, identity: object) -> Iterator[None]:
    """Write the journal, let the block change the file, remove the journal; when the block fails, roll back."""
    place = journal_path(path)
    journal = _create(path, place)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != identity:
            raise ChangedFileError(f"{path} changed while it was read.", fix="Run this again.")
        old = [(offset, _read(fd, offset, len(data))) for offset, data in patches]
        old += [(size, _read(fd, size, max(status.st_size - size, 0)))]  # what is cut off
        _write(journal, 0, _packed(status, old))
        os.fsync(journal)
        sync_folder(path.parent)
    except BaseException:
        _remove(place, journal)
        raise
    try:
        yield
    except BaseException:
        _undo(path, fd, status.st_size, old, journal)
        _remove(place, journal)
        raise
    try:
        _remove(place, journal)
    except OSError as error:
        raise OutputError(
            f"{path} is edited, and the edit may be undone.",
            why=f"Its journal {place} cannot be removed for good: {error.strerror or error}.",
            fix="Whatever opens the file next puts the old bytes back where the journal is there. Then edit it again.",
        ) from None


def _create(path: Path, place: Path) -> int:
    """A new journal, locked; its descriptor."""
    while True:
        try:
            journal = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
        except FileExistsError:
            raise OutputError(f"{path} is being edited by another process.", why=f"Its journal {place} exists.") from None
        try:
            _lock(journal)
            if os.fstat(journal).st_nlink:
                return journal
        except OutputError:  # a reader has it, and removes it
            _close(journal)
            raise
        except BaseException:
            _remove(place, journal)
            raise
        _close(journal)  # in the moment before it was locked, a reader took it for that of a dead editor


def _undo(path: Path, fd: int, size: int, old: Sequence[Patch], journal: int) -> None:
    """Put the old bytes back after an edit that failed. Where that fails too the journal stays: nothing else has them."""
    try:
        _put_back(fd, size, old)
    except BaseException as error:
        _close(journal)
        if not isinstance(error, OSError):
            raise
        why = f"{error.strerror or error}, and the same for putting the old bytes back."
        fix = f"{journal_path(path)} has them: leave it there, and whatever opens the file next puts them back."
        raise OutputError(f"{path} is half edited.", why=why, fix=fix) from None


def _remove(place: Path, journal: int) -> None:
    """Unlink before unlocking, so that nobody sees a journal that is no longer wanted; Windows unlinks closed files only."""
    if os.name != "posix":
        _close(journal)
        journal = -1
    try:
        os.unlink(place)
    finally:
        _close(journal)
    sync_folder(place.parent)


def recover(path: Path) -> None:
    """Roll back an edit of `path` that was killed, if there is a journal of one. The file stays the same, by inode.

    Raises:
        OutputError: an edit is under way, or the old bytes cannot be put back.
    """
    place = journal_path(path)
    if not os.path.lexists(place):
        return
    try:
        journal = os.open(place, os.O_RDWR | _BINARY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return
    except OSError as error:
        why = f"Its journal {place} cannot be opened: {error.strerror or error}."
        raise OutputError(f"An edit of {path} was interrupted, and cannot be rolled back.", why=why) from None
    try:
        _lock(journal)
        if not os.fstat(journal).st_nlink:  # the edit was finished while we waited for nothing
            _close(journal)
            return
        _roll_back(path, place, journal)
    except OSError as error:
        why = f"{error.strerror or error}. Its journal is {place}."
        raise OutputError(f"An edit of {path} was interrupted, and cannot be rolled back.", why=why) from None
    except BaseException:
        _close(journal)
        raise
    _remove(place, journal)


def _roll_back(path: Path, place: Path, journal: int) -> None:
    status = os.fstat(journal)
    own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if status.st_size > MAX_JOURNAL:
        raise OutputError(f"{path} has a journal of {status.st_size} bytes.", why=f"It is {place}; none is so large.")
    whole = _unpacked(_read(journal, 0, status.st_size)) if stat.S_ISREG(status.st_mode) and own else None
    if not own:
        raise OutputError(f"{path} has the journal of an edit by another user.", why=f"It is {place}.")
    if whole is None:  # the kill came before the journal was whole, and so before the file changed
        return
    (device, inode, size), old = whole
    fd = os.open(path, os.O_RDWR | _BINARY)
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise OutputError(
                f"{path} has the journal of another file.", why=f"{place} was written for another inode.",
                fix="If the file was copied or replaced since, remove the journal.",
            )  # fmt: skip
        _put_back(fd, size, old)
    finally:
        _close(fd)


def _close(fd: int) -> None:
    """Close a file whose bytes have been synced, or were never written: nothing can be lost by it any more."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _put_back(fd: int, size: int, old: Sequence[Patch]) -> None:
    for offset, data in old:
        _write(fd, offset, data)
    os.ftruncate(fd, size)
    os.fsync(fd)


def _packed(status: os.stat_result, old: Sequence[Patch]) -> bytes:
    parts = [_MAGIC, _HEAD.pack(status.st_dev, status.st_ino, status.st_size, len(old))]
    for offset, data in old:
        parts += [_PATCH.pack(offset, len(data)), data]
    body = b"".join(parts)
    return body + struct.pack("<I", zlib.crc32(body))


def _unpacked(data: bytes) -> tuple[tuple[int, int, int], list[Patch]] | None:
    """Device, inode and size of the file, and the old bytes; None when the journal is not whole."""
    body, crc = data[:-4], data[-4:]
    if not body.startswith(_MAGIC) or struct.pack("<I", zlib.crc32(body)) != crc:
        return None
    try:
        device, inode, size, count = _HEAD.unpack_from(body, len(_MAGIC))
        at, old = len(_MAGIC) + _HEAD.size, []
        for _ in range(count):
            offset, length = _PATCH.unpack_from(body, at)
            at += _PATCH.size
            old.append((offset, body[at : at + length]))
            at += length
    except struct.error:  # a checksum is easily made right
        return None
    return (device, inode, size), old


def _read(fd: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes from `offset`; fewer at the end of the file."""
    os.lseek(fd, offset, os.SEEK_SET)
    parts = []
    while length and (data := os.read(fd, min(length, _STEP))):
        parts.append(data)
        length -= len(data)
    return b"".join(parts)


def _write(fd: int, offset: int, data: bytes) -> None:
    os.lseek(fd, offset, os.SEEK_SET)
    write_all(fd, memoryview(data))


def write_all(fd: int, left: memoryview) -> None:
    """Write all of the bytes, in as many calls as the system takes for them."""
    while len(left):
        left = left[os.write(fd, left) :]


def _lock(journal: int) -> None:
    """Take the journal's lock, which goes with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # Windows: an open file cannot be removed there, which protects an edit under way
        return
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError("The file is being edited by another process.", why="Its journal is locked.") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        _close(fd)
