"""The decoded structure of a checkpoint: plain values, containers, entries, inert objects. No tensor data.

A node is None, bool, int, float, str, bytes or a tuple of nodes, or one of the records below. `Storage`, `Entry`, `Global`
and `ByteString` are frozen. `Dict`, `List` and `Object` have identity (they may be shared, and may contain themselves); a
tree belongs to whoever read it, and transforms edit those three in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ckpt_tools import limits
from ckpt_tools.dtypes import DType
from ckpt_tools.errors import LimitError, TensorError

if TYPE_CHECKING:
    from ckpt_tools.io.content import Content

Node: TypeAlias = Any
Where: TypeAlias = tuple["str | int", ...]


@dataclass(slots=True, eq=False)
class Storage:
    """One run of bytes that entries view. Two entries on one storage are tied.

    Attributes:
        key: its name in the container, unique there.
        dtype: the element type it was saved with; None for an untyped one (a run of bytes).
        nbytes: its size in bytes.
        device: its device tag, None where the container has none.
        content: where the bytes are.
    """

    key: Final[str]
    dtype: Final[DType | None]
    nbytes: Final[int]
    device: Final[str | None]
    content: Final[Content]


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What a few tensors carry beyond their data.

    Attributes:
        hooks: the backward hooks node, where it is not the usual empty OrderedDict.
        metadata: a Dict with the `conj` and `neg` bits of `_rebuild_tensor_v2`, or None.
        python_type: the class of a tensor subclass (`_rebuild_from_type_v2`), or None.
        state: Python attributes set on the tensor or parameter, or None.
    """

    hooks: Node = None
    metadata: Node = None
    python_type: Global | None = None
    state: Node = None


