"""From operations to the flow between layers: which layer's numbers reach which, without another layer between, and how.

Functions that two authors write differently leave no trace here: reshapes, constants, dropout, the order of a sum, an attention
written out or called as one operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import NamedTuple, TypeAlias

from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.graphs import Graph, Operation, Value, values_in

_MOST_FEEDS = 3_000_000
Owner: TypeAlias = Hashable  # whoever's numbers are followed: a layer by its number, an End, a Hidden


class Feed(NamedTuple):
    """Numbers of a layer (of some of its rows, where that is known) that are in a value, and what has been done with them."""

    owner: Owner
    rows: tuple[int, int] | None = None
    words: frozenset[str] = frozenset()


class End(NamedTuple):
    """An input or an output of the model, by its number."""

    side: str
    number: int


class Hidden(NamedTuple):
    """A layer of the model that neither the checkpoint nor the target knows by its name."""

    name: str


Feeds: TypeAlias = frozenset[Feed]


class Arrival(NamedTuple):
    """Numbers that go into a layer (into some of its rows)."""

    feeds: Feeds
    into: Owner
    rows: tuple[int, int] | None


class FlowTooLargeError(Exception):
    """More numbers of more layers come together than in any model that could be compared."""


# --- where rows of a layer, or the two sides of a product, lie among the dimensions of what was made of them


@dataclass(frozen=True, slots=True)
class Rows:
    """A dimension of `count` steps over the rows `first` to `last` of a layer."""

    owner: Owner
    first: int
    last: int
    count: int

    def part(self, start: int, size: int) -> Rows | None:
        """Some of its steps; None where they are not whole rows."""
        step, rest = divmod(self.last - self.first, self.count) if self.count else (0, 1)
        if rest or not 0 <= start <= start + size <= self.count:
            return None
        return Rows(self.owner, self.first + start * step, self.first + (start + size) * step, size)


class Side(NamedTuple):
    """A dimension that one factor of a product gave: its first (0) or its second one (1)."""

    product: int
    factor: int


Axes: TypeAlias = Mapping[int, Rows | Side]  # by dimensions that are counted from the last one: -1, -2 ...


def _from_end(dim: int, shape: Shape) -> int:
    """A dimension counted from the last one."""
    return dim if dim < 0 else dim - len(shape)


def _viewed(axes: Axes, before: Shape, after: Shape) -> Axes:
    """The axes of the same elements in another shape: of a dimension that is divided, the outermost factor has them."""
    found: dict[int, Rows | Side] = {}
    starts = list(accumulate(after, mul, initial=1))
    for dim, axis in axes.items():
        at = len(before) + dim
        if at < 0 or before[at] <= 1:
            continue
        first = prod(before[:at])
        place = next((place for place, size in enumerate(after) if starts[place] == first and size > 1), None)
        if place is None or first * before[at] not in starts[place + 1 :]:  # not divided into whole dimensions
            continue
        if after[place] == before[dim]:
            found[place - len(after)] = axis
        elif isinstance(axis, Rows):
            found[place - len(after)] = replace(axis, count=after[place])
    return found


def _removed(axes: Axes, dim: int) -> Axes:
    return {old if old > dim else old + 1: axis for old, axis in axes.items() if old != dim}


def _shared(several: Iterable[tuple[Axes, Shape]], after: Shape) -> Axes:
    """The axes of what is made of several element by element."""
    found: dict[int, Rows | Side | None] = {}
    for axes, shape in several:
        for dim, axis in axes.items():
            same = len(after) >= -dim and shape[dim] == after[dim]
            found[dim] = axis if same and found.get(dim, axis) == axis else None
    return {dim: axis for dim, axis in found.items() if axis is not None}


def _moved(name: str, operation: Operation, given: Sequence[tuple[Axes, Shape]], after: Shape) -> Axes:
    axes, shape = given[0]
    if name == "view":
        return _viewed(axes, shape, after)
    if name == "permute":
        olds = [_from_end(dim, shape) for dim in operation.given[1]]
        return {place - len(olds): axes[old] for place, old in enumerate(olds) if old in axes}
    if name in ("t", "transpose"):
        one, other = (_from_end(dim, shape) for dim in operation.given[1:3] or (-1, -2))
        return {{one: other, other: one}.get(dim, dim): axis for dim, axis in axes.items()}
    if name == "unsqueeze":
        at = _from_end(operation.given[1], after)
        return {old if old > at else old - 1: axis for old, axis in axes.items()}
    if name == "squeeze" and type(operation.given[-1]) is int and after != shape:
        return _removed(axes, _from_end(operation.given[1], shape))
    if name in _ELSEWHERE:
        return axes if after == shape else {}
    return _shared(given, after)


# --- what every value is made of


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of a value: the layers whose weights alone it was made of; else what feeds it. And along which axes."""

    weights: Feeds = frozenset()
    feeds: Feeds = frozenset()
    axes: Axes = field(default_factory=dict)


