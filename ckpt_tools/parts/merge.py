"""The core of every family of parts: tensors put together from the boxes of them that ranks hold, in blocks as they are read.

What several ranks hold is taken from the first; `Merger.compared` compares it, before anything is written."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, prod
from typing import Any, TypeAlias

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Keys
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.io.content import read
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.sharded import joined, partly
from ckpt_tools.text import dotted, listed, some, these_ranks
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.exchange import DROP, Drop
from ckpt_tools.tree.nodes import Entry, Node, Storage, Where, contiguous_stride
from ckpt_tools.values.boxes import Sizes, assemble
from ckpt_tools.values.numeric import row_major, same_bytes

Rank: TypeAlias = int | str  # as messages name it: a number, a folder
Held: TypeAlias = Sequence[tuple[Rank, Entry]]  # what each rank holds of one tensor, in their order


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box of a tensor that one rank holds: where it begins, and the elements, an entry in that rank's file."""

    offsets: Sizes
    entry: Entry
    rank: Rank = 0

    @property
    def sizes(self) -> Sizes:
        return self.entry.shape


class Merger:
    """Puts the tensors of one checkpoint together. Names whose pieces are the same in every file are tied.

    With `partial` what is not whole goes into `lost` by name, with the reason, and `leave_out` removes it.
    """

    def __init__(self, keys: Keys | None = None, *, partial: bool = False) -> None:
        self.keys, self.partial = keys or Keys(), partial
        self.lost: dict[str, str] = {}
        self.tied: dict[Any, Entry] = {}
        self.replicas: list[tuple[str, Piece, Piece]] = []

    def tensor(
        self, name: str, dtype: DType, shape: Sizes, pieces: Sequence[Piece], *, measured: Sizes | None = None,
        requires_grad: bool = False,
    ) -> Entry:  # fmt: skip
        """One tensor. `measured`: the shape that the pieces are boxes of, where that is not the tensor's."""
        boxes: dict[tuple[Sizes, Sizes], Piece] = {}
        for piece in (piece for piece in pieces if piece.entry.numel):
            if piece.entry.dtype.name != dtype.name:
                raise PartError(f"{name!r} is {dtype.name}, and {piece.entry.dtype.name} on {_shown([piece.rank])}.", rest=True)
            first = boxes.setdefault((piece.offsets, piece.sizes), piece)
            if first is not piece:
                self.replicas.append((name, first, piece))
        held, whole = {box: piece.entry for box, piece in boxes.items()}, shape if measured is None else measured
        if (count := sum(entry.numel for entry in held.values())) < prod(whole):
            where = f"on {_shown(piece.rank for piece in pieces)}" if pieces else "here"
            raise PartError(f"{name!r} is not whole: {count} of its {prod(whole)} elements are {where}.", rest=True)
        key = (dtype.name, shape, *((box, entry.storage, entry.offset, entry.stride) for box, entry in held.items()))
        if prod(shape) and key in self.tied:
            return replace(self.tied[key], requires_grad=requires_grad)
        content = assemble(name, whole, dtype.itemsize, ((*box, row_major(entry)) for box, entry in held.items()))
        device = pieces[0].entry.storage.device if pieces else "cpu"
        storage = Storage(self.keys.next(), dtype, content.length, device, content)
        self.tied[key] = Entry(storage, dtype, shape, contiguous_stride(shape), 0, requires_grad)
        return self.tied[key]

    def replicated(self, name: str, held: Held) -> Entry:
        """A tensor that every rank has whole: the first rank's, with the others to be compared."""
        own, *others = [Piece((0,) * len(entry.shape), entry, rank) for rank, entry in held]
        for other in others:
            if (other.sizes, other.entry.dtype.name) != (own.sizes, own.entry.dtype.name):
                raise _disagreeing([name], [own.rank, other.rank], "have different shapes or dtypes")
            self.replicas.append((name, own, other))
        return own.entry

    def along(self, name: str, axis: int, groups: Sequence[Held], *, count: int = 1) -> Entry:
        """One tensor out of the runs along a dimension that ranks hold; `count` runs each, first all first ones."""

        def at_axis(shape: Sizes, size: int) -> Sizes:
            return (*shape[:axis], size, *shape[axis + 1 :])

        start, first = groups[0][0]
        pieces, whole = list[Piece](), 0
        for held in groups:
            for rank, entry in held:
                fits = len(entry.shape) > axis and at_axis(entry.shape, 0) == at_axis(first.shape, 0)
                if not fits or entry.shape[axis] % count:
                    what = f"{list(entry.shape)} on {_shown([rank])}, and {list(first.shape)} on {_shown([start])}"
                    raise PartError(f"{name!r} is {what}.", why=f"They should be {count} parts each along dimension {axis}.")
            at = 0
            for number, (rank, entry) in product(range(count), held):
                size = entry.shape[axis] // count
                run = replace(entry, shape=at_axis(entry.shape, size), offset=entry.offset + number * size * entry.stride[axis])
                pieces.append(Piece(at_axis((0,) * len(first.shape), at), run, rank))
                at += size
            whole = max(whole, at)
        return self.tensor(name, first.dtype, at_axis(first.shape, whole), pieces, requires_grad=first.requires_grad)

    def compared(self, root: Node) -> Node:
        """The tree, once what several ranks hold was read and compared."""
        wrong: dict[str, dict[Rank, None]] = {}
        for name, one, other in self.replicas:
            if one.entry.numel and not same_bytes(one.entry, other.entry):
                wrong.setdefault(name, {}).update({one.rank: None, other.rank: None})
        self.replicas.clear()
        if wrong and not self.partial:
            raise _disagreeing(list(wrong), [rank for ranks in wrong.values() for rank in ranks])
        self.lost |= {name: f"different values on {_shown(ranks)}" for name, ranks in wrong.items()}
        return self.leave_out(root)

    # --- what is not whole

    def unless_lost(self, name: str, make: Callable[[], Node]) -> Node | Drop:
        """What is made under a name; DROP where that is not whole and no error."""
        try:
            return make()
        except PartError as error:
            if not (self.partial and error.rest):
                raise
            self.lost.setdefault(name, error.what.removeprefix(f"{name!r} ").rstrip("."))
            return DROP

    def leave_out(self, root: Node, inside: Where = ()) -> Node:
        """The tree without what is lost, and without what is the same tensor under another name; `inside`: where it will be."""
        if not self.lost:
            return root
        tensors = [(dotted((*inside, *tensor.where)), tensor) for tensor in find_tensors(root)]
        gone = {id(tensor.node): self.lost[name] for name, tensor in tensors if name in self.lost}
        out = [(name, tensor) for name, tensor in tensors if id(tensor.node) in gone]
        if not inside and len(out) == len(tensors):
            name, why = next(iter(self.lost.items()))
            raise PartError(f"No tensor is whole in these files: {name!r} ({why}), and {len(self.lost) - 1} more.")
        self.lost |= {name: gone[id(tensor.node)] for name, tensor in out}
        if fixed := [name for name, tensor in out if not is_named(tensor.where)]:
            raise PartError(f"{fixed[0]!r} cannot be left out of its list: {self.lost[fixed[0]]}.")
        return exchange.replace(root, lambda node: DROP if id(node) in gone else node)


