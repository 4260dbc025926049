"""Every node of a tree with its path, once each, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from ckpt_tools import limits
from ckpt_tools.tree.nodes import (
    CONTAINERS,
    PLAIN,
    Append,
    Build,
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
    """A dict key as a path component: text and small ints as they are, anything else as short text."""
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
    entries: bool = True, bare: bool = True,
) -> Iterator[tuple[Where, Node]]:  # fmt: skip
    """Every node with its path, depth first in order, the root included."""
    yield (), root
    visits = _Visits(stop, plain=plain, values=values, entries=entries, bare=bare)
    path: list[str | int] = []
    costs = [0]  # what one path in each open container costs
    worthwhile = type(root) in CONTAINERS and (plain or visits.holds(root))
    stack = [visits.below(root)] if worthwhile and visits.enter(root) else []
    effort, most = 0, limits.MEMORY.value // 4
    while stack:
        for key, node in stack[-1]:
            effort += costs[-1] - _EFFORT_A_NODE
            if type(key) is str and len(key) > _LONG_KEY:
                effort += len(key) >> 4
            if effort > most:
                raise limits.MEMORY.error("The checkpoint is nested deeper, or under longer keys, than any real one.")
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
        self, stop: Callable[[Node], bool] | None, *, plain: bool, values: frozenset[type], entries: bool, bare: bool
    ) -> None:  # fmt: skip
        self.stop, self.plain, self.bare = stop, plain, bare
        self.hollow = PLAIN - values if bare else _BARE - values
        self.unwanted = self.hollow if entries else self.hollow | {Entry}
        self.visits, self.width = _SPARE_VISITS, _SPARE_WIDTH
        self.seen: set[int] = set()
        self.wide_and_hollow: set[int] = set()
        self.met: set[int] = set()
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
        if type(node) is Object:
            return ((key, item) for key, item in children(node) if type(item) not in unwanted and self.holds(item))
        return self.in_row(_items(node))

    def in_row(self, items: Sequence[Node]) -> Iterator[tuple[int, Node]]:
        """The items of a list or tuple to look at, by index."""
        start = 0
        for chunk, barren in chunks(items, self.hollow, self.met, dicts=True):
            unwanted = self.unwanted | barren
            if not unwanted.issuperset(map(type, chunk)):
                for index, item in enumerate(chunk, start):
                    if type(item) not in unwanted and self.holds(item):
                        yield index, item
            start += len(chunk)

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
            return self.bare or type(node) is not Object or not _is_bare(node)
        if width <= _NARROW:
            return not is_hollow(node, self.hollow)
        if id(node) in self.seen or id(node) in self.wide_and_hollow:
            return id(node) in self.seen
        hollow = is_hollow(node, self.hollow)
        if hollow:
            self.wide_and_hollow.add(id(node))
        return not hollow


_NARROW, _FEW, _LEVELS = 8, 2, 4
_CHUNK = 256  # items of a row that are looked at together
_WIDE, _MOST = 16, 65_536  # parts for each item, more of which must be new, and for a piece
ROWS = frozenset((Dict, List, tuple))
_ITEMS, _ATTRIBUTES = attrgetter("items"), attrgetter("attributes")


def chunks(
    items: Sequence[Node], values: frozenset[type], met: set[int], *, dicts: bool = False
) -> Iterator[tuple[Sequence[Node], frozenset[type]]]:
    """A row in pieces, each with the types of those of its items that need no look."""
    if len(items) <= _NARROW or values.issuperset(map(type, items)):
        yield items, values
        return
    for start in range(0, len(items), _CHUNK):
        chunk = items[start : start + _CHUNK]
        yield chunk, values | ROWS if _are_barren(chunk, values, met, dicts=dicts) else values


def _are_barren(items: Sequence[Node], values: frozenset[type], met: set[int], *, dicts: bool) -> bool:
    """What `chunks` says of a piece, without a loop in Python. Where much is below the items, the answer is no."""
    level = [item for item in items if type(item) in ROWS]
    for _ in range(_LEVELS):
        rows = contents(level, _WIDE * len(items), met, dicts=dicts)
        if rows is None:
            return False
        kinds = set(map(type, chain.from_iterable(rows))) - values
        if not kinds:
            return True
        if not kinds <= ROWS:
            return False
        level = [node for node in chain.from_iterable(rows) if type(node) in ROWS]
    return False


def contents(nodes: Sequence[Any], most: int, met: set[int], *, dicts: bool = True) -> list[Sequence[Node]] | None:
    """What the dicts, lists and tuples among nodes hold, of dicts each pair, in no order."""
    rows: list[Sequence[Node]] = [node for node in nodes if type(node) is tuple]
    rows += [node.items for node in nodes if type(node) is List]
    found = [node for node in nodes if type(node) is Dict]
    pairs = list(map(_ITEMS, found))
    count = sum(map(len, pairs))
    if any(map(_ATTRIBUTES, found)) or (count and not dicts):
        return None
    count = sum(map(len, rows)) + 2 * count
    if count > _MOST or (count > most and not _are_new(nodes, met)):
        return None
    return [*rows, *chain.from_iterable(pairs)]


def _are_new(nodes: Sequence[Node], met: set[int]) -> bool:
    """Whether nodes are all different, and none of them has been met. Now they have."""
    ids = set(map(id, nodes))
    if len(ids) < len(nodes) or not met.isdisjoint(ids):
        return False
    met |= ids
    return True


def worth_a_look(items: Sequence[Node], met: set[int], *, dicts: bool = False) -> list[Node]:
    """The items of a row without plain values, empty dicts, and short lists and tuples of such."""
    if len(items) <= _NARROW:
        return [item for item in items if type(item) not in PLAIN and not (type(item) in ROWS and _is_barren(item, PLAIN))]
    found: list[Node] = []
    for chunk, barren in chunks(items, PLAIN, met, dicts=dicts):
        if not barren.issuperset(map(type, chunk)):
            others = [item for item in chunk if type(item) not in barren]
            found += [item for item in others if not (type(item) in ROWS and _is_barren(item, PLAIN))]
    return found


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


_BARE = PLAIN | {Global}


def _is_bare(node: Object, levels: int = 1) -> bool:
    """Whether an object holds nothing but plain values and globals, in few parts: a NumPy number on its dtype does."""
    args, function = node.args, node.function
    if node.kwargs is not None or type(args) is not tuple or len(args) > _NARROW or len(node.steps) > _FEW:
        return False
    if type(function) is not Global or function.module.startswith("torch"):
        return False
    for arg in args:
        if type(arg) not in _BARE and not (levels and type(arg) is Object and _is_bare(arg, levels - 1)):
            return False
    return not node.steps or all(map(_sets_little, node.steps))


def _sets_little(step: Step) -> bool:
    """Whether a step sets a state of few plain values, which no module has."""
    return type(step) is Build and type(step.state) is tuple and len(step.state) <= _WIDE and is_hollow(step.state, _BARE)


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


def reachable(root: Node, *, dicts: bool = True, bare: bool = True) -> Iterator[Node]:
    """Every container and record once, by identity, keys, functions and attributes included."""
    seen: set[int] = set()
    met: set[int] = set()
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        if type(node) in CONTAINERS or type(node) is Entry:
            if id(node) in seen or (not bare and type(node) is Object and _is_bare(node)):
                continue
            seen.add(id(node))
            below = parts(node)
            if not PLAIN.issuperset(map(type, below)):
                stack += worth_a_look(below, met, dicts=not dicts)
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
