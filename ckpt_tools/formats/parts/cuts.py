"""Tensors that were cut along one dimension, a run of it for each rank: tensor parallelism whose files do not say where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.errors import PartError
from ckpt_tools.formats.parts.merging import Merger, Share
from ckpt_tools.tree.nodes import Entry

Held = Sequence[tuple[int, Entry]]  # ranks in the order of their runs, and what each holds


def along(merger: Merger, name: str, axis: int, held: Held, *, pieces: int = 1) -> Entry:
    """One tensor out of the runs that ranks hold of it, in their order.

    Args:
        merger: puts it together. name: for errors. axis: the dimension that was cut. held: what each rank has.
        pieces: how many tensors lie one behind the other along the dimension, each of which was cut by itself: two of SwiGLU.

    Raises:
        PartError: shapes or dtypes do not fit one another.
    """
    first = held[0][1]
    for rank, entry in held:
        other = (*entry.shape[:axis], *entry.shape[axis + 1 :]) != (*first.shape[:axis], *first.shape[axis + 1 :])
        if len(entry.shape) <= axis or len(entry.shape) != len(first.shape) or other or entry.shape[axis] % pieces:
            raise PartError(
                f"{name!r} is {list(entry.shape)} on rank {rank}, and {list(first.shape)} on rank {held[0][0]}.",
                why=f"They should be parts of one tensor along dimension {axis}{f', of {pieces} each' if pieces > 1 else ''}.",
            )
    shares, at = list[Share](), 0
    for piece in range(pieces):
        for rank, entry in held:
            part = _piece(entry, axis, piece, pieces)
            shares.append(Share(rank, tuple(at if dim == axis else 0 for dim in range(len(first.shape))), part.shape, part))
            at += part.shape[axis]
    shape = (*first.shape[:axis], at, *first.shape[axis + 1 :])
    return merger.tensor(name, first.dtype, shape, shares, requires_grad=first.requires_grad)


def _piece(entry: Entry, axis: int, number: int, pieces: int) -> Entry:
    size = entry.shape[axis] // pieces
    shape = (*entry.shape[:axis], size, *entry.shape[axis + 1 :])
    return replace(entry, shape=shape, offset=entry.offset + number * size * entry.stride[axis])
