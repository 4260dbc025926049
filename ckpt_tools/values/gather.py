"""The elements of a strided view, row-major, in blocks: memory does not grow with the tensor, whatever is next to what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.io.content import CHUNK, Computed, Content, Deflated, Joined, Literal, read, read_into
from ckpt_tools.tree.nodes import is_contiguous
from ckpt_tools.values.numeric import GATHERING, part, trimmed
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    import torch

Sizes = tuple[int, ...]
_PIECE = 4 * CHUNK  # bytes of the source that are looked at at once
_SPARSE = 16 * CHUNK  # bytes of a block whose elements lie far apart: every block of a transpose reads all of the source
_LONG_RUN = 512  # bytes; runs as long as this are read one by one, shorter ones with what lies between them


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a run of bytes: for every dimension its size and how many elements lie between neighbours."""

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
    need_torch(GATHERING)
    merged = _merged(view)

    def work() -> Iterator[memoryview]:
        source = by_position(content)
        for box in _boxes(merged, itemsize):
            out = bytearray(box.count * itemsize)
            _fill(_elements(out, itemsize).view(box.sizes), source, box, itemsize)
            yield memoryview(out)

    def some(start: int, length: int) -> Content:
        return _some(content, itemsize, merged, start, length)

    return Computed(view.count * itemsize, work, content, part=some if is_by_position(content) else None)


def _some(content: Content, itemsize: int, view: View, start: int, length: int) -> Content:
    """A range of the bytes of a view: the rows that it touches, gathered, without what is too much at both ends."""
    while len(view.sizes) > 1:
        row = view.count // view.sizes[0] * itemsize
        first, last = start // row, max(start // row, (start + length - 1) // row)
        start -= first * row
        view = view.narrowed(0, first, last - first + 1)
        if last > first:
            break
        view = View(view.offset, view.sizes[1:], view.steps[1:])
    return trimmed(gathered(content, itemsize, view), start, length)


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
    runs = _has_long_runs(view, itemsize)
    if (view.count if runs else view.span) * itemsize <= _PIECE:
        out.copy_(_run_by_run(source, view, itemsize) if runs else _with_gaps(source, view, itemsize))
        return
    far = max(range(len(view.sizes)), key=lambda dim: (view.sizes[dim] > 1, view.steps[dim]))
    if view.steps[far] == 0:  # the same element again and again
        out.copy_(_with_gaps(source, View(view.offset, (1,), (1,)), itemsize))
        return
    one = view.narrowed(far, 0, 1)
    rows = _PIECE // itemsize // one.count if runs else (_PIECE // itemsize - one.span) // view.steps[far]
    for first in range(0, view.sizes[far], max(1, rows)):
        count = min(max(1, rows), view.sizes[far] - first)
        _fill(out.narrow(far, first, count), source, view.narrowed(far, first, count), itemsize)


def _with_gaps(source: Content, view: View, itemsize: int) -> torch.Tensor:
    """The elements of a view, read with what lies between them."""
    data = read(part(source, view.offset * itemsize, view.span * itemsize))
    return _elements(bytearray(data), itemsize).as_strided(view.sizes, view.steps)


def _run_by_run(source: Content, view: View, itemsize: int) -> torch.Tensor:
    """The elements of a view, without what lies between its runs."""
    order = sorted(range(len(view.sizes)), key=lambda dim: -view.steps[dim])
    *outer, run = (view.sizes[dim] for dim in order)
    out, size = bytearray(view.count * itemsize), run * itemsize
    room = memoryview(out)
    for number, at in enumerate(product(*map(range, outer))):
        start = view.offset + sum(index * view.steps[dim] for index, dim in zip(at, order, strict=False))
        read_into(part(source, start * itemsize, size), room[number * size : (number + 1) * size])
    places = [order.index(dim) for dim in range(len(order))]
    return _elements(out, itemsize).view(*outer, run).permute(places)


def _has_long_runs(view: View, itemsize: int) -> bool:
    """Whether it is mostly gaps, between runs that are worth a read each."""
    if view.span <= 4 * view.count:
        return False
    step, run = min(zip(view.steps, view.sizes, strict=True))
    return step == 1 and run * itemsize >= _LONG_RUN
