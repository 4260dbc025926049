"""What a step of a plan does to tensors, as geometry: dimensions cut up, exchanged, cut along one, put together along one.

Nothing is computed: every element of a result is an element of the input, or what padding holds. So all of it streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from ckpt_tools.errors import MatchError
from ckpt_tools.io.content import CHUNK, Computed, Content, Literal, chunks
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Entry, Storage, contiguous_stride
from ckpt_tools.values.boxes import assemble
from ckpt_tools.values.numeric import View, by_position, gathered, is_by_position, part, row_major, torch_dtype
from ckpt_tools.values.pytorch import need_torch


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of one step, all sizes known."""

    view: Shape
    order: tuple[int, ...] = ()
    axis: int = 0
    sizes: tuple[int, ...] = ()
    fill: float = 0


def rearranged(entry: Entry, layout: Layout, shape: Shape) -> Entry:
    """The same elements with their dimensions in another order."""
    content, view = _viewed(entry, layout.view)
    sizes, steps = (tuple(field[dim] for dim in layout.order) for field in (view.sizes, view.steps))
    return own(entry, gathered(content, entry.dtype.itemsize, View(view.offset, sizes, steps)), shape)


def reshaped(entry: Entry, shape: Shape) -> Entry:
    """The same elements in the same row-major order under another shape. A contiguous entry stays a view on its storage."""
    if not entry.is_contiguous:
        entry = own(entry, row_major(entry), entry.shape)
    return replace(entry, shape=shape, stride=contiguous_stride(shape))


def cut(entry: Entry, layout: Layout, shapes: Sequence[Shape]) -> Iterator[Entry]:
    """The parts of a tensor along one of its dimensions, from its start; each with a storage of its own."""
    content, view = _viewed(entry, layout.view)
    for start, size, shape in zip(_starts(layout.sizes), layout.sizes, shapes, strict=False):
        narrow = view.narrowed(layout.axis, start, size)
        yield own(entry, gathered(content, entry.dtype.itemsize, narrow), shape)


def joined(entries: Sequence[Entry], layout: Layout, shape: Shape) -> Entry:
    """Tensors of one dtype put together along one dimension, with padding behind them."""
    first = entries[0]
    for entry in entries:
        _check_whole_bytes(entry)
    if other := next((entry for entry in entries if entry.dtype is not first.dtype), None):
        text = f"{first.dtype.name} and {other.dtype.name} cannot be put together."
        raise MatchError(text, fix="Cast one first: `dtype`.")
    contents = [row_major(entry) for entry in entries]
    if len(layout.sizes) > len(entries):
        contents.append(_padding(layout, len(entries), first.dtype))
    boxes = [
        (_at(layout, start), (*layout.view[: layout.axis], size, *layout.view[layout.axis + 1 :]))
        for start, size in zip(_starts(layout.sizes), layout.sizes, strict=True)
    ]

    def put(contents: Sequence[Content]) -> Content:
        parts = [(offsets, sizes, content) for (offsets, sizes), content in zip(boxes, contents, strict=True)]
        return assemble("a part", layout.view, first.dtype.itemsize, parts)

    def work() -> Iterator[bytes | memoryview]:
        yield from chunks(put([by_position(content) for content in contents]))

    of = tuple(entry.storage.content for entry in entries)
    plain = put(contents)
    cut_anywhere = None if isinstance(plain, Computed) or not is_by_position(plain) else partial(part, plain)
    return own(first, Computed(plain.length, work, of, cut_anywhere), shape)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _at(layout: Layout, start: int) -> Shape:
    """Where a part begins."""
    return tuple(start if dim == layout.axis else 0 for dim in range(len(layout.view)))


def _padding(layout: Layout, number: int, dtype: DType) -> Content:
    """The elements behind the parts."""
    count = layout.sizes[number]
    for dim, size in enumerate(layout.view):
        count *= size if dim != layout.axis else 1
    return _filled(_element(layout.fill, dtype), count * dtype.itemsize)


def _filled(element: bytes, length: int) -> Content:
    """The same element again and again; a part that begins with an element is such, too."""

    def work() -> Iterator[bytes]:
        block = element * (CHUNK // len(element))
        for start in range(0, length, len(block)):
            yield block[: length - start]

    if length <= CHUNK:
        return Literal(element * (length // len(element)))
    return Computed(length, work, part=lambda _, size: _filled(element, size))


def _element(value: float, dtype: DType) -> bytes:
    if not value:
        return bytes(dtype.itemsize)
    need_torch("Padding with a number is made with it.")
    import torch

    made = torch.tensor([value], dtype=torch.float64).to(torch_dtype(dtype))
    if made.to(torch.float64).item() != value:
        raise MatchError(f"{dtype.name} cannot hold the fill {value}.", fix="Give one that it can: `fill = 0`.")
    return bytes(made.view(torch.uint8).tolist())


def _viewed(entry: Entry, view: Shape) -> tuple[Content, View]:
    """An entry with its dimensions cut up, on the bytes that it lies in."""
    _check_whole_bytes(entry)
    steps = None if entry.lazy_bits else _cut_up(entry, view)
    if steps is None:
        return row_major(entry), View(0, view, contiguous_stride(view))
    return entry.storage.content, View(entry.offset, view, steps)


def _cut_up(entry: Entry, view: Shape) -> Shape | None:
    """The steps of dimensions of which each is a part of one of the entry's; None where one is made of several."""
    if 0 in view:
        return None
    steps: list[int] = []
    sizes = list(reversed(view))
    for size, step in zip(reversed(entry.shape), reversed(entry.stride), strict=True):
        inner = 1
        while inner < size:
            if not sizes or size % (inner * sizes[0]):
                return None
            steps.append(step * inner)
            inner *= sizes.pop(0)
    if any(size != 1 for size in sizes):
        return None
    return tuple(reversed([*steps, *(0 for _ in sizes)]))


def _check_whole_bytes(entry: Entry) -> None:
    if entry.dtype.packed > 1:
        raise MatchError(f"A tensor of {entry.dtype.name} has several numbers in a byte: it can only be copied or reshaped.")


def own(entry: Entry, content: Content, shape: Shape) -> Entry:
    """A row-major entry with a storage of its own for these bytes, worked out of the old entry's."""

    def work() -> Iterator[bytes | memoryview]:
        yield from chunks(content)

    derived = isinstance(content, Computed) and content.of is not None
    cut_anywhere = partial(part, content) if is_by_position(content) else None
    made = content if derived else Computed(content.length, work, entry.storage.content, cut_anywhere)
    storage = Storage(entry.storage.key, entry.dtype, made.length, entry.storage.device, made)
    extras = None if entry.extras is None or entry.lazy_bits else entry.extras
    return replace(entry, storage=storage, shape=shape, stride=contiguous_stride(shape), offset=0, extras=extras)
