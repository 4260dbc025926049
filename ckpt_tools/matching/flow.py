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
from typing import Any, NamedTuple, TypeAlias

from ckpt_tools.matching.feeds import (
    NO_FEEDS,
    NO_WORDS,
    End,
    Feed,
    Feeds,
    Gathered,
    Hidden,
    Owner,
    feeds_of,
    reaching,
    together,
)
from ckpt_tools.tree.graphs import Graph, Operation, Value, values_in

# --- where rows of a layer, or the two sides of a product, lie among the dimensions of what was made of them


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


_MOST_FEEDS = 5_000_000


class Arrival(NamedTuple):
    """Numbers that go into a layer (into some of its rows)."""

    feeds: Gathered[Feed]
    into: Owner
    rows: tuple[int, int] | None


class FlowTooLargeError(Exception):
    """More numbers of more layers come together than in any model that could be compared."""


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of a value: the layers whose weights alone it was made of; else what feeds it. And along which axes."""

    weights: frozenset[Feed] = frozenset()
    feeds: Feeds = NO_FEEDS
    axes: Axes = field(default_factory=dict)

    @property
    def is_fed(self) -> bool:
        """Whether any numbers are in it that are not weights."""
        return bool(self.feeds.start.items)


def flow_of(graph: Graph, owners: Mapping[str, Owner]) -> list[Arrival]:
    """What goes into the owners of weights, of other owners and of the model's inputs, and what into its outputs."""
    flow = _Flow()
    for name, value in graph.weights.items():
        if name in owners or id(value) not in flow.states:  # a tied weight has a name that is known, and others
            owner = owners.get(name, Hidden(name.rpartition(".")[0]))
            rows: Axes = {-len(value.shape): Rows(owner, 0, value.shape[0], value.shape[0])} if value.shape else {}
            flow.states[id(value)] = _State(frozenset([Feed(owner, None, NO_WORDS)]), axes=rows)
    for number, value in enumerate(graph.inputs):
        flow.states[id(value)] = _State(feeds=feeds_of([Feed(End("input", number), None, NO_WORDS)]))
    for operation in graph.operations:
        flow.follow(operation)
    for number, value in enumerate(graph.outputs):
        flow.into(End("output", number), None, flow.state(value).feeds)
    return flow.arrivals


