"""The core of every family of parts: tensors put together from the boxes of them that ranks hold.

Boxes that are whole rows stay ranges of their files, others are put together in blocks while they are read (`values.boxes`). A
box that several ranks hold is taken from the first of them; whether the others hold the same is compared by `check_replicas`,
which reads them, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Keys
from ckpt_tools.text import listed, some, these_ranks
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Entry, Storage, contiguous_stride
from ckpt_tools.values.boxes import Chunk, Sizes, assemble
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.same_bytes import same_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A box of a tensor that one rank holds, and its elements: an entry of the box's sizes in that rank's file."""

    rank: int
    offsets: Sizes
    sizes: Sizes
    entry: Entry


class Merger:
    """Puts the tensors of one checkpoint together. Names whose shares are the same in every file are tied."""

    def __init__(self, keys: Keys, called: Mapping[int, str] | None = None) -> None:
        self.keys, self.called = keys, called or {}
        self.tied: dict[Any, Entry] = {}
        self.replicas: list[tuple[str, Share, Share]] = []

    def tensor(
        self, name: str, dtype: DType, shape: Sizes, shares: Sequence[Share], *, measured: Sizes | None = None,
        requires_grad: bool = False,
    ) -> Entry:  # fmt: skip
        """One tensor."""
        boxes: dict[tuple[Sizes, Sizes], Share] = {}
        for share in (share for share in shares if prod(share.sizes)):
            self._check_share(name, dtype, share)
            first = boxes.setdefault((share.offsets, share.sizes), share)
            if first is not share:
                self.replicas.append((name, first, share))
        whole = shape if measured is None else measured
        self._check_covered(name, whole, list(boxes.values()), shares)
        key = (dtype.name, shape, tuple((box, *_view(share.entry)) for box, share in boxes.items()))
        if prod(shape) and key in self.tied:
            return replace(self.tied[key], requires_grad=requires_grad)
        chunks = [Chunk(*box, row_major(share.entry)) for box, share in boxes.items()]
        content = assemble(name, whole, dtype.itemsize, chunks)
        storage = Storage(self.keys.next(), dtype, content.length, _device(shares), content)
        self.tied[key] = Entry(storage, dtype, shape, contiguous_stride(shape), 0, requires_grad)
        return self.tied[key]

    def replicated(self, name: str, entries: Sequence[tuple[int, Entry]]) -> Entry:
        """A tensor that every rank has whole: the first rank's, with the others to be compared."""
        rank, first = entries[0]
        own = Share(rank, (0,) * len(first.shape), first.shape, first)
        for other, entry in entries[1:]:
            if (entry.shape, entry.dtype.name) != (first.shape, first.dtype.name):
                raise self._disagreeing([name], [rank, other], "have different shapes or dtypes")
            self.replicas.append((name, own, replace(own, rank=other, entry=entry)))
        return first

    def shown(self, *ranks: int) -> str:
        """Ranks as a message shows them."""
        return these_ranks([self.called.get(rank, rank) for rank in ranks])

    def check_replicas(self) -> None:
        """Read what several ranks hold, and compare it."""
        if wrong := self.differing():
            raise self._disagreeing(list(wrong), sorted(set().union(*wrong.values())), "hold different values")

    def differing(self) -> dict[str, set[int]]:
        """The names of which ranks hold different values, with these ranks; reads them, once."""
        wrong: dict[str, set[int]] = {}
        for name, one, other in self.replicas:
            if one.entry.numel and not same_bytes(one.entry, other.entry):
                wrong.setdefault(name, set()).update((one.rank, other.rank))
        self.replicas.clear()
        return wrong

    def _check_share(self, name: str, dtype: DType, share: Share) -> None:
        if share.entry.dtype.name != dtype.name:
            raise PartError(f"{name!r} is {dtype.name}, and {share.entry.dtype.name} on {self.shown(share.rank)}.", rest=True)

    def _check_covered(self, name: str, shape: Sizes, boxes: Sequence[Share], shares: Sequence[Share]) -> None:
        held, wanted = sum(prod(share.sizes) for share in boxes), prod(shape)
        if held < wanted:
            ranks = sorted({share.rank for share in shares})
            where = f"on {self.shown(*ranks)}" if ranks else "here"
            raise PartError(
                f"{name!r} is not whole: {held} of its {wanted} elements are {where}.",
                why="A part is missing, or is of another job.",
                rest=True,
            )

    def _disagreeing(self, names: Sequence[str], ranks: Sequence[int], what: str) -> PartError:
        return PartError(
            f"The ranks {listed([self.called.get(rank, rank) for rank in ranks])} {what} for {some(names)}.",
            why="All of them have it whole, and it must be the same.",
            fix="Are these files of one step of one job? Buffers that each rank counts by itself (batch norm) differ as well.",
            rest=True,
        )


def _view(entry: Entry) -> tuple[int, int, Sizes]:
    return id(entry.storage), entry.offset, entry.stride


def _device(shares: Sequence[Share]) -> str | None:
    return shares[0].entry.storage.device if shares else "cpu"


Held = Sequence[tuple[int, Entry]]  # ranks in the order of their runs, and what each holds


def along(merger: Merger, name: str, axis: int, groups: Sequence[Held], *, pieces: int = 1) -> Entry:
    """One tensor out of the runs that ranks hold of it, in their order."""
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
