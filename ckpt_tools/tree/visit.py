"""Every node of a tree with its path, once each, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from ckpt_tools import limits
from ckpt_tools.tree.nodes import (
    CONTAINERS,
    PLAIN,
    Append,
    Dict,
    Entry,
    Global,
    List,
    Node,
    Object,
    SetItems,
    Step,
    Where,
)


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
    for step in node.steps:
        if type(step) is SetItems:
            yield from ((component(key), item) for key, item in step.pairs)
        elif type(step) is Append:
            yield from enumerate(step.items)
        elif type(step.state) is Dict:
            yield from children(step.state)
        else:
            yield "<state>", step.state


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
    worthwhile = type(root) in CONTAINERS and (plain or visits.holds(root))
    stack = [visits.below(root)] if worthwhile and visits.enter(root) else []
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
        pairs = children(node) if type(node) is Object else enumerate(_items(node))
        return ((key, item) for key, item in pairs if type(item) not in unwanted and self.holds(item))

    def holds(self, node: Node) -> bool:
        """Whether something is not a container of plain values only. A wide one is examined once, wherever it is."""
        if type(node) is Dict:
            width = len(node.items)
        elif type(node) is List or type(node) is tuple:
            items = _items(node)
            width = len(items)
            if width <= _NARROW:
                return not _is_barren(node, self.hollow)
        else:
            return True
        if width <= _NARROW:
            return not is_hollow(node, self.hollow)
        if id(node) in self.seen or id(node) in self.wide_and_hollow:
            return id(node) in self.seen
        hollow = is_hollow(node, self.hollow)
        if hollow:
            self.wide_and_hollow.add(id(node))
        return not hollow


_NARROW, _FEW, _LEVELS = 8, 2, 4


def is_short_row(node: Node) -> bool:
    """Whether a node is a short list or tuple of plain values, or of such: to see that is quicker than to remember it."""
    return (type(node) is List or type(node) is tuple) and _is_barren(node, PLAIN)


def _is_empty_dict(node: Node) -> bool:
    return type(node) is Dict and not node.items and node.attributes is None


def _is_barren(node: Node, values: frozenset[type], width: int = _NARROW, levels: int = _LEVELS) -> bool:
    """Whether a small list or tuple has values of these types only, or empty containers, or such in turn some levels down."""
    items = node.items if type(node) is List else node if type(node) is tuple else ()
    if len(items) > width:
        return False
    if values.issuperset(map(type, items)):
        return type(node) is List or type(node) is tuple or _is_empty_dict(node)
    if not levels:
        return False
    for item in items:  # noqa: SIM110 - a generator takes half as long again
        if type(item) not in values and not _is_barren(item, values, _FEW, levels - 1):
            return False
    return True


def is_hollow(node: Node, values: frozenset[type] = PLAIN) -> bool:
    """Whether a dict, list or tuple holds values of these types only; as keys too, in a dict."""
    if type(node) is Dict:
        return values.issuperset(map(type, chain.from_iterable(node.items)))
    return type(node) in (List, tuple) and values.issuperset(map(type, _items(node)))


def _width(node: Node) -> int:
    """How many children a container has, about."""
    if type(node) is Dict:
        return len(node.items)
    if type(node) is not Object:
        return len(_items(node))
    return (len(node.args) if type(node.args) is tuple else 1) + sum(map(_step_width, node.steps))


def _step_width(step: Step) -> int:
    if type(step) is Append:
        return len(step.items)
    if type(step) is SetItems:
        return len(step.pairs)
    return len(step.state.items) if type(step.state) is Dict else 1


def _items(node: Node) -> Sequence[Node]:
    """The items of a list or tuple."""
    return node.items if type(node) is List else node if type(node) is tuple else ()


def reachable(root: Node) -> Iterator[Node]:
    """Every container and record once, by identity, keys, functions and `__dict__` attributes included; in no promised order.

    Plain values are left out, and so may be lists and tuples of nothing else, and empty dicts.
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
                stack.extend(
                    [part for part in below if type(part) not in PLAIN and not is_short_row(part) and not _is_empty_dict(part)]
                )
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
    if type(node) is not Object:
        return ()
    found = [node.function, node.args, node.kwargs]
    for step in node.steps:
        if type(step) is SetItems:
            found.extend(part for pair in step.pairs for part in pair)
        elif type(step) is Append:
            found.extend(step.items)
        else:
            found.append(step.state)
    return found
