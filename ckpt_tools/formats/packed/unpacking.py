"""A checkpoint in a compressed file or in a tar, read as what it is; what it lies in is told.

Members of a tar that is not compressed are read where they lie; what is compressed is inflated once. Whatever the layers, they
share the budget of the file.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, NotACheckpointError
from ckpt_tools.formats.base import Decoded, Packed
from ckpt_tools.formats.legacy import torch_tar
from ckpt_tools.formats.packed.compressed import Kind, inflate, kind_of
from ckpt_tools.formats.packed.members import (
    HEAD,
    Folder,
    Member,
    candidates,
    chosen,
    inside,
    members_of,
    none_inside,
    several_inside,
)
from ckpt_tools.io.output import Source, is_address
from ckpt_tools.io.sources import Files

_TAR_NAME = re.compile(r"\.(?:tar(?:\.\w+)?|tgz|tbz2?|txz|nemo)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Readers:
    """How to go on inside."""

    file: Callable[[Source], Decoded]
    folder: Callable[[Files], Decoded]
    begins: Callable[[bytes], bool]
    tensors: Callable[[Decoded], int]


def unpack_command(source: Source, head: bytes) -> str:
    """The line for a shell that unpacks a packed file, once it is here; "" for any other."""
    kind, path = kind_of(head), shlex.quote(source.path.name if is_address(source.path) else str(source.path))
    if kind is None:
        return f"tar xf {path}" if _is_tar(source, head) else ""
    return f"tar xf {path}" if _TAR_NAME.search(source.path.name) else f"{kind.shell} {path}"


def is_packed(source: Source, head: bytes) -> bool:
    """Whether a file that starts so is compressed, or a tar that torch did not write."""
    return kind_of(head) is not None or _is_tar(source, head)


def _is_tar(source: Source, head: bytes) -> bool:
    return torch_tar.sniff(head) and any(head) and not torch_tar.is_torchs(source)


def decode(source: Source, head: bytes, wanted: str, readers: Readers) -> Decoded:
    """Read the checkpoint in a packed file; `wanted` is the member that was asked for, or empty."""
    kind = kind_of(head)
    with limits.of_file(source.size):
        if kind is None:
            return _in_tar(source, source, "tar", wanted, readers)
        whole = inflate(source, kind)
        inner = whole.read(0, min(HEAD, whole.size))
        if _is_tar(whole, inner):
            return _in_tar(source, whole, f"tar{kind.suffix}", wanted, readers)
        name = source.path.name
        member = name[: -len(kind.suffix)] if name.lower().endswith(kind.suffix) else ""
        if wanted not in ("", member):
            raise NotACheckpointError(f"{source.path} is one compressed file, and has no member {wanted!r}.")
        return _compressed(source, whole, kind, member, readers)


def _compressed(source: Source, whole: Source, kind: Kind, member: str, readers: Readers) -> Decoded:
    whole.path = inside(source.path, member)
    try:
        with _about(whole):
            decoded = readers.file(whole)
    except NotACheckpointError as error:
        why = error.what.removeprefix(f"{source.path}: ").replace(str(whole.path), "It")
        fix = f"Unpack it to see what it is: {kind.shell} FILE."
        raise NotACheckpointError(
            f"{source.path} is {kind.called} of something that is not a checkpoint.", why=why, fix=fix
        ) from None
    decoded.packed = Packed(kind.name, member, source, whole, source.path)
    return decoded


def _in_tar(source: Source, tar: Source, kind: str, wanted: str, readers: Readers) -> Decoded:
    members = members_of(tar)
    found = {wanted: chosen(tar, members, wanted)} if wanted else candidates(tar, members, readers.begins)
    if not found:
        raise none_inside(tar, members)
    read: dict[str, Decoded] = {}
    if len(found) > 1:
        found = _with_tensors(found, readers, read)
    if len(found) > 1:
        raise several_inside(source.path, list(found))
    name, place = next(iter(found.items()))
    decoded = read[name] if name in read else _read(place, readers)
    folder = place if isinstance(place, Folder) else Folder(tar, name.rpartition("/")[0], members)
    path = place.path if wanted else source.path
    decoded.packed = Packed(kind, name, source, tar, path, folder)
    return decoded


def _with_tensors(
    found: Mapping[str, Folder | Member], readers: Readers, read: dict[str, Decoded]
) -> dict[str, Folder | Member]:
    """Of several, those with tensors, and those that cannot be read; all where that leaves none."""
    left: dict[str, Folder | Member] = {}
    for name, place in found.items():
        try:
            decoded = _read(place, readers) if len(left) < _SEVERAL else None
        except CkptError:
            decoded = None
        if decoded is None or readers.tensors(decoded):
            left[name] = place
        if decoded is not None and name in left:
            read[name] = decoded
    return left or dict(found)


_SEVERAL = 2


def _read(place: Folder | Member, readers: Readers) -> Decoded:
    with _about(place):
        return readers.folder(place) if isinstance(place, Folder) else readers.file(place)


@contextlib.contextmanager
def _about(place: Source) -> Iterator[None]:
    """Errors inside the block say which member they are about, and give no command that takes only what is not packed."""
    try:
        yield
    except CkptError as error:
        if str(place.path) not in error.what:
            error.what = f"{place.path}: {error.what}"
        if "ckpt repair" in error.fix or (isinstance(error, DamagedFileError) and error.whole and not error.fix):
            error.fix = "Get it again, or unpack it and give ckpt repair the file that was in it."
        raise