class _Flow:
    """The states of all values so far, and what was seen to go into layers; `sending` are those whose numbers went on."""

    def __init__(self) -> None:
        self.states: dict[int, _State] = {}
        self.arrivals: list[Arrival] = []
        self.sending: set[Owner] = set()
        self.products = 0
        self.room = _MOST_FEEDS

    def state(self, value: Any) -> _State:
        """What is known of a value."""
        return self.states.get(id(value), _EMPTY)

    def follow(self, operation: Operation) -> None:
        """What one operation makes of what it is given."""
        name = plain_name(operation.name)
        given = list(values_in(operation.given))
        states = [self.state(value) for value in given]
        weights = [state for state in states if state.weights and not state.is_fed]
        if name in CONSTANT:
            self._all(operation, _EMPTY)
        elif not any(state.is_fed for state in states):
            self._make(name, operation, given, states)
        elif ATTENTION in name:
            self._attend(operation, states)
        elif name in FACTORS:
            self._multiply(name, operation)
        elif weights and name not in ADDING:
            self._call(operation, states, weights)
        else:
            self._pass(name, operation, given, states)

    def into(self, owner: Owner, rows: tuple[int, int] | None, feeds: Feeds) -> None:
        """Numbers reach a layer; its own are nothing new to it."""
        found = reaching(feeds)
        if owner in self.sending and any(feed.owner == owner for feed in found.items):
            found = Gathered(frozenset(feed for feed in found.items if feed.owner != owner))
        self.arrivals.append(Arrival(found, owner, rows))

    def _all(self, operation: Operation, state: _State) -> None:
        self.room -= (1 + len(state.feeds.start.items) * len(state.feeds.ways)) * len(operation.made)
        if self.room < 0:
            raise FlowTooLargeError
        for value in operation.made:
            self.states[id(value)] = state

    # --- layers

    def _call(self, operation: Operation, states: Sequence[_State], weights: Sequence[_State]) -> None:
        """Numbers go through a layer."""
        feeds = together(state.feeds for state in states)
        layers = _layers(weights)
        for owner, rows in layers.items():
            self.into(owner, rows, feeds)
        self.sending.update(layers)
        self._all(operation, _State(feeds=feeds_of(Feed(owner, rows, NO_WORDS) for owner, rows in layers.items())))
        shape = operation.made[0].shape if operation.made else None
        name = plain_name(operation.name)
        if len(layers) == 1 and shape and (name in FACTORS or name.startswith(CONVOLUTIONS)):
            dim = -1 if name in FACTORS else 1 - len(shape)
            (owner, rows), *_ = layers.items()
            if len(shape) >= -dim:
                axes: Axes = {dim: Rows(owner, *(rows or (0, shape[dim])), shape[dim])}
                self.states[id(operation.made[0])] = replace(self.state(operation.made[0]), axes=axes)

    def _make(self, name: str, operation: Operation, given: Sequence[Value], states: Sequence[_State]) -> None:
        """Something is made of weights alone, or of constants."""
        weights = frozenset().union(*(state.weights for state in states))
        if not weights:
            self._all(operation, _EMPTY)
        else:
            self._move(name, operation, given, states, _State(weights))

    # --- products

    def _multiply(self, name: str, operation: Operation) -> None:
        """Two factors: a layer and numbers, or numbers and numbers."""
        arguments = list(values_in(operation.given)) if name == "einsum" else list(operation.given)
        one, other = (self.state(arguments[place]) if place < len(arguments) else _EMPTY for place in FACTORS[name])
        rest = [self.state(value) for at, value in enumerate(arguments) if at not in FACTORS[name]]
        if one.weights or other.weights:
            factors = [one, other, *rest]
            self._call(operation, factors, [state for state in factors if state.weights])
        elif not (one.is_fed and other.is_fed):
            self._all(operation, _State(feeds=together(state.feeds for state in (one, other, *rest))))
        else:
            self.products += 1
            feeds = [state.feeds.saying("product", f"@{self.products}:{at}") for at, state in enumerate((one, other))]
            sides = _sides(operation, self.products)
            self._all(operation, _State(feeds=together([*feeds, *(state.feeds for state in rest)]), axes=sides))

    def _attend(self, operation: Operation, states: Sequence[_State]) -> None:
        """An attention in one operation, as if it were written out."""
        words = (("query", "softmax", "product"), ("key", "softmax", "product"), ("product",), ("softmax", "product"))
        feeds = [state.feeds.saying(*said) for state, said in zip(states, words, strict=False)]
        self._all(operation, _State(feeds=together(feeds)))

    # --- all else

    def _pass(self, name: str, operation: Operation, given: Sequence[Value], states: Sequence[_State]) -> None:
        words = _words(name, [state for state in states if state.is_fed])
        feeds = [state.feeds.saying(*_word(name, place, words)) for place, state in enumerate(states)]
        beside = [state.weights for state in states if not state.is_fed]
        self.sending.update(feed.owner for weights in beside for feed in weights)
        merged = together([*feeds, *map(feeds_of, beside)])
        if name == "softmax":
            merged = _scored(merged, self._softmax_axis(operation))
        self._move(name, operation, given, states, _State(feeds=merged))

    def _move(
        self, name: str, operation: Operation, given: Sequence[Value], states: Sequence[_State], made: _State
    ) -> None:  # fmt: skip
        """What is made has the axes of what it was made of, in other places or as parts."""
        first = operation.given[0] if operation.given and isinstance(operation.given[0], Value) else None
        if first is not None and name in _PARTS:
            self._parts(name, operation, replace(made, axes=self.state(first).axes))
            return
        sizes = [(state.axes, value.shape) for value, state in zip(given, states, strict=True)]
        self._all(operation, made)
        for value in operation.made:
            self.states[id(value)] = replace(made, axes=_moved(name, operation, sizes, value))

    def _softmax_axis(self, operation: Operation) -> Any:
        value = operation.given[0]
        dim = from_end(operation.given[1] if len(operation.given) > 1 else -1, getattr(value, "shape", None))
        return None if dim is None else self.state(value).axes.get(dim)

    def _parts(self, name: str, operation: Operation, whole: _State) -> None:
        """Some of the steps along one dimension."""
        value = operation.given[0]
        for made, dim, start, size in _cuts(name, operation):
            state = whole
            axis = None if dim is None else whole.axes.get(dim)
            if dim is not None and isinstance(axis, Rows) and value.shape is not None and start is not None:
                part = axis.part(start + value.shape[dim] if start < 0 else start, size)
                state = whole if part is None else _narrowed(whole, axis, part, dim)
            kept = state.axes if dim is not None else {}
            if name in ("select", "unbind") and dim is not None:
                kept = removed(kept, dim)
            self._all(Operation(name, (), (made,)), replace(state, axes=kept))


