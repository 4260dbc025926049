"""Tensors of another shape than the target wants: the part that both have, or a rule for the layer that has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.fit.initialisers import (
    Blank,
    Scheme,
    check_finite,
    numbers,
    threads_for,
)
from ckpt_tools.io.content import (
    CHUNK,
    Computed,
    Content,
    Literal,
    Range,
    read,
)
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import part, row_major, torch_dtype
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Adapted:
    """The bytes of a tensor in its new shape, in the dtype that it had, and what was done in words."""

    content: Content
    what: str


# --- overlap


def kept_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """How much of a tensor fits into a shape, per dimension; None when they have different numbers of dimensions."""
    if len(shape) != len(entry.shape) or not shape:
        return None
    return tuple(min(pair) for pair in zip(entry.shape, shape, strict=True))


def overlap(entry: Entry, blank: Blank, scheme: Scheme | None, seed: int) -> Adapted:
    """The rows and columns that a tensor and a shape both have; the rest initialised."""
    need_torch("Tensors are fitted to another shape with it.")
    kept = kept_shape(entry, blank.shape)
    assert kept is not None
    rest = "" if kept == blank.shape else f", the rest {scheme} (seed {seed})"
    what = f"{_text(entry.shape)} -> {_text(blank.shape)}: the first {_text(kept)} kept{rest}"
    work = _Overlap(entry, blank, scheme or Scheme("zeros"), seed, kept)
    return Adapted(Computed(math.prod(blank.shape) * blank.dtype.itemsize, work.chunks, entry.storage.content), what)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True, slots=True)
class _Overlap:
    """A few rows at a time: initial values, and over them what is kept."""

    entry: Entry
    blank: Blank
    scheme: Scheme
    seed: int
    kept: tuple[int, ...]

    def chunks(self) -> Iterator[memoryview]:
        import torch

        rows, *below = self.blank.shape
        width = math.prod(below)
        dtype = torch_dtype(self.blank.dtype)
        source = row_major(self.entry)
        if not isinstance(source, Range | Literal):  # row by row: what must be worked out is worked out once
            source = Literal(read(source))
        step = max(1, CHUNK // max(1, width * dtype.itemsize)) if self.scheme.kind != "orthogonal" else rows
        for start in range(0, rows if width else 0, step):
            count = min(step, rows - start)
            block = torch.empty((count, *below), dtype=dtype, device="cpu")
            if self.kept != self.blank.shape:
                with threads_for(self.scheme):
                    values = numbers(self.scheme, self.blank, self.seed, start * width, count * width)
                block.copy_(values.reshape(block.shape))
                check_finite(block, self.blank.name)
            inside = tuple(slice(size) for size in self.kept[1:])
            for at, old in enumerate(self._rows(source, start, count, dtype)):
                block[at][inside] = old[inside]
            yield _bytes(block)

    def _rows(self, source: Content, start: int, count: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The rows of the source that come to `start` and after."""
        import torch

        below = self.entry.shape[1:]
        size = math.prod(below) * dtype.itemsize
        for row in range(start, min(start + count, self.kept[0])) if size else ():
            data = bytearray(read(part(source, row * size, size)))
            yield torch.frombuffer(data, dtype=dtype).reshape(below)


def _bytes(values: torch.Tensor) -> memoryview:
    import torch

    out = bytearray(values.nbytes)
    torch.frombuffer(out, dtype=values.dtype).copy_(values.reshape(-1))
    return memoryview(out)


# --- rules


def adapt(name: str, entry: Entry, shape: tuple[int, ...], *, first: bool) -> Adapted | None:
    """A tensor in another shape by the rule for its layer, or None where there is no rule."""
    if entry.dtype.family != "float" or entry.dtype.packed > 1 or not entry.dtype.in_torch:
        return None
    if first and _is_input_change(entry.shape, shape):
        return _input_channels(entry, shape)
    if "pos" in name.rpartition(".")[2] or "pos" in name.rpartition(".")[0].rpartition(".")[2]:
        return _positions(entry, shape)
    return None


def is_convolution(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape may be a convolution's."""
    return len(shape) in (3, 4, 5) and math.prod(shape[2:]) > 1


def _is_input_change(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    if not is_convolution(old) or len(old) != len(new):
        return False
    return old[1] == 3 and new[1] > 0 and old[:1] + old[2:] == new[:1] + new[2:]


def _input_channels(entry: Entry, shape: tuple[int, ...]) -> Adapted:
    channels = shape[1]

    def change(weight: torch.Tensor) -> torch.Tensor:
        if channels == 1:
            return weight.sum(dim=1, keepdim=True)
        repeats = -(-channels // 3)
        repeated = weight.repeat(1, repeats, *(1 for _ in shape[2:]))[:, :channels]
        return repeated * (3 / channels)

    how = "the sum over the 3 channels" if channels == 1 else f"the 3 channels repeated to {channels}, times 3/{channels}"
    return Adapted(_changed(entry, shape, change), f"first convolution, {_text(entry.shape)} -> {_text(shape)}: {how}")


def _positions(entry: Entry, shape: tuple[int, ...]) -> Adapted | None:
    old, new = entry.shape, shape
    if len(old) != len(new) or len(old) not in (2, 3) or old[-1] != new[-1] or (len(old) == 3 and (old[0], new[0]) != (1, 1)):
        return None
    fits = [tokens for tokens in (0, 1, 2) if _side(old[-2] - tokens) and _side(new[-2] - tokens)]
    if len(fits) != 1:
        return None
    tokens = fits[0]
    before, after, width = _side(old[-2] - tokens), _side(new[-2] - tokens), old[-1]

    def change(table: torch.Tensor) -> torch.Tensor:
        import torch

        rows = table.reshape(-1, width)
        grid = rows[tokens:].reshape(1, before, before, width).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(grid, size=(after, after), mode="bicubic", align_corners=False)
        resized = resized.permute(0, 2, 3, 1).reshape(-1, width)
        return torch.cat([rows[:tokens], resized]).reshape(shape)

    grids = f"{before}x{before} -> {after}x{after}, bicubic"
    return Adapted(_changed(entry, shape, change), f"position embeddings, {grids}, {tokens} tokens without a place kept")


def _side(count: int) -> int:
    """The side of a square grid of so many places, 0 when there is none."""
    side = math.isqrt(max(0, count))
    return side if side * side == count else 0


def _changed(entry: Entry, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Computed:
    """The tensor through a function on float32 (float64 stays), back in its dtype."""
    need_torch("Tensors are fitted to another shape with it.")
    dtype = torch_dtype(entry.dtype)

    def work() -> Iterator[memoryview]:
        import torch

        data = bytearray(read(row_major(entry)))
        values = torch.frombuffer(data, dtype=dtype).reshape(entry.shape)
        wide = values if dtype is torch.float64 else values.float()
        yield _bytes(change(wide).to(dtype))

    return Computed(math.prod(shape) * dtype.itemsize, work, entry.storage.content)
