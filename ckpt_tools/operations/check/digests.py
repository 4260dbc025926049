"""Digests: one SHA-256 a tensor, equal for equal tensors whatever file they are in.

The digest of a tensor is SHA-256 over its dtype, a space, its shape, a line feed, and its elements row-major,
little-endian: for a float32 matrix of 2 x 3 the bytes `float32 [2,3]\\n` and 24 bytes more. dtypes are named as torch names
them; shapes are torch's (float4 counts pairs). Strides, offsets, ties, device tags and requires_grad do not count.

A digest file is UTF-8 text. Lines that begin with `#` are comments; the first says the version. Every other line holds
four fields between tabs: the digest in hexadecimal, the dtype, the shape, and the tensor's path from the root as a JSON list.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.io.parsers import load_json
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Entry, Where

HEAD = '# ckpt digest 1: SHA-256 of "DTYPE [SHAPE]\\n" and the elements row-major, little-endian'


@dataclass(slots=True, unsafe_hash=True)
class Digest:
    """The digest of one tensor: `where` it is, its dtype and shape, and `sha256`, sixty-four hexadecimal digits."""

    where: Where
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def line(self) -> str:
        """Its line in a digest file."""
        return "\t".join((self.sha256, self.dtype, shape_text(self.shape), json.dumps(list(self.where))))


@dataclass(slots=True)
class Compared:
    """What a comparison of two sets of digests found; paths are those of the file that is checked, where it has them.

    Attributes:
        against: the path of what it was compared with.
        equal: how many are the same.
        renamed: how many of these were found under another path (by name, or by name without wrappers).
        different: the same tensor with other bytes, shape or dtype, with what differs.
        missing: only in what is compared with. unexpected: only in the file that is checked.
    """

    against: str
    equal: int = 0
    renamed: int = 0
    different: list[tuple[Where, str]] = field(default_factory=list)
    missing: list[Where] = field(default_factory=list)
    unexpected: list[Where] = field(default_factory=list)


def shape_text(shape: Sequence[int]) -> str:
    """A shape as it goes into a digest: `[2,3]`."""
    return f"[{','.join(map(str, shape))}]"


def begin(entry: Entry) -> hashlib._Hash:
    """A SHA-256 that has taken in dtype and shape, and waits for the elements."""
    return hashlib.sha256(f"{entry.dtype.name} {shape_text(entry.shape)}\n".encode())


def of_all(digests: Iterable[Digest]) -> str:
    """One SHA-256 for a checkpoint: over a line `SHA256 NAME` for each tensor, sorted; a name is the last part of a path."""
    rows = sorted(f"{digest.sha256} {digest.where[-1] if digest.where else ''}\n" for digest in digests)
    return hashlib.sha256("".join(rows).encode("utf-8", "surrogatepass")).hexdigest()


def text(digests: Iterable[Digest], path: str) -> str:
    """A digest file."""
    return "\n".join([HEAD, f"# of {json.dumps(path)}", *(digest.line() for digest in digests)]) + "\n"


def is_digest_file(path: Path) -> bool:
    """Whether a file begins as digest files do."""
    try:
        with path.open("rb") as file:
            return file.read(14) == b"# ckpt digest "
    except (OSError, ValueError):  # a path with a NUL in it
        return False


def read(path: Path) -> list[Digest]:
    """The digests in a file."""
    try:
        limits.HEADER.check(path.stat().st_size, f"{path} is too large for a digest file.")
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NotACheckpointError(f"{path} cannot be read.", why=f"{error}.") from None
    if not lines[0].startswith("# ckpt digest 1:"):
        raise NotACheckpointError(f"{path} is a digest file of another version.", why=f"It begins with {lines[0][:60]!r}.")
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]


def _parse(path: Path, number: int, line: str) -> Digest:
    try:
        sha256, dtype, shape, where = line.rstrip("\r").split("\t")
        return checked(sha256, dtype, load_json(shape), load_json(where))
    except ValueError:
        why = "A line is digest, dtype, shape and path, between tabs."
        raise NotACheckpointError(f"{path} is damaged at line {number}.", why=why) from None


def checked(sha256: Any, dtype: Any, shape: Any, where: Any) -> Digest:
    """A digest of what a file says. Raises ValueError."""
    is_digest = isinstance(sha256, str) and len(sha256) == 64 and set(sha256) <= set(string.hexdigits)
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    parts = isinstance(where, list) and all(type(part) in (str, int) for part in where)
    if not (is_digest and sizes and parts and isinstance(dtype, str)):
        raise ValueError
    return Digest(tuple(where), dtype, tuple(shape), sha256.lower())


def compare(own: Sequence[Digest], other: Sequence[Digest], against: str) -> Compared:
    """Compare two sets of digests."""
    result = Compared(against)
    left, right = {digest.where: digest for digest in own}, {digest.where: digest for digest in other}
    hidden = [digest.where for digest in own if digest is not left[digest.where]]  # None and "None" are one as text
    for number, key in enumerate(_KEYS):
        others = _unique(right, key)
        for name, mine in _unique(left, key).items():
            if (theirs := others.get(name)) is None:
                continue
            del left[mine.where], right[theirs.where]
            if mine.sha256 != theirs.sha256:
                result.different.append((mine.where, _difference(mine, theirs)))
            else:
                result.equal += 1
                result.renamed += number > 0
    result.missing, result.unexpected = list(right), [*left, *hidden]
    return result


_Key = Callable[[Where], object]
# By what a tensor is found again: its path, its name, its name without wrappers.
_KEYS: tuple[_Key, ...] = (
    lambda where: where,
    lambda where: where[-1] if where else "",
    lambda where: unwrap(str(where[-1])) if where else "",
)


def _unique(digests: Mapping[Where, Digest], key: _Key) -> dict[object, Digest]:
    """The digests by key, without those that share one."""
    counts = Counter(map(key, digests))
    return {name: digest for where, digest in digests.items() if counts[name := key(where)] == 1}


def _difference(mine: Digest, theirs: Digest) -> str:
    if mine.dtype != theirs.dtype:
        return f"{mine.dtype}, and {theirs.dtype} there"
    if mine.shape != theirs.shape:
        return f"shape {shape_text(mine.shape)}, and {shape_text(theirs.shape)} there"
    return "other bytes"