_EMPTY = _State()
_PARTS = {"slice", "select", "split", "chunk", "unbind", "narrow"}


def _words(name: str, fed: Sequence[_State]) -> tuple[str, ...]:
    """What is said of each argument's numbers."""
    if name in PASSING or (name in ("mul", "div", "sub", "rsub") and len(fed) < 2):
        return ()
    return {"mul": ("times",), "div": ("times", "over"), "sub": ("", "minus"), "rsub": ("minus", "")}.get(name, (name,))


def _word(name: str, place: int, words: tuple[str, ...]) -> tuple[str, ...]:
    if name in ("cat", "stack"):
        return (f"cat {place}",)
    word = words[min(place, len(words) - 1)] if words else ""
    return (word,) if word else ()


def _sides(operation: Operation, number: int) -> Axes:
    """Which factor gave which of the dimensions of a product."""
    equation = operation.given[0] if operation.given else None
    if not isinstance(equation, str):
        return {-2: Side(number, 0), -1: Side(number, 1)}
    terms, _, made = equation.replace(" ", "").partition("->")
    factors = terms.split(",")
    if not made or "." in equation or len(factors) != 2:
        return {}
    return {
        place - len(made): Side(number, 0 if letter in factors[0] else 1)
        for place, letter in enumerate(made)
        if (letter in factors[0]) != (letter in factors[1])
    }


def _scored(feeds: Feeds, axis: Any) -> Feeds:
    """What a softmax says of the factors of a product: the one along whose dimension it sums up has the keys."""
    if not isinstance(axis, Side):
        return feeds.saying("softmax")
    said = {f"@{axis.product}:{axis.factor}": "key", f"@{axis.product}:{1 - axis.factor}": "query"}
    return feeds_of(feed._replace(words=frozenset(said.get(word, word) for word in feed.words)) for feed in feeds.all.items)


def _narrowed(state: _State, axis: Rows, part: Rows, dim: int) -> _State:
    """Fewer rows of the layer that the dimension belongs to."""
    before, after = (axis.first, axis.last), (part.first, part.last)

    def fewer(feeds: Iterable[Feed]) -> frozenset[Feed]:
        return frozenset(
            feed._replace(rows=after) if feed.owner == axis.owner and feed.rows in (None, before) else feed for feed in feeds
        )

    return _State(fewer(state.weights), feeds_of(fewer(state.feeds.all.items)), {**state.axes, dim: part})


def _layers(weights: Sequence[_State]) -> dict[Owner, tuple[int, int] | None]:
    """The layers that weights belong to, and the rows, where all that are said are the same."""
    found: dict[Owner, set[tuple[int, int]]] = {}
    for state in weights:
        for feed in state.weights:
            found.setdefault(feed.owner, set()).update([feed.rows] if feed.rows is not None else [])
    return {owner: next(iter(rows)) if len(rows) == 1 else None for owner, rows in found.items()}


def _cuts(name: str, operation: Operation) -> list[tuple[Value, int | None, int | None, int]]:
    """For each value that is made: the dimension, and which of its steps it has."""
    given, shape = operation.given, operation.given[0].shape
    plain = [*given[1:], None, None, None]
    if name in ("split", "chunk"):
        dim = from_end(plain[1] or 0, shape)
    elif name == "unbind":
        dim = from_end(plain[0] or 0, shape)
    else:
        dim = from_end(plain[0] if type(plain[0]) is int else 0, shape)
    if name in ("select", "slice", "narrow"):
        start = plain[1] if type(plain[1]) is int else 0 if plain[1] is None else None
        if name == "slice" and plain[3] not in (None, 1):
            start = None
        return [(made, dim, start, _size(name, made, dim)) for made in operation.made]
    at = 0
    found: list[tuple[Value, int | None, int | None, int]] = []
    for made in operation.made:
        size = _size(name, made, dim)
        found.append((made, dim, at, size))
        at += size
    return found


def _size(name: str, made: Value, dim: int | None) -> int:
    if name in ("select", "unbind"):
        return 1
    return made.shape[dim] if made.shape is not None and dim is not None and len(made.shape) >= -dim else 0


