"""The doing of a step of a plan: tensors with their dimensions in another order, cut, joined, padded.

Nothing is computed: every element of a result is an element of the input, or what padding holds. So all of it streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import isfinite, prod

from ckpt_tools.errors import MatchError
from ckpt_tools.fit.axes import Layout
from ckpt_tools.io.content import CHUNK, Computed, Content, Literal, chunks
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Entry, Storage, contiguous_stride, stored
from ckpt_tools.values.boxes import assemble
from ckpt_tools.values.numeric import by_position, cut_along, is_by_position, part, row_major, torch_dtype
from ckpt_tools.values.pytorch import need_torch, torch


def rearranged(entry: Entry, layout: Layout, shape: Shape) -> Entry:
    """The same elements with their dimensions in another order."""
    view = _viewed(entry, layout)
    sizes, steps = (tuple(field[dim] for dim in layout.order) for field in (view.shape, view.stride))
    return own(entry, row_major(replace(view, shape=sizes, stride=steps)), shape)


def reshaped(entry: Entry, shape: Shape) -> Entry:
    """The same elements in the same row-major order under another shape. A contiguous entry stays a view on its storage."""
    if not entry.is_contiguous:
        entry = own(entry, row_major(entry), entry.shape)
    return replace(entry, shape=shape, stride=contiguous_stride(shape))


def cut(entry: Entry, layout: Layout, shapes: Sequence[Shape]) -> Iterator[Entry]:
    """The parts of a tensor along one of its dimensions, from its start; each with a storage of its own."""
    view = _viewed(entry, layout)
    for start, size, shape in zip(_starts(layout.sizes), layout.sizes, shapes, strict=False):
        yield own(entry, row_major(cut_along(view, layout.axis, start, size)), shape)


def _viewed(entry: Entry, layout: Layout) -> Entry:
    _check_whole_bytes(entry)
    return stored(entry.storage.key, entry.dtype, layout.view, row_major(entry), entry.storage.device)


def _check_whole_bytes(entry: Entry) -> None:
    if entry.dtype.packed > 1:
        raise MatchError(f"A tensor of {entry.dtype.name} has several numbers in a byte: it can only be copied or reshaped.")


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def joined(entries: Sequence[Entry], layout: Layout, shape: Shape) -> Entry:
    """Tensors of one dtype put together along one dimension, with padding behind them."""
    first, view, axis = entries[0], layout.view, layout.axis
    for entry in entries:
        _check_whole_bytes(entry)
    if other := next((entry for entry in entries if entry.dtype is not first.dtype), None):
        text = f"{first.dtype.name} and {other.dtype.name} cannot be put together."
        raise MatchError(text, fix="Cast one first: `dtype`.")
    contents = [row_major(entry) for entry in entries]
    if len(layout.sizes) > len(entries):
        count = layout.sizes[len(entries)] * prod(view[:axis]) * prod(view[axis + 1 :])
        contents.append(_filled(_element(layout.fill, first.dtype), count * first.dtype.itemsize))

    def put(contents: Sequence[Content]) -> Content:
        parts = []
        for start, size, content in zip(_starts(layout.sizes), layout.sizes, contents, strict=True):
            offsets = tuple(start if dim == axis else 0 for dim in range(len(view)))
            parts.append((offsets, (*view[:axis], size, *view[axis + 1 :]), content))
        return assemble("a part", view, first.dtype.itemsize, parts)

    def work() -> Iterator[bytes | memoryview]:
        yield from chunks(put([by_position(content) for content in contents]))

    of = tuple(entry.storage.content for entry in entries)
    plain = put(contents)
    cut_anywhere = None if isinstance(plain, Computed) or not is_by_position(plain) else partial(part, plain)
    return own(first, Computed(plain.length, work, of, cut_anywhere), shape)


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
    made = torch.tensor([value], dtype=torch.float64).to(torch_dtype(dtype))
    held = made if made.is_complex() else made.double()
    is_rounded = dtype.family in ("float", "complex") and isfinite(value) and bool(held.isfinite())
    if held.item() != value and not is_rounded:
        raise MatchError(f"{dtype.name} cannot hold the fill {value}.", fix="Give one that it can: fill = 0.")
    return bytes(made.view(torch.uint8).tolist())


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
