"""Findings: what a command has to say about a file, with the command that mends it."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

from ckpt_tools.text import printable
from ckpt_tools.tree.output_names import writes


@dataclass(slots=True, unsafe_hash=True)
class Finding:
    """One thing worth knowing.

    Attributes:
        code: a short stable name.
        severity: "info", "warning" (it stands in somebody's way) or "problem" (damage).
        where: a path from the root; empty for the file as a whole.
        found, expected: what is there and what should be.
        fix: what mends it, a command where there is one.
    """

    code: str
    severity: str
    where: list[str | int]
    found: str
    expected: str = ""
    fix: str = ""


_PACKED = re.compile(r"(?:\.tar)?\.(?:gz|bz2|xz|zst|tgz|nemo)$", re.IGNORECASE)
_TAR = re.compile(r"\.(?:tar\.\w+|tgz|nemo)$", re.IGNORECASE)
_DOUBLED = re.compile(r"(?<=[^/])\.(?:pth|pt|ckpt)\.tar$", re.IGNORECASE)  # as scripts call what torch.save writes
_NOT_WRITTEN = (".pkl", ".pickle", ".tar")  # the names of older formats, which a torch-zip may have too


def mending(command: str, path: str, options: str = "", *, suffix: str | None = None) -> str:
    """The line for a shell that mends a file: `ckpt COMMAND FILE FILE.fixed OPTIONS`."""
    if path.startswith("<"):  # an open file, standard input: whatever it is called where it is saved
        path = "FILE.pth"
    if path.startswith("-"):  # else it would be options
        path = f"./{path}"
    stem, own = (path.rstrip("/"), ".pth") if os.path.isdir(path) else stem_and_extension(path)
    stem = stem.rpartition("/")[2] if "://" in path else stem  # the output of what has an address is written here
    own = ".pth" if own.lower() in _NOT_WRITTEN or not writes(own) else own
    target = f"{stem}.fixed{own if suffix is None else suffix}"
    return printable(" ".join(["ckpt", command, shlex.quote(path), shlex.quote(target), options]).rstrip())


def stem_and_extension(path: str) -> tuple[str, str]:
    """The name of a file without its extension, and that; of a packed one what was packed."""
    archive, mark, member = path.partition("!")
    stem = _PACKED.sub("", archive)
    if not mark:
        if stem != archive and _TAR.search(archive):
            return stem, ".pth"
        doubled = _DOUBLED.search(stem)
        return (stem[: doubled.start()], doubled[0]) if doubled else os.path.splitext(stem)
    return stem, os.path.splitext(member)[1] or ".pth"


def may_be_of_several(name: str) -> bool:
    """Whether a file's name looks like that of one file of several, so that it is worth a look at those beside it."""
    return "-of-" in name or name.endswith(".distcp")


def getting_again(path: str, whole: int) -> str:
    """What to do about a file that was cut off with so many whole tensors in it."""
    advice = "An interrupted download or a full disk does that: get it again"
    return f"{advice}, or save what is whole: {mending('repair', path)}" if whole else f"{advice}."


def counted_bytes(count: int) -> str:
    """`1 byte`, `2 bytes`."""
    return "1 byte" if count == 1 else f"{count} bytes"