def _moved(name: str, operation: Operation, sizes: list[tuple[Axes, Shape | None]], made: Value) -> Axes:
    """The axes of what an operation makes."""
    given = [*operation.given, None, None, None]
    axes, shape = sizes[0]
    if not any(one for one, _ in sizes):
        return {}
    if name == "view":
        return viewed(axes, shape, made.shape)
    if name == "permute":
        return permuted(axes, given[1], shape)
    if name == "transpose":
        return transposed(axes, given[1], given[2], shape)
    if name in ("t", "mT"):
        return transposed(axes, -1, -2, shape)
    if name == "unsqueeze":
        return inserted(axes, given[1], made.shape)
    if name == "squeeze" and (dim := from_end(given[1], shape)) is not None:
        return removed(axes, dim) if made.shape != shape else axes
    if name in ("squeeze", "cat", "stack", "movedim", "repeat", "roll", "flip", "unfold", "mean", "sum", "pad"):
        return axes if made.shape is not None and made.shape == shape else {}
    return shared(sizes, made.shape)


_ALIASES = {
    "unsafe_view": "view", "reshape": "view", "flatten": "view", "unflatten": "view", "view_as": "view", "reshape_as": "view",
    "safe_softmax": "softmax", "log_softmax": "softmax", "special_softmax": "softmax",
    "unsafe_split": "split", "split_with_sizes": "split", "unsafe_chunk": "chunk", "tensor_split": "chunk",
    "swapaxes": "transpose", "swapdims": "transpose", "concat": "cat", "concatenate": "cat", "multiply": "mul", "divide": "div",
    "true_divide": "div", "subtract": "sub", "numpy_T": "t", "adaptive_avg_pool1d": "mean", "adaptive_avg_pool2d": "mean",
    "avg_pool1d": "mean", "avg_pool2d": "mean", "adaptive_avg_pool3d": "mean", "avg_pool3d": "mean",
    "max_pool2d_with_indices": "max_pool2d", "swish": "silu",
}  # fmt: skip


def plain_name(name: str) -> str:
    """One name for what torch calls an operation on its levels."""
    name = name.strip("_").removeprefix("native_")
    return _ALIASES.get(name, name)


# The numbers pass on as they are, in other places at most.
PASSING = frozenset((
    "view", "permute", "transpose", "t", "mT", "expand", "expand_as", "clone", "contiguous", "detach", "to", "to_copy",
    "type_as", "alias", "squeeze", "unsqueeze", "dropout", "feature_dropout", "float", "double", "half", "bfloat16",
    "lift_fresh", "lift_fresh_copy", "repeat", "roll", "flip", "pad", "constant_pad_nd", "slice", "select", "split",
    "chunk", "unbind", "narrow", "movedim", "moveaxis", "copy", "add", "masked_fill", "where", "index_put",
    "slice_scatter", "select_scatter", "neg", "scalar_implicit", "alias_copy", "broadcast_to", "repeat_interleave",
    "unfold", "im2col"
))  # fmt: skip
# A weight beside numbers is one more part of a sum (or of a list); everywhere else it is a layer that they go through.
ADDING = frozenset((
    "add", "sub", "rsub", "cat", "stack", "where", "masked_fill", "index_put", "copy", "slice_scatter", "select_scatter",
    "maximum", "minimum"
))  # fmt: skip
# What they make depends on numbers in no way that a gradient would know, or on sizes alone.
CONSTANT = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "isinf", "isnan", "any", "all", "arange", "zeros", "ones", "full", "zeros_like",
    "ones_like", "full_like", "empty", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor",
    "rand", "randn", "rand_like", "randn_like", "bernoulli", "size", "sym_size", "argmax", "argmin", "eye",
    "tril_indices", "triu_indices"
))  # fmt: skip
# The places of the two factors among the arguments.
FACTORS = {
    "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "linear": (0, 1), "mv": (0, 1), "dot": (0, 1), "addmm": (1, 2),
    "baddbmm": (1, 2), "addbmm": (1, 2), "einsum": (0, 1),
}  # fmt: skip
CONVOLUTIONS = ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose")
ATTENTION = "scaled_dot_product"
# The parts that numbers play in an operation with others. What else is said of their way (activations, pools) differs more
# between two ways of writing one network.
ROLES = frozenset({"query", "key", "product", "times", "over", "minus"})
