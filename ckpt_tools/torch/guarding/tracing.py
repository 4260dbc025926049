"""Which tensor of which file a live tensor is: by its name first, then by its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ckpt_tools.frozen import frozen
from ckpt_tools.text import listed
from ckpt_tools.torch.guarding import samples
from ckpt_tools.torch.guarding.stored import Library, Stored
from ckpt_tools.torch.proving.relations import permuted
from ckpt_tools.tree.dtypes import DTYPES, DType

_MOST_OFFSETS, _MOST_PARTS, _SHOWN = 64, 1024, 4
_MOST_COMPARED = 1 << 26  # elements of a tensor of which all rows are compared
_HALVES = ("bfloat16", "float16")


@frozen
class Origin:
    """Where a tensor's numbers are from: the file, the name in there, and what was done to them on the way."""

    path: str
    name: str
    how: str = ""


class Live(NamedTuple):
    """A live tensor, under all its names.

    Attributes:
        names: its names, those of the tensors tied to it too. tensor: itself. sample: taken when the guard ended.
    """

    names: Sequence[str]
    tensor: torch.Tensor
    sample: bytes

    @property
    def dtype(self) -> DType:
        """Its dtype."""
        found = samples.dtype_of(self.tensor.dtype)
        assert found is not None, "it is plain"
        return found


class Tracer:
    """Finds the origins of one model's tensors in the files' tensors.

    Numbers that many tensors have (all zeros, all ones) tell little: they are evidence under the same name, and else only for a
    tensor that was written to, and of one that no other tensor of the model is from.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._claimed: set[int] = set()

    def by_name(self, live: Live) -> Origin | None:
        """The tensor in a file under one of the live tensor's names, if its numbers are the same."""
        for name in live.names:
            for stored in self.library.named(name):
                how = _how(stored, live)
                if how is not None:
                    self._claimed.add(id(stored))
                    return Origin(stored.path, stored.where, how)
        return None

    def by_numbers(self, live: Live, *, written: bool) -> Origin | None:
        """A tensor under any other name with the same numbers; rows of one, or several one below the other.

        `written` is whether anything says that the live one was written to.
        """
        found = self.library.same(live.sample, live.dtype, live.tensor.numel())
        if not samples.is_telling(live.sample, live.dtype):
            found = [stored for stored in found if written and id(stored) not in self._claimed]
        if found:
            self._claimed.add(id(found[0]))
            return Origin(found[0].path, found[0].where, _how(found[0], live) or "")
        if not written or not live.tensor.dim() or not samples.is_telling(live.sample, live.dtype):
            return None
        return self._in_rows(live) or self._of_rows(live)

    def reordered(self, live: Live) -> Origin | None:
        """The tensor of one of its names with the same rows in another order, as other rotary embeddings want them."""
        shape = tuple(live.tensor.shape)
        if len(shape) < 2 or live.tensor.numel() > _MOST_COMPARED or not samples.is_telling(live.sample, live.dtype):
            return None
        for stored in (stored for name in live.names for stored in self.library.named(name)):
            if stored.entry.shape == shape and stored.entry.dtype.family == live.dtype.family == "float":
                data = samples.cast(stored.at(((0, live.tensor.numel()),)), stored.entry.dtype, live.dtype)
                there = torch.frombuffer(bytearray(data or b""), dtype=live.tensor.dtype)
                if len(there) and permuted(there.reshape(shape).double(), live.tensor.detach().cpu().double(), 0, 0):
                    return Origin(stored.path, stored.where, "reordered rows")
        return None

    def partly(self, live: Live) -> Origin | None:
        """The tensor of one of its names that has some of the same numbers at the same places of its rows."""
        for stored in (stored for name in live.names for stored in self.library.named(name)):
            if stored.entry.shape[1:] == tuple(live.tensor.shape[1:]) and live.tensor.dim():
                runs = samples.runs_of(live.tensor.numel())
                inside = [run for run in runs if sum(run) <= stored.entry.numel]
                equal = sum(self._equal(stored, live, run) for run in inside)
                if equal:
                    return Origin(stored.path, stored.where, f"{equal} of {len(runs)} samples are the file's")
        return None

    @staticmethod
    def _equal(stored: Stored, live: Live, run: tuple[int, int]) -> bool:
        data = samples.cast(stored.at((run,)), stored.entry.dtype, live.dtype)
        return data == samples.of_live(live.tensor, (run,)) and samples.is_telling(data, live.dtype)

    def _in_rows(self, live: Live) -> Origin | None:
        """Rows of a larger tensor: a fused one that was split."""
        rows, size = len(live.tensor), live.tensor[0].numel() if len(live.tensor) else 0
        runs = samples.runs_of(live.tensor.numel())
        for stored in self.library.by_row.get(tuple(live.tensor.shape[1:]), ()):
            over = stored.entry.shape[0] - rows
            if over <= 0 or stored.entry.dtype.family != live.dtype.family:
                continue
            for at in [*range(0, over, rows)[:_MOST_OFFSETS], over]:
                data = stored.at(samples.shifted(runs, at * size))
                if samples.cast(data, stored.entry.dtype, live.dtype) == live.sample:
                    return Origin(stored.path, stored.where, f"rows {at} to {at + rows - 1}")
        return None

    def _of_rows(self, live: Live) -> Origin | None:
        """Several tensors one behind the other: parts that were fused, experts that were stacked."""
        shape = tuple(live.tensor.shape)
        for depth in range(1, len(shape) + 1):
            if parts := self._parts(live, shape[depth:]):
                return Origin(
                    parts[0].path, parts[0].where, f"joined with {listed([part.where for part in parts[1:]], _SHOWN)}"
                )
        return None

    def _parts(self, live: Live, row: tuple[int, ...]) -> list[Stored]:
        """Tensors with rows of this shape that are the live one, one behind the other; none where some of it is not theirs."""
        starts, total = self.library.starts(row, live.dtype), live.tensor.numel()
        parts: list[Stored] = []
        at = 0
        while at < total and len(parts) < _MOST_PARTS:
            begin = samples.of_live(live.tensor, ((at, min(samples.START, total - at)),))
            fitting = (stored for stored in starts.get(begin, ()) if stored.entry.numel <= total - at)
            part = next((stored for stored in fitting if _lies_at(stored, live, at)), None)
            if part is None:
                return []
            parts.append(part)
            at += part.entry.numel
        return parts if at == total else []


