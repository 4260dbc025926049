"""The elements of a strided view, row-major, in blocks: memory does not grow with the tensor, whatever is next to what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.io.content import CHUNK, Computed, Content, Deflated, Joined, Literal, read
from ckpt_tools.tree.nodes import is_contiguous
from ckpt_tools.values.numeric import part

if TYPE_CHECKING:
    import torch

Sizes = tuple[int, ...]
_PIECE = 4 * CHUNK  # bytes of the source that are looked at at once
_SPARSE = 16 * CHUNK  # bytes of a block whose elements lie far apart: every block of a transpose reads all of the source
_LONG_RUN = 16 << 10  # bytes; runs as long as this are read one by one, shorter ones with what lies between them


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a run of bytes: for every dimension its size and how many elements lie between neighbours.

    Attributes:
        offset: of the first element. sizes, steps: a dimension each.
    """

    offset: int
    sizes: Sizes
    steps: Sizes

    @property
    def span(self) -> int:
        """Elements from the first to the last, those between them included."""
        return 1 + sum((size - 1) * step for size, step in zip(self.sizes, self.steps, strict=True))

    @property
    def count(self) -> int:
        """How many elements there are."""
        return prod(self.sizes)

    def box(self, first: Sizes, sizes: Sizes) -> View:
        """A box of it."""
        return View(self.offset + sum(at * step for at, step in zip(first, self.steps, strict=True)), sizes, self.steps)

    def narrowed(self, dim: int, first: int, size: int) -> View:
        """Fewer indexes along one dimension."""
        sizes = (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        return View(self.offset + first * self.steps[dim], sizes, self.steps)


def gathered(content: Content, itemsize: int, view: View) -> Content:
    """The bytes of a view on a content, row-major. A view without gaps stays a part of the content."""
    if not view.count:
        return Literal(b"")
    if is_contiguous(view.sizes, view.steps):
        return part(content, view.offset * itemsize, view.count * itemsize)

    def work() -> Iterator[memoryview]:
        source = by_position(content)
        for box in _boxes(_merged(view), itemsize):
            out = bytearray(box.count * itemsize)
            _fill(_elements(out, itemsize).view(box.sizes), source, box, itemsize)
            yield memoryview(out)

    return Computed(view.count * itemsize, work)


def by_position(content: Content) -> Content:
    """A content whose parts can be read in any order; one that is worked out or inflated is held in memory."""
    if isinstance(content, Joined):
        return Joined(tuple(by_position(one) for one in content.parts))
    return content if is_by_position(content) else Literal(read(content))


def is_by_position(content: Content) -> bool:
    """Whether a part of a content can be had without what is before it."""
    if isinstance(content, Joined):
        return all(map(is_by_position, content.parts))
    return not isinstance(content, Deflated) and (not isinstance(content, Computed) or content.part is not None)


def _elements(data: bytearray, itemsize: int) -> torch.Tensor:
    """Elements of some size as numbers that torch copies fast; what they mean does not matter."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return torch.frombuffer(data, dtype=kinds[itemsize])


def _merged(view: View) -> View:
    """The same elements in the same order with as few dimensions as possible."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(view.sizes, view.steps, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == step * size:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    return View(view.offset, tuple(sizes) or (1,), tuple(steps) or (1,))


def _boxes(view: View, itemsize: int) -> Iterator[View]:
    """The view in boxes that come one after the other in the output."""
    close = view.span <= 4 * view.count and all(a >= b for a, b in zip(view.steps, view.steps[1:], strict=False))
    most = (CHUNK if close or view.steps[0] == max(view.steps) else _SPARSE) // itemsize
    dim = next((dim for dim in range(len(view.sizes)) if prod(view.sizes[dim + 1 :]) <= most), len(view.sizes) - 1)
    rows = max(1, most // prod(view.sizes[dim + 1 :]))
    rest = view.sizes[dim + 1 :]
    for outer in product(*map(range, view.sizes[:dim])):
        for first in range(0, view.sizes[dim], rows):
            count = min(rows, view.sizes[dim] - first)
            yield view.box((*outer, first, *(0 for _ in rest)), (*(1 for _ in outer), count, *rest))


def _fill(out: torch.Tensor, source: Content, view: View, itemsize: int) -> None:
    """Put the elements of a view where they belong: all at once, or piece by piece along what lies farthest apart."""
    far = max(range(len(view.sizes)), key=lambda dim: (view.sizes[dim] > 1, view.steps[dim]))
    if view.span * itemsize <= _PIECE and not _has_long_runs(view, itemsize):
        data = _elements(bytearray(read(part(source, view.offset * itemsize, view.span * itemsize))), itemsize)
        out.copy_(data.as_strided(view.sizes, view.steps))
        return
    if view.sizes[far] == 1 or view.steps[far] == 0:  # one element, or the same one again and again
        out.copy_(_elements(bytearray(read(part(source, view.offset * itemsize, itemsize))), itemsize))
        return
    inner = view.narrowed(far, 0, 1).span
    rows = 1 if _has_long_runs(view, itemsize) else max(1, (_PIECE // itemsize - inner) // view.steps[far])
    for first in range(0, view.sizes[far], rows):
        count = min(rows, view.sizes[far] - first)
        _fill(out.narrow(far, first, count), source, view.narrowed(far, first, count), itemsize)


def _has_long_runs(view: View, itemsize: int) -> bool:
    """Whether it is mostly gaps between runs that are worth a read each."""
    if view.span <= 4 * view.count:
        return False
    run = max((size for size, step in zip(view.sizes, view.steps, strict=True) if step == 1), default=1)
    return run * itemsize >= _LONG_RUN
