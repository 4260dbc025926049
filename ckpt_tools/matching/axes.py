"""Where rows of a layer, or the two sides of a product, lie among the dimensions of what was made of them.

Dimensions are counted from the last one, -1, as far as sizes are not always known.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """A dimension of `count` steps over the rows `first` to `last` of a layer."""

    owner: Hashable
    first: int
    last: int
    count: int

    def part(self, start: int, size: int) -> Rows | None:
        """Some of its steps; None where they are not whole rows."""
        step, rest = divmod(self.last - self.first, self.count) if self.count else (0, 1)
        if rest or not 0 <= start <= start + size <= self.count:
            return None
        return Rows(self.owner, self.first + start * step, self.first + (start + size) * step, size)


@dataclass(frozen=True, slots=True)
class Side:
    """A dimension that one factor of a product gave: its first (0) or its second one (1)."""

    product: int
    factor: int


Axes: TypeAlias = Mapping[int, Rows | Side]


def from_end(dim: object, shape: Shape | None) -> int | None:
    """A dimension counted from the last one; None where that is not known."""
    if type(dim) is not int:
        return None
    if dim < 0:
        return dim
    return dim - len(shape) if shape is not None and dim < len(shape) else None


def viewed(axes: Axes, before: Shape | None, after: Shape | None) -> Axes:
    """The axes of the same elements in another shape: of a dimension that is divided, the outermost factor has them."""
    if before is None or after is None:
        return {}
    found: dict[int, Rows | Side] = {}
    for dim, axis in axes.items():
        place = _place(before, after, len(before) + dim)
        if place is None:
            continue
        size = after[place]
        if size == before[dim]:
            found[place - len(after)] = axis
        elif isinstance(axis, Rows):
            found[place - len(after)] = Rows(axis.owner, axis.first, axis.last, size)
    return found


def _place(before: Shape, after: Shape, at: int) -> int | None:
    """Where the outermost factor of a dimension has gone; None where it is not divided into whole dimensions."""
    if not 0 <= at < len(before) or before[at] <= 1:
        return None
    starts = list(accumulate(after, mul, initial=1))
    first = prod(before[:at])
    place = next((place for place, size in enumerate(after) if starts[place] == first and size > 1), None)
    return place if place is not None and first * before[at] in starts[place + 1 :] else None


def permuted(axes: Axes, order: object, shape: Shape | None) -> Axes:
    """The axes with the dimensions in another order: the new ones by their old places."""
    if not isinstance(order, list | tuple):
        return {}
    olds = [from_end(dim, (0,) * len(order)) for dim in order]
    return {place - len(order): axes[old] for place, old in enumerate(olds) if old is not None and old in axes}


def transposed(axes: Axes, one: object, other: object, shape: Shape | None) -> Axes:
    """The axes with two dimensions exchanged."""
    dims = from_end(one, shape), from_end(other, shape)
    if dims[0] is None or dims[1] is None:
        return {}
    change = {dims[0]: dims[1], dims[1]: dims[0]}
    return {change.get(dim, dim): axis for dim, axis in axes.items()}


def inserted(axes: Axes, dim: object, after: Shape | None) -> Axes:
    """The axes with a new dimension of size 1."""
    at = from_end(dim, after)
    return {} if at is None else {old if old > at else old - 1: axis for old, axis in axes.items()}


def removed(axes: Axes, dim: int) -> Axes:
    """The axes without one dimension."""
    return {old if old > dim else old + 1: axis for old, axis in axes.items() if old != dim}


def shared(several: list[tuple[Axes, Shape | None]], after: Shape | None) -> Axes:
    """The axes of what is made of several element by element."""
    found: dict[int, Rows | Side | None] = {}
    for axes, shape in several:
        for dim, axis in axes.items():
            same = shape is None or after is None or (len(after) >= -dim and shape[dim] == after[dim])
            found[dim] = axis if same and found.get(dim, axis) == axis else None
    return {dim: axis for dim, axis in found.items() if axis is not None}
