"""Tensors that were cut along one dimension, a run of it for each rank: tensor parallelism whose files do not say where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_tools.errors import PartError
from ckpt_tools.formats.parts.merging import Merger, Share
from ckpt_tools.tree.nodes import Entry

Held = Sequence[tuple[int, Entry]]  # ranks in the order of their runs, and what each holds


def along(merger: Merger, name: str, axis: int, groups: Sequence[Held], *, pieces: int = 1) -> Entry:
    """One tensor out of the runs that ranks hold of it, in their order.

    Args:
        merger: puts it together. name: for errors. axis: the dimension that was cut.
        groups: what each rank has; several groups of ranks have the same, and are compared.
        pieces: how many tensors lie one behind the other along the dimension, each of which was cut by itself: two of SwiGLU.

    Raises:
        PartError: shapes or dtypes do not fit one another.
    """
    first = groups[0][0][1]
    shares, size = list[Share](), 0
    for held in groups:
        for rank, entry in held:
            if _around(first, axis) is None or _around(entry, axis) != _around(first, axis) or entry.shape[axis] % pieces:
                one, two = (merger.shown(at) for at in (rank, groups[0][0][0]))
                among = f", of {pieces} each" if pieces > 1 else ""
                raise PartError(
                    f"{name!r} is {list(entry.shape)} on {one}, and {list(first.shape)} on {two}.",
                    why=f"They should be parts of one tensor along dimension {axis}{among}.",
                )
        shares += _shares(axis, held, pieces)
        size = max(size, sum(entry.shape[axis] for _, entry in held))
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    return merger.tensor(name, first.dtype, shape, shares, requires_grad=first.requires_grad)


def _around(entry: Entry, axis: int) -> tuple[int, ...] | None:
    """The sizes of the other dimensions; None without the dimension."""
    return (*entry.shape[:axis], -1, *entry.shape[axis + 1 :]) if axis < len(entry.shape) else None


def _shares(axis: int, held: Held, pieces: int) -> Iterator[Share]:
    at = 0
    for piece in range(pieces):
        for rank, entry in held:
            part = _piece(entry, axis, piece, pieces)
            yield Share(rank, tuple(at if dim == axis else 0 for dim in range(len(part.shape))), part.shape, part)
            at += part.shape[axis]


def _piece(entry: Entry, axis: int, number: int, pieces: int) -> Entry:
    size = entry.shape[axis] // pieces
    shape = (*entry.shape[:axis], size, *entry.shape[axis + 1 :])
    return replace(entry, shape=shape, offset=entry.offset + number * size * entry.stride[axis])
