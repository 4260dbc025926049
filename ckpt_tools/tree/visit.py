"""Every node of a tree with its path, once each, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from ckpt_tools import limits
from ckpt_tools.tree.nodes import CONTAINERS, PLAIN, Append, Build, Dict, Entry, Global, List, Node, Object, SetItems, Where


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
    """A dict key as a path component: text and small ints as they are, larger ones as text, all else as short text in `<>`."""
    if type(key) is str or (type(key) is int and key.bit_length() < 32):
        return key
    text = _key_text(key)
    return text if type(key) is int and key.bit_length() <= 128 else f"<{text}>"


_SHOWN_KEY, _SHOWN_PARTS = 100, 8


def _key_text(key: Node) -> str:
    """What tells a key from others: `None`, `1.5`, `('k', 1)`; of long ones the beginning."""
    if type(key) is int:
        return str(key) if key.bit_length() <= 128 else f"int of {key.bit_length()} bits"
    if type(key) is str or type(key) is bytes:
        return repr(key[:_SHOWN_KEY])
    if type(key) is tuple and len(key) <= _SHOWN_PARTS and not any(type(part) is tuple for part in key):
        return f"({', '.join(map(_key_text, key))}{',' * (len(key) == 1)})"
    return str(key)[:_SHOWN_KEY] if type(key) in (float, bool, Global) or key is None else f"{type(key).__name__} key"


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


_SPARE = 100_000  # parts of containers that are entered again at another path, beyond three for each entered first
_EFFORT_A_NODE = 16  # in path components, or eight characters of a path
_LONG_KEY = 1024


def walk(
    root: Node, *, stop: Callable[[Node], bool] | None = None, plain: bool = True, values: frozenset[type] = frozenset(),
    entries: bool = True, bare: bool = True,
) -> Iterator[tuple[Where, Node]]:  # fmt: skip
    """Every node with its path, depth first in order, the root included; a shared container at each path, while few are.
    One that holds itself is not told again inside.

    Without `plain` it leaves out plain values but `values`, and what holds nothing else; without `entries` tensors, without
    `bare` objects of few plain values too.
    """
    left_out = (lambda _: False) if plain else _left_out(values, entries=entries, bare=bare)
    yield (), root
    if type(root) not in CONTAINERS or left_out(root) or (stop is not None and stop(root)):
        return
    path: list[str | int] = []
    costs = [0]  # what one path in each open container costs
    stack, above, seen = [children(root)], {id(root): None}, {id(root)}
    spare, effort, most = _SPARE, 0, limits.MEMORY.value // 4
    while stack:
        for key, node in stack[-1]:
            if left_out(node) or id(node) in above:  # what holds itself was told where it begins
                continue
            effort += costs[-1] - _EFFORT_A_NODE
            if type(key) is str and len(key) > _LONG_KEY:
                effort += len(key) >> 4
            if effort > most:
                raise limits.MEMORY.error("The checkpoint is nested deeper, or under longer keys, than any real one.")
            yield (*path, key), node
            if type(node) not in CONTAINERS:
                continue
            width = 1 + _width(node)
            if (id(node) in seen and width > spare) or (stop is not None and stop(node)):
                continue
            spare += -width if id(node) in seen else 3 * width
            seen.add(id(node))
            above[id(node)] = None
            path.append(key)
            costs.append(costs[-1] + 1 + (len(key) >> 3 if type(key) is str else 0))
            stack.append(children(node))
            break
        else:
            stack.pop()
            above.popitem()
            costs.pop()
            if path:
                path.pop()


def _left_out(values: frozenset[type], *, entries: bool, bare: bool) -> Callable[[Node], bool]:
    """What `walk` leaves out without `plain`."""
    hollow = PLAIN - values
    unwanted = hollow if entries else hollow | {Entry}
    wide: dict[int, bool] = {}  # whether a wide container is hollow: it may stand in a million places

    def is_left_out(node: Node) -> bool:
        if type(node) in unwanted:
            return True
        if type(node) is Entry:
            return False
        if type(node) is Object:
            return not bare and _is_bare(node)
        if _width(node) <= _NARROW:
            return is_hollow(node, hollow)
        if id(node) not in wide:
            wide[id(node)] = is_hollow(node, hollow)
        return wide[id(node)]

    return is_left_out


_NARROW, _FEW, _WIDE = 8, 2, 16
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
    for step in node.steps:  # a state of few plain values, which no module has
        if type(step) is not Build or type(step.state) is not tuple or len(step.state) > _WIDE:
            return False
        if not _BARE.issuperset(map(type, step.state)):
            return False
    return True


def is_hollow(node: Node, values: frozenset[type] = PLAIN) -> bool:
    """Whether a dict, list or tuple holds values of these types only; as keys too, in a dict."""
    if type(node) is Dict:
        return values.issuperset(map(type, chain.from_iterable(node.items)))
    if type(node) is List:
        return values.issuperset(map(type, node.items))
    return type(node) is tuple and values.issuperset(map(type, node))


def _width(node: Node) -> int:
    """How many children a container has, about."""
    if type(node) is Dict or type(node) is List:
        return len(node.items)
    if type(node) is tuple:
        return len(node)
    return len(parts(node)) if type(node) is Object else 0


def reachable(root: Node, *, bare: bool = True) -> Iterator[Node]:
    """Every container and record once, by identity, keys, functions and attributes included."""
    seen: set[int] = set()
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        if type(node) in CONTAINERS or type(node) is Entry:
            if id(node) in seen or (not bare and type(node) is Object and _is_bare(node)):
                continue
            seen.add(id(node))
            if type(node) is Entry and node.extras is None:
                stack.append(node.storage)
            else:
                stack += [part for part in parts(node) if type(part) not in PLAIN]
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
