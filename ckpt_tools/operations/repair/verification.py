"""Read back what repair wrote, before it gets its name, and compare every tensor with the source, as restic does.

The writer copies storages and pieces of files; this goes by tensors: a digest of each, gathered from the source, and one from
the output, which is opened as any other file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, RepairError
from ckpt_tools.formats.open import find_tensors, open_checkpoint
from ckpt_tools.io.content import chunks
from ckpt_tools.operations.check import digests
from ckpt_tools.tree.nodes import Entry, Node, Where
from ckpt_tools.values.numeric import row_major, view_of


def verify(written: Path, expected: Iterable[tuple[Where, Entry]], target: str) -> None:
    """Compare the tensors of a file that was just written with those that it is made of.

    Args:
        written: the file, under whatever name. expected: the tensors by their paths in it. target: what it will be called.

    Raises:
        RepairError: they differ, or it cannot be read.
    """
    wanted = dict(expected)
    try:
        with open_checkpoint(written) as checkpoint:
            found = dict(entries(checkpoint.root))
            differ = [where for where in wanted if where not in found or not _alike(wanted[where], found[where])]
            size = written.stat().st_size
            hashes = _digests({where: found[where] for where in wanted if where in found}, size)
    except CkptError as error:
        raise RepairError(f"{target} could not be read back, and is not there.", why=f"{error.what} {error.why}") from None
    for where, digest in _digests(wanted, size).items():
        if hashes.get(where) != digest:
            differ.append(where)
    if differ:
        raise RepairError(
            f"What was written of {len(differ)} tensors is not what was read, and {target} is not there.",
            why="The disk or the memory of this machine does not give back the bytes that it was given.",
        )


def entries(root: Node) -> Iterator[tuple[Where, Entry]]:
    """The tensors of a tree that are plain views, by path."""
    return ((tensor.where, tensor.node) for tensor in find_tensors(root) if type(tensor.node) is Entry)


def _alike(one: Entry, two: Entry) -> bool:
    return (one.dtype, one.shape) == (two.dtype, two.shape)


def _digests(tensors: dict[Where, Entry], size: int) -> dict[Where, str]:
    """The digest of each; views that come again are read once, and no more is read than a file of this size may ask for."""
    known: dict[tuple[int, str], str] = {}
    left, found = limits.WORK_BYTES.most(size), {}
    for where, entry in tensors.items():
        key = view_of(entry)
        if key not in known:
            if entry.nbytes > left or not entry.dtype.in_torch:
                continue
            left -= entry.nbytes
            hashed = digests.begin(entry)
            for chunk in chunks(row_major(entry)):
                hashed.update(chunk)
            known[key] = hashed.hexdigest()
        found[where] = known[key]
    return found