_EMPTY = _State()


def flow_of(graph: Graph, owners: Mapping[str, Owner]) -> list[Arrival]:
    """What goes into the owners of weights, of other owners and of the model's inputs, and what into its outputs."""
    flow = _Flow()
    for name, value in graph.weights.items():
        if name in owners or id(value) not in flow.states:  # a tied weight has a name that is known, and others
            owner = owners.get(name, Hidden(name.rpartition(".")[0]))
            rows: Axes = {-len(value.shape): Rows(owner, 0, value.shape[0], value.shape[0])} if value.shape else {}
            flow.states[id(value)] = _State(frozenset([Feed(owner)]), axes=rows)
    for number, value in enumerate(graph.inputs):
        flow.states[id(value)] = _State(feeds=frozenset([Feed(End("input", number))]))
    for operation in graph.operations:
        flow.follow(operation)
    for number, value in enumerate(graph.outputs):
        flow.into(End("output", number), None, flow.states.get(id(value), _EMPTY).feeds)
    return flow.arrivals


class _Flow:
    """The states of all values so far, and what was seen to go into layers."""

    def __init__(self) -> None:
        self.states: dict[int, _State] = {}
        self.arrivals: list[Arrival] = []
        self.products = 0
        self.room = _MOST_FEEDS

    def follow(self, operation: Operation) -> None:
        """What one operation makes of what it is given."""
        name = operation.name.strip("_").removeprefix("native_")
        name = _ALIASES.get(name, name)  # one name for what torch calls an operation on its levels
        given = list(values_in(operation.given))
        states = [self.states.get(id(value), _EMPTY) for value in given]
        if name in CONSTANT:
            self._make(operation, _EMPTY)
        elif not any(state.feeds for state in states):
            weights = frozenset().union(*(state.weights for state in states))
            self._move(name, operation, given, states, _State(weights))
        elif ATTENTION in name:  # as if it were written out
            words = ({"query", "softmax", "product"}, {"key", "softmax", "product"}, {"product"}, {"softmax", "product"})
            self._make(operation, _State(feeds=self._joined(map(self._said, states, words))))
        elif name in FACTORS:
            self._multiply(name, operation)
        elif name not in ADDING and any(state.weights for state in states):
            self._call(name, operation, states)
        else:
            self._pass(name, operation, given, states)

    def into(self, owner: Owner, rows: tuple[int, int] | None, feeds: Feeds) -> None:
        """Numbers reach a layer; its own are nothing new to it, and the model's inputs count where nothing else does."""
        inner = [feed for feed in feeds if not isinstance(feed.owner, End)] or feeds
        others = (feed for feed in inner if feed.owner != owner)
        found = frozenset(
            feed._replace(words=frozenset(word for word in feed.words if not word.startswith("@"))) for feed in others
        )
        self.arrivals.append(Arrival(self._counted(found), owner, rows))

    def _make(self, operation: Operation, state: _State) -> None:
        for value in operation.made:
            self.states[id(value)] = state

    def _joined(self, several: Iterable[Feeds]) -> Feeds:
        found = {id(feeds): feeds for feeds in several if feeds}
        return next(iter(found.values())) if len(found) == 1 else self._counted(frozenset().union(*found.values()))

    def _said(self, state: _State, words: Iterable[str]) -> Feeds:
        """What feeds a value, with more said of it."""
        if not words:
            return state.feeds
        return self._counted(frozenset(feed._replace(words=feed.words.union(words)) for feed in state.feeds))

    def _counted(self, feeds: Feeds) -> Feeds:
        self.room -= len(feeds)
        if self.room < 0:
            raise FlowTooLargeError
        return feeds

    def _call(self, name: str, operation: Operation, states: Sequence[_State]) -> None:
        """Numbers go through a layer, or through several at once; rows of it where all that are said are the same."""
        said: dict[Owner, set[tuple[int, int]]] = {}
        for feed in (feed for state in states if not state.feeds for feed in state.weights):
            said.setdefault(feed.owner, set()).update([feed.rows] if feed.rows is not None else [])
        layers = {owner: next(iter(rows)) if len(rows) == 1 else None for owner, rows in said.items()}
        feeds = self._joined(state.feeds for state in states)
        for owner, rows in layers.items():
            self.into(owner, rows, feeds)
        made = _State(feeds=frozenset(Feed(owner, rows) for owner, rows in layers.items()))
        self._make(operation, made)
        if len(layers) == 1 and (name in FACTORS or name == "convolution"):
            shape = operation.made[0].shape
            dim = -1 if name in FACTORS else 1 - len(shape)
            axes = {dim: Rows(owner, *(rows or (0, shape[dim])), shape[dim])}
            self._make(operation, replace(made, axes=axes))

    def _multiply(self, name: str, operation: Operation) -> None:
        """Two factors: a layer and numbers, or numbers and numbers."""
        states = [self.states.get(id(value), _EMPTY) for value in operation.given]
        one, other = (states[place] for place in FACTORS[name])
        rest = [state for at, state in enumerate(states) if at not in FACTORS[name]]
        if one.weights or other.weights:
            self._call(name, operation, [one, other, *rest])
        elif not (one.feeds and other.feeds):
            self._make(operation, _State(feeds=self._joined(state.feeds for state in states)))
        else:
            self.products += 1
            feeds = [self._said(state, {"product", f"@{self.products}:{at}"}) for at, state in enumerate((one, other))]
            feeds += [state.feeds for state in rest]
            axes: Axes = {-2: Side(self.products, 0), -1: Side(self.products, 1)}
            self._make(operation, _State(feeds=self._joined(feeds), axes=axes))

    def _pass(self, name: str, operation: Operation, given: Sequence[Value], states: Sequence[_State]) -> None:
        """Numbers pass on, alone or with others; a weight beside them is one more part of a sum."""
        feeds = [self._said(state, _words(name, place, states)) for place, state in enumerate(states)]
        feeds += [state.weights for state in states if not state.feeds]
        merged = self._joined(feeds)
        if name == "softmax":
            merged = self._scored(merged, operation)
        self._move(name, operation, given, states, _State(feeds=merged))

    def _scored(self, feeds: Feeds, operation: Operation) -> Feeds:
        """What a softmax says of the factors of a product: the one along whose dimension it sums up has the keys."""
        value, dim = operation.given[:2]
        axis = self.states.get(id(value), _EMPTY).axes.get(_from_end(dim, value.shape))
        if not isinstance(axis, Side):
            return self._said(_State(feeds=feeds), {"softmax"})
        said = {f"@{axis.product}:{axis.factor}": "key", f"@{axis.product}:{1 - axis.factor}": "query"}
        return frozenset(feed._replace(words=frozenset(said.get(word, word) for word in feed.words)) for feed in feeds)

    def _move(
        self, name: str, operation: Operation, given: Sequence[Value], states: Sequence[_State], made: _State
    ) -> None:  # fmt: skip
        """What is made has the axes of what it was made of, in other places or as parts."""
        if name in _PARTS and given:
            self._cut(name, operation, replace(made, axes=states[0].axes))
            return
        sizes = [(state.axes, value.shape) for value, state in zip(given, states, strict=True)]
        for value in operation.made:
            self.states[id(value)] = replace(made, axes=_moved(name, operation, sizes, value.shape) if sizes else {})

    def _cut(self, name: str, operation: Operation, whole: _State) -> None:
        """Some of the steps along one dimension, for each value that is made."""
        value, one, other, _, step = [*operation.given, None, None, None, None][:5]
        shape: Shape = value.shape
        dim = _from_end((other if name == "split" else one) or 0, shape)
        start = (other or 0) if name in ("select", "slice") else 0
        for made in operation.made:
            is_gone = name in ("select", "unbind")
            size = 1 if is_gone else made.shape[dim]
            state, axis = whole, whole.axes.get(dim)
            if isinstance(axis, Rows) and step in (None, 1):
                part = axis.part(start + shape[dim] if start < 0 else start, size)
                state = whole if part is None else _narrowed(whole, axis, part, dim)
            self.states[id(made)] = replace(state, axes=_removed(state.axes, dim) if is_gone else state.axes)
            start += size


