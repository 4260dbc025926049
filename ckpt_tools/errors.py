"""Every error of ckpt_tools, one base class, one class per promise that a file or a user breaks.

CkptError                      exit code 3 unless noted
├── UsageError                 an option that cannot be read or does not fit the others (exit code 2); a ValueError too
├── NotACheckpointError        the bytes are something else: empty, HTML, a git-LFS pointer, gzip ...
│   ├── MissingFileError           there is no such file; a FileNotFoundError too
│   ├── FolderError                a folder that is not a checkpoint; an IsADirectoryError too
│   └── ForbiddenFileError         the system does not let this user read it; a PermissionError too
├── UnsupportedContainerError  a checkpoint, in a container that this version does not read
├── DamagedFileError           a checkpoint whose container breaks a promise of its format
│   ├── ZipError                   the zip directory or a zip record
│   ├── PickleError                the pickle stream
│   ├── SafetensorsError           the safetensors header
│   ├── TensorError                a tensor that does not fit its storage
│   └── ChecksumError              bytes that do not match their CRC-32
├── AmbiguousFileError         two programs would read two different files in it
├── LimitError                 larger or deeper than any real checkpoint
├── RemoteError                a remote path that cannot be reached, or not in parts; an OSError too
│   ├── RemoteMissingError         nothing is there; a FileNotFoundError too
│   ├── RemoteForbiddenError       the server refuses this user; a PermissionError too
│   └── RemoteTimeoutError         no whole answer in time; a TimeoutError too
├── MissingPackageError        a package that is needed is not installed, or is broken; an ImportError too
├── ChangedFileError           the input changed while it was read
├── ValuesError                a tensor whose values cannot be told: sparse, quantised, on the meta device
├── DigestError                a digest file that cannot be read
├── NotLoadedError             a model that was watched while it was loaded has tensors that are from no file
├── SignatureError             a signature that is not valid, or a key that cannot be read
├── RepairError                nothing in the file can be saved
├── ConvertError               the conversion that was asked for cannot be done without loss or guessing
│   ├── CollisionError             two tensors would get one name
│   ├── NothingMatchedError        an option that matches nothing, or a result without tensors; a LookupError too
│   ├── PartError              one process's part of a model, where the model is wanted
│   ├── ObjectsError               objects that are not plain data, and no word on what to do with them
│   ├── TargetError                a target model that cannot be imported, built or read
│   ├── MatchError                 a checkpoint that does not fit the target; a RuntimeError too, as torch's is
│   ├── MatchPlanError             a plan file that cannot be read, or that the input does not fit
│   └── ContainerLimitError        something that the output container cannot hold
└── OutputError                the output cannot be written; an OSError too
    ├── OutputExistsError          it exists, and overwriting was not asked for; a FileExistsError too
    ├── OutputFolderError          its folder is missing; a FileNotFoundError too
    ├── OutputIsFolderError        it is a folder; an IsADirectoryError too
    └── OutputForbiddenError       its folder takes no file of this user; a PermissionError too

A missing file is caught as in all of Python: `except FileNotFoundError`; a bad argument by `except ValueError`. The messages
call an argument as Python does, between backticks:
`strip_module`; the command line says --strip-module in its place (`ckpt_tools.render.wording`).
"""

from __future__ import annotations

import re
from errno import EACCES, EEXIST, EISDIR, ENOENT, ETIMEDOUT

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
    """The bytes are something else than a checkpoint."""


class MissingFileError(NotACheckpointError, FileNotFoundError):
    """There is no such file."""

    errno = ENOENT


class FolderError(NotACheckpointError, IsADirectoryError):
    """A folder that is not a checkpoint."""

    errno = EISDIR


class ForbiddenFileError(NotACheckpointError, PermissionError):
    """The system does not let this user read the file."""

    errno = EACCES


class UnsupportedContainerError(CkptError):
    """A checkpoint, in a container that this version does not read."""


class DamagedFileError(CkptError):
    """A checkpoint whose container breaks a promise of its format.

    Args:
        says: PyTorch's own words for it, where they are known.
        whole: of a file that was cut off, how many of its tensors are whole.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", says: str = "", whole: int | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.says, self.whole = says, whole


class ZipError(DamagedFileError):
    """The zip directory, or a record in it, is not as torch writes and reads it."""


class PickleError(DamagedFileError):
    """The pickle stream is malformed."""


class SafetensorsError(DamagedFileError):
    """The safetensors header is malformed."""


class TensorError(DamagedFileError):
    """A tensor does not fit its storage."""


class ChecksumError(DamagedFileError):
    """Bytes do not match their CRC-32."""


TWO_FILES = "Two programs would read two files."


class AmbiguousFileError(CkptError):
    """Two programs would read two different files in these bytes."""


class LimitError(CkptError):
    """Larger or deeper than any real checkpoint."""


class RemoteError(CkptError, OSError):
    """A remote path cannot be reached, or not in parts."""

    errno: int | None = None


class RemoteMissingError(RemoteError, FileNotFoundError):
    """Nothing is there."""

    errno = ENOENT


class RemoteForbiddenError(RemoteError, PermissionError):
    """The server refuses this user."""

    errno = EACCES


class RemoteTimeoutError(RemoteError, TimeoutError):
    """No whole answer came in time."""

    errno = ETIMEDOUT


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


class NotLoadedError(CkptError):
    """Tensors of a model are not what a file has for them: as they were made, swapped, or changed by other means."""


class ValuesError(CkptError):
    """The values of a tensor cannot be told: it is sparse, quantised, or has none."""


class DigestError(CkptError):
    """A digest file cannot be read."""


class ConvertError(CkptError):
    """The conversion that was asked for cannot be done without loss or guessing."""


class CollisionError(ConvertError):
    """Two tensors would get one name."""


class NothingMatchedError(ConvertError, LookupError):
    """An option matches nothing, or nothing would be left."""


class PartError(ConvertError):
    """The file is one process's part of a model, and the model is wanted.

    Args:
        rest: whether what else is there is whole, so that `convert(..., partial=True)` can write it.
        unnamed: whether it needs a target's names and shapes.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", rest: bool = False, unnamed: bool = False) -> None:
        super().__init__(what, why=why, fix=fix)
        self.rest, self.unnamed = rest, unnamed


class ObjectsError(ConvertError):
    """The file holds objects that are not plain data, and no option says what becomes of them."""


class TargetError(ConvertError):
    """The target model cannot be imported, built or read."""


class MatchError(ConvertError, RuntimeError):
    """The checkpoint does not fit the target, and no option says what to do about it."""


class MatchPlanError(ConvertError):
    """A plan file cannot be read, or the input does not fit it."""


class ContainerLimitError(ConvertError):
    """The output container cannot hold this."""


class OutputError(CkptError, OSError):
    """The output cannot be written.

    Attributes:
        errno: the number of the system's own error, where it was one: ENOSPC for a full disk.
    """

    errno: int | None = None


class OutputExistsError(OutputError, FileExistsError):
    """The output exists, and overwriting was not asked for."""

    errno = EEXIST


class OutputFolderError(OutputError, FileNotFoundError):
    """The output's folder is missing."""

    errno = ENOENT


class OutputIsFolderError(OutputError, IsADirectoryError):
    """The output is a folder."""

    errno = EISDIR


class OutputForbiddenError(OutputError, PermissionError):
    """The output's folder takes no file of this user."""

    errno = EACCES