@dataclass(slots=True, eq=False)
class Entry:
    """One tensor: a view on a storage. Stride and offset count elements, as in torch."""

    storage: Final[Storage]
    dtype: Final[DType]
    shape: Final[tuple[int, ...]]
    stride: Final[tuple[int, ...]]
    offset: Final[int]
    requires_grad: Final[bool] = False
    kind: Final[Literal["tensor", "parameter"]] = "tensor"
    extras: Final[Extras | None] = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes that the elements need, row-major."""
        return self.numel * self.dtype.bits // 8

    @property
    def span(self) -> int:
        """Elements of its storage from the first to the last, those between them included; 0 for an empty tensor."""
        span = _span(self.shape, self.stride)
        return span if isinstance(span, int) else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps (strides of dimensions of size 1 do not matter)."""
        return is_contiguous(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the file names; never imported. Python 2 module names are already mapped."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class ByteString:
    """A Python 2 byte string whose bytes are not UTF-8 text."""

    data: bytes


class Dict:
    """A dict or an OrderedDict. `items` are (key, value) pairs in order, keys unique; `attributes` its `__dict__`."""

    __slots__ = ("attributes", "items", "ordered")

    def __init__(self, items: list[tuple[Node, Node]] | None = None, *, ordered: bool = False) -> None:
        self.items: list[tuple[Node, Node]] = [] if items is None else items
        self.ordered = ordered
        self.attributes: Dict | None = None

    def get(self, key: str) -> Node:
        """The value under `key`, or None."""
        return next((value for name, value in self.items if type(name) is str and name == key), None)

    def __contains__(self, key: str) -> bool:
        return any(type(name) is str and name == key for name, _ in self.items)


class List:
    """A list."""

    __slots__ = ("items",)

    def __init__(self, items: list[Node] | None = None) -> None:
        self.items: list[Node] = [] if items is None else items


Call: TypeAlias = Literal["reduce", "new", "new_ex", "none"]


class Object:
    """A Python object that is not plain data, as an inert record of how a pickle would build it.

    Attributes:
        call: "reduce" for `function(*args)`, "new" for `class.__new__(class, *args)`, "new_ex" with keyword arguments,
            "none" where the steps happen to the function or class itself.
        function: what would be called; nearly always a Global.
        args: the tuple node of arguments.
        kwargs: keyword arguments of "new_ex", else None.
        steps: what happened to it next, in order: ("append", [nodes]), ("set", [pairs]), ("build", state).
    """

    __slots__ = ("args", "call", "function", "kwargs", "steps")

    def __init__(self, call: Call, function: Node, args: Node, kwargs: Node = None) -> None:
        self.call, self.function, self.args, self.kwargs = call, function, args, kwargs
        self.steps: list[tuple[Literal["append", "set", "build"], Node]] = []

    @property
    def name(self) -> str:
        """The name of its function; one that is computed has none, and its text could be as long as the file likes."""
        return str(self.function) if type(self.function) is Global else "<a computed function>"

    @property
    def state(self) -> Node:
        """The state of the last "build" step, or None."""
        return next((value for step, value in reversed(self.steps) if step == "build"), None)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor of this shape, as torch counts them (a size of 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether this stride is row-major for this shape."""
    if 0 in shape:
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


MAX_ELEMENTS = 2**59
MAX_DIMENSIONS = 1024


def check(entry: Entry, name: str = "a tensor") -> None:
    """Raise TensorError unless the view lies inside its storage. Every reader's result and writer's input passes here."""
    offset, storage = entry.offset, entry.storage
    span = _span(entry.shape, entry.stride)
    if isinstance(span, str):
        raise TensorError(f"{name} {span}.")
    if not 0 <= offset < 1 << 63:
        raise TensorError(f"{name} {'claims an offset over 2**63' if offset > 0 else _NEGATIVE}.")
    end = (offset + span) * entry.dtype.bits
    if span and end > storage.nbytes * 8:
        raise TensorError(
            f"{name} reaches outside its storage.",
            why=f"Its last element ends at byte {end // 8}; storage {storage.key!r} has {storage.nbytes} bytes.",
        )


_NEGATIVE = "has a negative size, stride or offset"


@lru_cache(maxsize=4096)
def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | str:
    """Elements from the first to the last, 0 for none; as text, why no tensor has these. Models repeat few shapes."""
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        return f"has {len(shape)} sizes and {len(stride)} strides"
    if shape and min(*shape, *stride) < 0:
        return _NEGATIVE
    last, numel = 0, 1
    for size, step in zip(shape, stride, strict=True):
        numel *= size
        last += (size - 1) * step
        if numel > MAX_ELEMENTS or step.bit_length() > 63:
            return f"claims {len(shape)} dimensions with more than 2**59 elements, or a stride over 2**63"
    return last + 1 if numel else 0


def children(node: Node) -> Iterator[tuple[str | int, Node]]:
    """The parts of a container, each with the path component that leads to it."""
    if type(node) is Dict:
        for key, value in node.items:
            yield component(key), value
    elif type(node) is List:
        yield from enumerate(node.items)
    elif type(node) is tuple:
        yield from enumerate(node)
    elif type(node) is Object:
        yield from _object_children(node)


def component(key: Node) -> str | int:
    """A dict key as a path component: text and small ints as they are, anything else as short text.

    Larger ints would let a file choose thousands of paths with one hash value, and every table of paths become slow.
    """
    if type(key) is str or (type(key) is int and key.bit_length() < 32):
        return key
    if type(key) is int:
        return str(key) if key.bit_length() <= 128 else f"<int of {key.bit_length()} bits>"
    if type(key) in (float, bool, Global) or key is None:
        return str(key)[:_SHOWN_KEY]
    return str(key[:_SHOWN_KEY]) if type(key) is bytes else f"<{type(key).__name__} key>"


_SHOWN_KEY = 100


def _object_children(node: Object) -> Iterator[tuple[str | int, Node]]:
    for index, arg in enumerate(node.args if type(node.args) is tuple else (node.args,)):
        yield f"<arg {index}>", arg
    if node.kwargs is not None:
        yield "<kwargs>", node.kwargs
    for step, value in node.steps:
        if step == "set":
            yield from ((component(key), item) for key, item in value)
        elif step == "append":
            yield from enumerate(value)
        elif type(value) is Dict:
            yield from children(value)
        else:
            yield "<state>", value


CONTAINERS = (Dict, List, Object, tuple)
PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_SPARE_VISITS, _SPARE_WIDTH = 10_000, 100_000
_EFFORT_A_NODE = 16  # in path components, or eight characters of a path
_LONG_KEY = 1024


def walk(
    root: Node, *, stop: Callable[[Node], bool] | None = None, plain: bool = True, values: frozenset[type] = frozenset(),
    entries: bool = True,
) -> Iterator[tuple[Where, Node]]:  # fmt: skip
    """Every node with its path, depth first in order, the root included.

    A container that is reached again by another path is walked again, as `torch.load` would show it twice, but never
    inside itself, and not once the walk has become four times as long as the tree is large: the time stays linear.

    Args:
        root: where to start.
        stop: do not go below nodes for which this is true.
        plain: whether plain values (None, numbers, text, bytes) are wanted too. Without, a container that holds nothing
            else may be left out as well. values: the types of plain values that are wanted nevertheless.
        entries: whether entries are wanted; without, and with `plain=False`, only containers, objects and their like come.

    Raises:
        LimitError: paths so deep or long, in so many places, that writing them down would take more than the file itself.
    """
    yield (), root
    visits = _Visits(stop, plain=plain, values=values, entries=entries)
    path: list[str | int] = []
    costs = [0]  # what one path in each open container costs
    stack = [visits.below(root)] if type(root) in CONTAINERS and visits.enter(root) else []
    effort, most = 0, limits.PATHS.value
    while stack:
        for key, node in stack[-1]:
            effort += costs[-1] - _EFFORT_A_NODE
            if type(key) is str and len(key) > _LONG_KEY:
                effort += len(key) >> 4
            if effort > most:
                raise limits.PATHS.error("The checkpoint is nested deeper, or under longer keys, than any real one.")
            yield (*path, key), node
            if type(node) in CONTAINERS and visits.enter(node):
                path.append(key)
                costs.append(costs[-1] + 1 + (len(key) >> 3 if type(key) is str else 0))
                stack.append(visits.below(node))
                break
        else:
            visits.leave()
            stack.pop()
            costs.pop()
            if path:
                path.pop()


class _Visits:
    """Which containers a walk may enter, and what it sees there."""

    def __init__(
        self, stop: Callable[[Node], bool] | None, *, plain: bool, values: frozenset[type], entries: bool
    ) -> None:  # fmt: skip
        self.stop, self.plain, self.hollow = stop, plain, PLAIN - values
        self.unwanted = self.hollow if entries else self.hollow | {Entry}
        self.visits, self.width = _SPARE_VISITS, _SPARE_WIDTH
        self.seen: set[int] = set()
        self.wide_and_hollow: set[int] = set()
        self.open: dict[int, None] = {}

    def enter(self, node: Node) -> bool:
        """Whether to go below a container; it is open until `leave`."""
        known = id(node) in self.seen
        if known and (id(node) in self.open or not self.visits or _width(node) > self.width):
            return False
        if self.stop is not None and self.stop(node):
            return False
        width = _width(node)
        if known:
            self.visits, self.width = self.visits - 1, self.width - width
        else:
            self.seen.add(id(node))
            self.visits, self.width = self.visits + 3, self.width + 3 * width
        self.open[id(node)] = None
        return True

    def leave(self) -> None:
        """Close the container that was entered last."""
        self.open.popitem()

    def below(self, node: Node) -> Iterator[tuple[str | int, Node]]:
        """The children to look at."""
        if self.plain:
            return children(node)
        unwanted = self.unwanted
        if type(node) is Dict:
            return ((component(key), item) for key, item in node.items if type(item) not in unwanted and self.holds(item))
        pairs = enumerate(node.items if type(node) is List else node) if type(node) is not Object else _object_children(node)
        return ((key, item) for key, item in pairs if type(item) not in unwanted and self.holds(item))

    def holds(self, node: Node) -> bool:
        """Whether something is no container of plain values only. A wide one is looked through once, wherever it is."""
        kind = type(node)
        if kind is not List and kind is not tuple and kind is not Dict:
            return True
        items = node if kind is tuple else node.items
        if not items:
            return False
        if len(items) <= _NARROW:
            return not (is_hollow(node, self.hollow) if kind is Dict else self.hollow.issuperset(map(type, items)))
        if id(node) in self.seen or id(node) in self.wide_and_hollow:
            return id(node) in self.seen
        hollow = is_hollow(node, self.hollow)
        if hollow:
            self.wide_and_hollow.add(id(node))
        return not hollow


_NARROW = 8


def is_short_row(node: Node) -> bool:
    """Whether a node is a short list or tuple of plain values: to see that is quicker than to remember it."""
    items = node.items if type(node) is List else node
    return type(node) in (List, tuple) and len(items) <= _NARROW and PLAIN.issuperset(map(type, items))


def is_hollow(node: Node, values: frozenset[type] = PLAIN) -> bool:
    """Whether a dict, list or tuple holds values of these types only; as keys too, in a dict."""
    if type(node) is Dict:
        return all(type(value) in values and type(key) in values for key, value in node.items)
    return type(node) is not Object and values.issuperset(map(type, node.items if type(node) is List else node))


def _width(node: Node) -> int:
    """How many children a container has, about."""
    if type(node) is tuple:
        return len(node)
    if type(node) is not Object:
        return len(node.items)
    lengths = (len(value.items) if type(value) is Dict else len(value) if step != "build" else 1 for step, value in node.steps)
    return (len(node.args) if type(node.args) is tuple else 1) + sum(lengths)


def reachable(root: Node) -> Iterator[Node]:
    """Every container and record once, by identity, keys, functions and `__dict__` attributes included; in no promised order.

    Plain values are left out, and so may be lists and tuples of nothing else.
    """
    seen: set[int] = set()
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        if type(node) in CONTAINERS or type(node) is Entry:
            if id(node) in seen:
                continue
            seen.add(id(node))
            below = parts(node)
            if not PLAIN.issuperset(map(type, below)):
                stack.extend([part for part in below if type(part) not in PLAIN and not is_short_row(part)])
        yield node


def parts(node: Node) -> Sequence[Node]:
    """Everything that a container or an entry refers to, keys, functions, storages and attributes included."""
    if type(node) is Dict:
        found = [part for pair in node.items for part in pair]
        return [*found, node.attributes] if node.attributes is not None else found
    if type(node) is List:
        return node.items
    if type(node) is tuple:
        return node
    if type(node) is Entry:
        extras = node.extras
        found = [node.storage]
        return found if extras is None else [*found, extras.hooks, extras.metadata, extras.python_type, extras.state]
    found = [node.function, node.args, node.kwargs]
    for step, value in node.steps:
        found.extend([part for pair in value for part in pair] if step == "set" else value if step == "append" else [value])
    return found


class _Drop:
    """What `swap` returns for a record that is to be left out."""


DROP = _Drop()
_MAX_ATTACHED = 50  # tensors in the attributes of tensors, in tuples
RECORDS = (Entry, Object, Storage, Global, ByteString)


def replace(root: Node, swap: Callable[[Node], Node], *, values: frozenset[type] = frozenset()) -> Node:
    """Exchange records everywhere, keys and arguments included.

    `swap` gets each Entry, Object, Storage, Global and ByteString once, and returns it or another node, whose parts are
    exchanged in turn. DROP leaves it out of its dict or list; in a tuple None takes its place. Containers are edited in
    place, so that shared references and cycles stay.

    Args:
        values: types of plain values that `swap` gets too.
    """
    return _Exchange(swap, values).run(root)


class _Exchange:
    def __init__(self, swap: Callable[[Node], Node], values: frozenset[type]) -> None:
        self.swap = swap
        self.swapped, self.kept = frozenset(RECORDS) | values, PLAIN - values
        # id -> (the old one, kept alive so that its id stays its own; the new one)
        self.done: dict[int, tuple[Node, Node]] = {}
        self.pending: list[Node] = []
        self.depth = 0

    def run(self, root: Node) -> Node:
        root = self.node(root)
        seen: set[int] = set()
        while self.pending:
            node = self.pending.pop()
            if id(node) not in seen:
                seen.add(id(node))
                _edit(node, self.node, self.kept)
        return root

    def node(self, node: Node) -> Node:
        if type(node) is not tuple:
            return self.leaf(node)
        return node if self.kept.issuperset(map(type, node)) else _exchange_tuple(node, self.leaf, self.done)

    def leaf(self, node: Node) -> Node:
        if type(node) in self.swapped:
            if id(node) not in self.done:
                self.record(node)
            node = self.done[id(node)][1]
        if type(node) in (Dict, List, Object):
            self.pending.append(node)
        return node

    def record(self, node: Node) -> None:
        new = self.swap(node)
        self.done[id(node)] = (node, new)
        if type(new) is Entry and new.extras is not None:
            new = dataclasses.replace(new, extras=self.extras(new.extras))
            self.done[id(node)] = (node, new)
        self.done[id(new)] = (new, new)

    def extras(self, extras: Extras) -> Extras:
        """The same with what it holds exchanged: dicts in place and later, tuples now."""
        self.depth += 1
        if self.depth > _MAX_ATTACHED:
            raise LimitError(f"The pickle attaches more than {_MAX_ATTACHED} tensors to one another.")
        hooks, state = (None if part is DROP else part for part in (self.node(extras.hooks), self.node(extras.state)))
        self.depth -= 1
        return dataclasses.replace(extras, hooks=hooks, state=state)


def _edit(node: Node, exchange: Callable[[Node], Node], kept: frozenset[type]) -> None:
    if type(node) is Dict:
        node.items[:] = _edit_pairs(node.items, exchange, kept)
        if node.attributes is not None:
            node.attributes = exchange(node.attributes)
    elif type(node) is List:
        node.items[:] = _edit_list(node.items, exchange, kept)
    else:
        node.function, node.args, node.kwargs = map(exchange, (node.function, node.args, node.kwargs))
        steps = [(step, _edit_step(step, value, exchange, kept)) for step, value in node.steps]
        node.steps[:] = [(step, value) for step, value in steps if value is not DROP]


def _edit_step(step: str, value: Node, exchange: Callable[[Node], Node], kept: frozenset[type]) -> Node:
    if step == "build":
        return exchange(value)
    return (_edit_pairs if step == "set" else _edit_list)(value, exchange, kept)


def _edit_pairs(
    pairs: list[tuple[Node, Node]], exchange: Callable[[Node], Node], kept: frozenset[type]
) -> list[tuple[Node, Node]]:
    if all(type(key) in kept and type(value) in kept for key, value in pairs):
        return pairs
    edited = ((exchange(key), exchange(value)) for key, value in pairs)
    return [(key, value) for key, value in edited if key is not DROP and value is not DROP]


def _edit_list(items: list[Node], exchange: Callable[[Node], Node], kept: frozenset[type]) -> list[Node]:
    if kept.issuperset(map(type, items)):
        return items
    return [item for item in map(exchange, items) if item is not DROP]


def _exchange_tuple(root: tuple[Node, ...], leaf: Callable[[Node], Node], done: dict[int, tuple[Node, Node]]) -> Node:
    """A tuple with its leaves exchanged, nested tuples included, without recursion; itself when nothing changed."""
    stack = [root]
    while stack:
        node = stack[-1]
        if id(node) in done:
            stack.pop()
            continue
        waiting = [part for part in node if type(part) is tuple and id(part) not in done]
        if waiting:
            stack.extend(waiting)
        else:
            stack.pop()
            leaves = (done[id(part)][1] if type(part) is tuple else leaf(part) for part in node)
            changed = tuple(None if part is DROP else part for part in leaves)
            same = all(new is old for new, old in zip(changed, node, strict=True))
            done[id(node)] = (node, node if same else changed)
    return done[id(root)][1]