def _narrowed(state: _State, axis: Rows, part: Rows, dim: int) -> _State:
    """Fewer rows of the layer that the dimension belongs to."""
    before, after = (axis.first, axis.last), (part.first, part.last)

    def fewer(feeds: Feeds) -> Feeds:
        return frozenset(
            feed._replace(rows=after) if feed.owner == axis.owner and feed.rows in (None, before) else feed for feed in feeds
        )

    return _State(fewer(state.weights), fewer(state.feeds), {**state.axes, dim: part})


def _words(name: str, place: int, states: Sequence[_State]) -> set[str]:
    fed = sum(bool(state.feeds) for state in states)
    if name in PASSING or (name in ("mul", "div", "sub", "rsub") and fed < 2):
        return set()
    if name in ("cat", "stack"):
        return {f"cat {place}"}
    words = {"mul": ("times",), "div": ("times", "over"), "sub": ("", "minus"), "rsub": ("minus", "")}.get(name, (name,))
    return {words[min(place, len(words) - 1)]} - {""}


# The names are those that torch carries out below autograd: `linear`, `einsum`, `flatten` never come here, what they are made
# of does.
_PARTS = {"slice", "select", "split", "unbind"}
_ALIASES = {
    "unsafe_view": "view", "safe_softmax": "softmax", "log_softmax": "softmax", "unsafe_split": "split",
    "split_with_sizes": "split", "adaptive_avg_pool1d": "mean", "adaptive_avg_pool2d": "mean", "adaptive_avg_pool3d": "mean",
    "avg_pool1d": "mean", "avg_pool2d": "mean", "avg_pool3d": "mean", "max_pool2d_with_indices": "max_pool2d",
}  # fmt: skip
# Numbers are in other places afterwards, unless the shape is the same.
_ELSEWHERE = frozenset((
    "squeeze", "cat", "stack", "repeat", "roll", "flip", "unfold", "mean", "sum", "constant_pad_nd"
))  # fmt: skip
# The numbers pass on as they are, in other places at most.
PASSING = frozenset((
    "view", "permute", "transpose", "t", "expand", "clone", "detach", "to_copy", "alias", "squeeze", "unsqueeze", "dropout",
    "lift_fresh", "lift_fresh_copy", "repeat", "roll", "flip", "constant_pad_nd", "slice", "select", "split", "unbind",
    "copy", "add", "masked_fill", "where", "index_put", "slice_scatter", "select_scatter", "neg", "alias_copy",
    "repeat_interleave", "unfold", "im2col"
))  # fmt: skip
# A weight beside numbers is one more part of a sum (or of a list); everywhere else it is a layer that they go through.
ADDING = frozenset((
    "add", "sub", "rsub", "cat", "stack", "where", "masked_fill", "index_put", "copy", "slice_scatter", "select_scatter",
    "maximum", "minimum"
))  # fmt: skip
# What they make depends on numbers in no way that a gradient would know, or on sizes alone.
CONSTANT = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "isinf", "isnan", "any", "all", "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "rand_like", "randn_like", "bernoulli", "argmax", "argmin"
))  # fmt: skip
# The places of the two factors among the arguments.
FACTORS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2)}
ATTENTION = "scaled_dot_product"
