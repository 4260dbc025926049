"""One tensor out of its chunks: boxes of it that lie in several places, as jobs on many devices save them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from operator import mul
from typing import NamedTuple

from ckpt_tools import limits
from ckpt_tools.errors import TensorError
from ckpt_tools.io.content import CHUNK, Computed, Content, Joined, Literal, read
from ckpt_tools.tree.nodes import contiguous_stride
from ckpt_tools.values.numeric import part, trimmed
from ckpt_tools.values.pytorch import torch

Sizes = tuple[int, ...]


class Box(NamedTuple):
    offsets: Sizes
    sizes: Sizes
    content: Content


def assemble(name: str, shape: Sizes, itemsize: int, boxes: Iterable[tuple[Sizes, Sizes, Content]]) -> Content:
    """The tensor's bytes, row-major, out of its boxes: offsets, sizes, elements."""
    parts = sorted((Box(*box) for box in boxes if prod(box[1])), key=lambda chunk: chunk.offsets)
    for chunk in parts:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            at >= 0 and at + size <= whole for at, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not inside:
            raise TensorError(f"A chunk of {name!r} reaches outside the tensor's shape {list(shape)}.")
    held = sum(prod(chunk.sizes) for chunk in parts)
    if held != prod(shape):
        raise TensorError(f"The chunks of {name!r} hold {held} elements; its shape {list(shape)} needs {prod(shape)}.")
    if not parts:
        return Literal(b"")
    ranged = [next((dim for dim, size in enumerate(chunk.sizes) if size != 1), len(shape)) for chunk in parts]
    # Each one run of the whole tensor: single indexes, then a range, then whole dimensions
    if all(chunk.sizes[dim + 1 :] == shape[dim + 1 :] for dim, chunk in zip(ranged, parts, strict=True)):
        strides = contiguous_stride(shape)
        starts = [sum(map(mul, chunk.offsets, strides)) for chunk in parts]
        ends = [start + prod(chunk.sizes) for start, chunk in zip(starts, parts, strict=True)]
        if ends[:-1] != starts[1:]:
            raise _overlapping(name)
        return parts[0].content if len(parts) == 1 else Joined(tuple(chunk.content for chunk in parts))
    _check_apart(name, parts)

    at = [dim for dim, size in enumerate(shape) if size > 1]  # dimensions of one index are left out
    parts = [Box(tuple(box.offsets[dim] for dim in at), tuple(box.sizes[dim] for dim in at), box.content) for box in parts]
    return _in_boxes(tuple(shape[dim] for dim in at), itemsize, parts, 0, prod(shape) * itemsize)


def _in_boxes(shape: Sizes, itemsize: int, parts: Sequence[Box], start: int, length: int) -> Content:
    """A range of the bytes: the rows that it touches, put together from the chunks that have a box of them."""
    row = prod(shape[1:]) * itemsize
    first, last = start // row, -(-(start + length) // row)

    def work() -> Iterator[memoryview]:
        step = max(1, CHUNK // row)
        for top in range(first, last, step):
            bottom = min(top + step, last)
            out = bytearray((bottom - top) * row)
            whole = torch.frombuffer(out, dtype=torch.uint8).view(bottom - top, *shape[1:], itemsize)
            for (at, *inner_at), (rows, *inner), content in parts:
                low, high = max(top, at), min(bottom, at + rows)
                if low < high:
                    size = prod(inner) * itemsize
                    data = bytearray(read(part(content, (low - at) * size, (high - low) * size)))
                    window = [slice(begin, begin + length) for begin, length in zip(inner_at, inner, strict=True)]
                    values = torch.frombuffer(data, dtype=torch.uint8).view(high - low, *inner, itemsize)
                    whole[(slice(low - top, high - top), *window)] = values
            yield memoryview(out)

    def inside(begin: int, size: int) -> Content:
        return _in_boxes(shape, itemsize, parts, first * row + begin, size)

    made = Computed((last - first) * row, work, tuple(chunk.content for chunk in parts), inside)
    return trimmed(made, start - first * row, length)


def _check_apart(name: str, parts: Sequence[Box]) -> None:
    """No two boxes share a cell of the grid of all their edges. With the right number of elements they cover the tensor."""
    dims = range(len(parts[0].sizes))
    edges = [{edge for box in parts for edge in (box.offsets[dim], box.offsets[dim] + box.sizes[dim])} for dim in dims]
    places = [{edge: number for number, edge in enumerate(sorted(found))} for found in edges]
    spans = [
        [range(place[at], place[at + size]) for at, size, place in zip(box.offsets, box.sizes, places, strict=True)]
        for box in parts
    ]
    cells = sum(prod(map(len, span)) for span in spans)
    limits.NODES.check(cells, f"The tensor {name!r} is in {len(parts)} chunks that are not whole rows.")
    if len({cell for span in spans for cell in product(*span)}) < cells:
        raise _overlapping(name)


def _overlapping(name: str) -> TensorError:
    return TensorError(f"Two chunks of {name!r} overlap.", why="They could hold different values for one element.")
