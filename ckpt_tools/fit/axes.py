"""Sizes and dimensions by name, as einops writes them: `(heads half 2) ... -> (heads 2 half) ...`.

A side lists the dimensions; those in parentheses are one dimension of the tensor, cut up, the slowest first. A name is a size:
one of the plan's values, or one that the shape settles. `head_size/2` and `groups*4` are worked out; `...` is all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TypeAlias

from ckpt_tools.errors import MatchError
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.nodes import MAX_ELEMENTS

Sizes: TypeAlias = Mapping[str, int]
REST = "..."
_WORD = re.compile(r"\.\.\.|[()]|[A-Za-z0-9_*/-]+|\S")
_FACTOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[1-9][0-9]{0,17}")
_MOST_AXES = 64  # in a text


class MissingSizesError(MatchError):
    """A size that neither the plan nor the shape says."""

    def __init__(self, what: str, names: set[str]) -> None:
        super().__init__(what)
        self.names = names


def size_of(text: str, sizes: Sizes) -> int | None:
    """What `heads`, `12`, `head_size/2` or `groups*4` is; None where a name in it has no size."""
    parts = re.split(r"([*/])", text)
    if not all(_FACTOR.fullmatch(part) for part in parts[::2]):
        raise MatchError(f"{text!r} is not a size.", why="A size is a name, a whole number, or such with * and / between.")
    factors = [int(part) if part.isdigit() else sizes.get(part) for part in parts[::2]]
    result = factors[0]
    for sign, factor in zip(parts[1::2], factors[1:], strict=True):
        if result is None or factor is None:
            return None
        if sign == "/" and (factor == 0 or result % factor):
            raise MatchError(f"{text} leaves a rest: {result} / {factor}.")
        result = result * factor if sign == "*" else result // factor
    if result is not None and result > MAX_ELEMENTS:
        raise MatchError(f"{text} is larger than any tensor.")
    return result


def names_in(text: str) -> set[str]:
    """The names in a size."""
    return {part for part in re.split(r"[*/]", text) if not part.isdigit()}


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of one step, all sizes known."""

    view: Shape
    order: tuple[int, ...] = ()
    axis: int = 0
    sizes: tuple[int, ...] = ()
    fill: float = 0


@dataclass(frozen=True, slots=True)
class Side:
    """The dimensions of a tensor, each one or several axes; `("...",)` for the rest of them."""

    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> list[str]:
        return [axis for dim in self.dims for axis in dim]

    def solve(self, shape: Shape, sizes: Sizes, label: str) -> Solved:
        """The size of every axis for a tensor of this shape."""
        rest = len(shape) - len(self.dims) + 1 if (REST,) in self.dims else None
        if (rest is None and len(shape) != len(self.dims)) or (rest is not None and rest < 0):
            count = f"{len(self.dims) - (rest is not None)}{' or more' if rest is not None else ''}"
            raise MatchError(f"{label}: {list(shape)} has {len(shape)} dimensions; {self} has {count}.")
        found, at = dict(sizes), 0
        left: Shape = ()
        for dim in self.dims:
            if dim == (REST,):
                left = shape[at : at + (rest or 0)]
                at += rest or 0
            else:
                _settle(dim, shape[at], found, f"{label}: {list(shape)} as {self}")
                at += 1
        return Solved(found, left)

    def __str__(self) -> str:
        return " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Solved:
    """Sizes by axis, and the shape of the rest."""

    sizes: Sizes
    rest: Shape

    def of(self, *axes: str) -> Shape:
        """The sizes that axes stand for, in their order, the rest where it stands."""
        found: list[int] = []
        for axis in axes:
            size = None if axis == REST else size_of(axis, self.sizes)
            found += self.rest if size is None else (size,)
        return tuple(found)

    def shape(self, side: Side) -> Shape:
        return tuple(size for dim in side.dims for size in (self.rest if dim == (REST,) else (prod(self.of(*dim)),)))

    def cut(self, side: Side, axis: str, sizes: Sequence[int]) -> Layout:
        """The geometry of parts of these sizes along one axis, which is as large as they all."""
        whole = replace(self, sizes={**self.sizes, axis: sum(sizes)})
        before = side.axes[: side.axes.index(axis)]
        return Layout(whole.of(*side.axes), axis=len(whole.of(*before)), sizes=tuple(sizes))


def _settle(dim: Sequence[str], whole: int, found: dict[str, int], label: str) -> None:
    """Find the one size of a dimension that is not known yet."""
    known = {axis: size_of(axis, found) for axis in dim}
    open_axes = [axis for axis, size in known.items() if size is None]
    product = prod(size for size in known.values() if size is not None)
    if len(open_axes) > 1 or (open_axes and names_in(open_axes[0]) != {open_axes[0]}):
        names = {name for axis in open_axes for name in names_in(axis)}
        raise MissingSizesError(f"{label}: {whole} cannot be cut without knowing {' or '.join(sorted(names))}.", names)
    if not open_axes and product != whole:
        shown = " x ".join(f"{axis} {size}" if axis != str(size) else axis for axis, size in known.items())
        raise MatchError(f"{label}: {whole} is not {shown}.")
    if open_axes:
        if product == 0 or whole % product:
            raise MatchError(f"{label}: {whole} cannot be divided by {product}.")
        found[open_axes[0]] = whole // product


@cache
def read_side(text: str) -> Side:
    """The dimensions that a text lists."""
    side = Side(tuple(_dims(text)))
    if not 0 < len(side.axes) <= _MOST_AXES:
        raise MatchError(f"{text[:80]!r} lists {len(side.axes)} axes; there may be 1 to {_MOST_AXES}.")
    if twice := next((axis for axis in side.axes if side.axes.count(axis) > 1), None):
        raise MatchError(f"{text!r} has the axis {twice!r} twice.", fix="Give each a name of its own.")
    for axis in side.axes:
        if axis != REST:
            size_of(axis, {})
    return side


def _dims(text: str) -> Iterator[tuple[str, ...]]:
    group: list[str] | None = None
    for word in _WORD.findall(text[:2000]):
        if word == "(" and group is None:
            group = []
        elif word == ")" and group:
            yield tuple(group)
            group = None
        elif word in "()" or (word == REST and group is not None):
            raise MatchError(f"{text[:80]!r}: {word!r} is not allowed here.")
        elif group is None:
            yield (word,)
        else:
            group.append(word)
    if group is not None or len(text) > 2000:
        raise MatchError(f"{text[:80]!r}: a parenthesis is not closed.")


@cache
def read_arrow(text: str) -> tuple[Side, Side]:
    """Two sides with an arrow between them, of the same axes."""
    before, arrow, after = text.partition("->")
    if not arrow:
        raise MatchError(f"{text[:80]!r} has no arrow: 'axes' of a permute is 'a b -> b a'.")
    left, right = read_side(before.strip()), read_side(after.strip())
    if lone := set(left.axes) ^ set(right.axes):
        raise MatchError(f"{text!r} has {min(lone)!r} on one side only.")
    return left, right
