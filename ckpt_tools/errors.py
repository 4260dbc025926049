"""Every error of ckpt_tools, one base class, one class per promise that a file or a user breaks.

CkptError                      exit code 3 unless noted
├── UsageError                 an option that cannot be read or does not fit the others (exit code 2); a ValueError too
├── NotACheckpointError        the bytes are something else: empty, HTML, a git-LFS pointer, a folder, no digests ...
│   └── MissingFileError           there is no such file, here or at an address; a FileNotFoundError too
├── UnsupportedContainerError  a checkpoint, in a container that this version does not read
├── DamagedFileError           a checkpoint whose container breaks a promise of its format, or that has two readings
│   ├── PickleError                the pickle stream
│   ├── TensorError                a tensor that does not fit its storage
│   └── ChecksumError              bytes that do not match their CRC-32
├── LimitError                 larger or deeper than any real checkpoint
├── RemoteError                a remote path that cannot be reached, or not in parts; an OSError too
├── MissingPackageError        a package that is needed is not installed, or is broken; an ImportError too
├── ChangedFileError           the input changed while it was read
├── SignatureError             a signature that is not valid, or a key that cannot be read
├── RepairError                nothing in the file can be saved
├── ConvertError               what was asked for cannot be done without loss or guessing
│   ├── NothingMatchedError        an option that matches nothing, or a result without tensors; a LookupError too
│   ├── PartError                  one process's part of a model, where the model is wanted
│   ├── ObjectsError               objects that are not plain data, and no word on what to do with them
│   └── MatchError                 a checkpoint that does not fit its target or plan; a RuntimeError too, as torch's is
└── OutputError                the output cannot be written; an OSError too
    └── OutputExistsError          it exists, and overwriting was not asked for; a FileExistsError too

A missing file is caught as in all of Python: `except FileNotFoundError`; a bad argument by `except ValueError`. The messages
call an argument as Python does, between backticks:
`strip_module`; the command line says --strip-module in its place (`ckpt_tools.render.wording`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from errno import EEXIST, ENOENT, ENOMEM

MAX_SENTENCE = 1200


class CkptError(Exception):
    """What went wrong, why, and what to do about it; each a sentence of its own.

    Args:
        what: the sentence that says what was refused, with the file and tensor concerned.
        why: what was found and what was expected.
        fix: what the user can do, a command where there is one.

    Attributes:
        rank: the process of a job whose error it is, where it is another one's.
    """

    exit_code = 3
    rank: int | None = None

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(_cut(what))
        self.why, self.fix = _cut(why), _cut(fix)

    @property
    def what(self) -> str:
        """The sentence that says what was refused. It is the only argument, so that `repr` shows it as it is now."""
        return str(self.args[0])

    @what.setter
    def what(self, text: str) -> None:
        self.args = (_cut(text),)

    def about(self, path: object) -> None:
        """Put `path` before what the error says, where that does not name it."""
        if str(path) not in self.what:
            self.what = f"{path}: {self.what}"

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


def _cut(text: str) -> str:
    """A sentence that quotes a name of megabytes, without its middle."""
    return text if len(text) <= MAX_SENTENCE else f"{text[:900]}... ({len(text)} characters) ...{text[-200:]}"


_ARGUMENT = re.compile(r"`(\w+)(?:=[^`]*)?`")


class UsageError(CkptError, ValueError):
    """An option that cannot be read, or does not fit the others."""

    exit_code = 2

    @property
    def option(self) -> str:
        """The argument that the error is about, as Python calls it; the empty text where it is about none."""
        found = _ARGUMENT.search(self.what)
        return found.group(1) if found else ""


class NotACheckpointError(CkptError):
    """The bytes are something else than what is wanted: a checkpoint, a file of digests."""


class MissingFileError(NotACheckpointError, FileNotFoundError):
    """There is no such file, here or at an address."""

    errno = ENOENT


class UnsupportedContainerError(CkptError):
    """A checkpoint, in a container that this version does not read."""


class DamagedFileError(CkptError):
    """A checkpoint whose container breaks a promise of its format, or that two programs would read as two files.

    Args:
        whole: of a file that was cut off, how many of its tensors are whole.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", whole: int | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.whole = whole


class PickleError(DamagedFileError):
    """The pickle stream is malformed."""


class TensorError(DamagedFileError):
    """A tensor does not fit its storage."""


class ChecksumError(DamagedFileError):
    """Bytes do not match their CRC-32."""


TWO_FILES = "Two programs would read two files."


class LimitError(CkptError):
    """Larger or deeper than any real checkpoint."""


class RemoteError(CkptError, OSError):
    """A remote path cannot be reached, or not in parts."""

    errno: int | None = None


class MissingPackageError(CkptError, ImportError):
    """A package that this needs is not installed, or cannot be imported."""


def missing(package: str, distribution: str, why: str) -> MissingPackageError:
    """The error for a package that is not installed; `why` says what it is needed for."""
    return MissingPackageError(f"This needs {package}: pip install {distribution}", why=why)


class ChangedFileError(CkptError):
    """The input changed while it was read."""


class RepairError(CkptError):
    """Nothing in the file can be saved."""


class SignatureError(CkptError):
    """A signature is not this key's, or cannot be read; or a key cannot."""


class ConvertError(CkptError):
    """What was asked for cannot be done without loss or guessing."""


class NothingMatchedError(ConvertError, KeyError):
    """An option matches nothing, or nothing would be left."""


class PartError(ConvertError):
    """The file is one process's part of a model, and the model is wanted.

    Args:
        rest: whether what else is there is whole, so that `convert(..., partial=True)` can write it.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", rest: bool = False) -> None:
        super().__init__(what, why=why, fix=fix)
        self.rest = rest


class ObjectsError(ConvertError):
    """The file holds objects that are not plain data, and no option says what becomes of them."""


class MatchError(ConvertError, RuntimeError):
    """The checkpoint does not fit the target or the plan, and no option says what to do about it."""


class OutputError(CkptError, OSError):
    """The output cannot be written.

    Args:
        errno: the number of the system's own error, where it was one: ENOSPC for a full disk, ENOENT without a folder.
    """

    errno: int | None = None

    def __init__(self, what: str, *, why: str = "", fix: str = "", errno: int | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.errno = errno if errno is not None else type(self).errno


class OutputExistsError(OutputError, FileExistsError):
    """The output exists, and overwriting was not asked for."""

    errno = EEXIST


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """What Python says where the system has no more memory is a MemoryError: it may also be that a module cannot be mapped."""
    try:
        yield
    except (ImportError, OSError) as error:
        told = not isinstance(error, CkptError) and any(text in str(error) for text in _NO_MEMORY)
        if not told:
            raise
        raise MemoryError from None


# of ENOMEM, and of glibc where a module is loaded
_NO_MEMORY = (os.strerror(ENOMEM), "failed to map segment", "cannot allocate memory", "cannot create shared object")


def exhausted(error: MemoryError | RecursionError, what: str) -> LimitError:
    """The error for what Python itself ran out of, in whichever part: nothing of it may end in a traceback."""
    if isinstance(error, MemoryError):
        return LimitError(
            f"{what}: there is not enough memory for it.", why="The machine, or a limit of its system, has no more."
        )
    return LimitError(f"{what}: it is nested deeper than Python can follow.")