def _lies_at(stored: Stored, live: Live, first: int) -> bool:
    data = samples.cast(stored.sample, stored.entry.dtype, live.dtype)
    if not data:
        return False
    return data == samples.of_live(live.tensor, samples.shifted(samples.runs_of(stored.entry.numel), first))


def _how(stored: Stored, live: Live) -> str | None:
    """What was done to a file's tensor to make the live one; the empty text where they are equal, None where they are not."""
    entry, shape = stored.entry, tuple(live.tensor.shape)
    if entry.shape == shape and entry.dtype is live.dtype and stored.sample == live.sample:
        return ""  # as most
    if entry.numel != live.tensor.numel():
        return None
    moves = [f"{len(entry.shape)} -> {len(shape)} dimensions"] if entry.shape != shape else []
    if entry.dtype is not live.dtype:
        moves.append(f"{entry.dtype.name} -> {live.dtype.name}")
    if samples.cast(stored.sample, entry.dtype, live.dtype) == live.sample:
        return ", ".join(moves)
    for half in _HALVES if entry.dtype.family == live.dtype.family == "float" else ():
        rounded = samples.cast(stored.sample, entry.dtype, DTYPES[half])
        if rounded is not None and samples.cast(rounded, DTYPES[half], live.dtype) == live.sample:
            return f"{entry.dtype.name} -> {half} -> {live.dtype.name}"
    if len(shape) == 2 and entry.shape == shape[::-1] and _transposed(stored, live) == live.sample:
        return "transposed"
    return None


def _transposed(stored: Stored, live: Live) -> bytes | None:
    """The live tensor's sample, taken from the transposed tensor in the file."""
    rows, columns = live.tensor.shape
    places = [place for start, length in samples.runs_of(live.tensor.numel()) for place in range(start, start + length)]
    runs = tuple(((place % columns) * rows + place // columns, 1) for place in places)
    return samples.cast(stored.at(runs), stored.entry.dtype, live.dtype)