def _shown(ranks: Iterable[Rank]) -> str:
    every = list(dict.fromkeys(ranks))
    return these_ranks(every) if type(every[0]) is int else listed(every)


def _disagreeing(names: Sequence[str], ranks: Sequence[Rank], what: str = "hold different values") -> PartError:
    fix = "Are these files of one step of one job? Buffers that each rank counts by itself (batch norm) differ as well."
    return PartError(f"{_shown(ranks)} {what} for {some(names)}.", fix=fix, rest=True)


def is_named(where: Where) -> bool:
    """Whether a tensor is in a dict: one of a list cannot be left out, nor one that is all that there is."""
    return bool(where) and type(where[-1]) is str


# --- several files as one


def merged(
    container: str,
    root: Node,
    files: Files,
    parts: Sequence[Checkpoint],
    merger: Merger,
    missing: Sequence[str] = (),
    also: Callable[[], None] = lambda: None,
) -> Checkpoint:
    """One Checkpoint of what ranks hold, which is compared before anything is made of it; `also` compares more."""
    made = joined(container, root, files, parts, {})
    made.has_checksums = False  # those of the ranks' records are not looked at
    made.lost = merger.lost
    partly(made, missing)

    def compared(root: Node) -> Node:
        also()
        return merger.compared(root)

    made.locator = compared
    return made


# --- what the bytes of parts say against their files' names, where nothing else in the files says whose they are
#
# Of each part the first elements are read, and more of two only where those are the same.

_LOOKED_AT = 1024  # elements of a part
_VARIED = 16  # different elements, which no padding has, and no norm or bias that was never trained
_NEAR = 1 / 32  # relative; a cast to bfloat16 is off by 1/256, wherever it is rounded to
_CODES = {"float32": "f", "float16": "e", "bfloat16": "f"}


def _head(entry: Entry) -> bytes:
    return read(row_major(replace(entry, shape=(min(entry.numel, _LOOKED_AT),), stride=(1,))))


def _in_rows(entries: Iterable[Entry]) -> list[Entry]:
    """Those that have elements, row-major, as their bytes say them."""
    return [entry for entry in entries if entry.numel and entry.is_contiguous and not entry.lazy_bits]


def check_not_twice(parts: Mapping[str, Sequence[Entry]]) -> None:
    """No two files hold the very same numbers of what was cut among them."""
    known: dict[object, str] = {}
    for file, entries in parts.items():
        plain = _in_rows(entries)
        largest = max(plain, key=lambda entry: entry.numel, default=None)
        data, width = (_head(largest), largest.dtype.itemsize) if largest is not None else (b"", 1)
        if len({data[at : at + width] for at in range(0, len(data), width)}) < _VARIED:
            continue
        first = known.setdefault((data, tuple((entry.dtype.name, entry.shape) for entry in plain)), file)
        if first != file and all(map(same_bytes, _in_rows(parts[first]), plain)):
            raise PartError(f"{first} and {file} hold the very same numbers of what was cut among them: one is there twice.")


def check_casts(pairs: Iterable[tuple[str, str, Entry, Entry]]) -> None:
    """Numbers and their 16-bit cast, which another file holds, are the same but for rounding."""
    for file, name, own, cast in pairs:
        numbers = _numbers(own)
        # of infinities and of what a cast makes zero nothing is said
        finite = [pair for pair in zip(numbers, _numbers(cast), strict=False) if all(map(isfinite, pair))]
        far = sum(abs(one - other) > _NEAR * max(abs(one), abs(other)) + 1e-6 for one, other in finite)
        if 2 * far > len(numbers):
            what = f"{file} does not hold the weights that the model file has: {far} of the first {len(numbers)} of {name!r}"
            raise PartError(f"{what} are others.", fix="Get the files of one save again.")


def _numbers(entry: Entry) -> Sequence[float]:
    """The first elements; none where they do not lie in a row, or are not a model's numbers."""
    if (code := _CODES.get(entry.dtype.name)) is None or not _in_rows([entry]):
        return ()
    data = _head(entry)
    if entry.dtype.name == "bfloat16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    return struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
