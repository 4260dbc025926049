"""What a tree read from a pickle must satisfy before anyone uses it: depth, hashable keys, each key once."""

from __future__ import annotations

from ckpt_tools.errors import LimitError, PickleError
from ckpt_tools.pickling.limits import MAX_DEPTH, MAX_KEY_DEPTH
from ckpt_tools.tree import CONTAINERS, Dict, Entry, Extras, List, Node, Object

UNHASHABLE = ("builtins.bytearray", "builtins.set", "collections.OrderedDict", "collections.Counter", "collections.defaultdict")


def settle(root: Node) -> list[str]:
    """Check the tree and merge keys that are set twice (the last value wins, as in Python).

    Returns:
        The keys that were set twice, as text.

    Raises:
        LimitError: nested deeper than MAX_DEPTH. PickleError: a key that Python cannot hash.
    """
    repeated: list[str] = []
    seen: set[int] = set()
    level = [root]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise LimitError(f"The pickle is nested more than {MAX_DEPTH} deep.")
        below: list[Node] = []
        for node in level:
            if (type(node) in CONTAINERS or type(node) in (Entry, Extras)) and id(node) not in seen:
                seen.add(id(node))
                below.extend(_settle_one(node, repeated))
        level = below
    return repeated


def _settle_one(node: Node, repeated: list[str]) -> list[Node]:
    if type(node) is Dict:
        node.items = _unique(node.items, repeated)
        values = [value for _, value in node.items]
        return [*values, node.attributes] if node.attributes is not None else values
    if type(node) is List:
        return node.items
    if type(node) is tuple:
        return list(node)
    if type(node) is Entry:
        return [] if node.extras is None else [node.extras]
    if type(node) is Extras:
        return [node.hooks, node.metadata, node.state]
    return _settle_object(node, repeated)


def _settle_object(node: Object, repeated: list[str]) -> list[Node]:
    below = [node.function, node.args, node.kwargs]
    for index, (step, value) in enumerate(node.steps):
        if step == "set":
            value = _unique(value, repeated)
            node.steps[index] = (step, value)
            below.extend(item for _, item in value)
        elif step == "append":
            below.extend(value)
        else:
            below.append(value)
    return below


def _unique(pairs: list[tuple[Node, Node]], repeated: list[str]) -> list[tuple[Node, Node]]:
    """The pairs with each key once, at its first place with its last value."""
    keys = [key for key, _ in pairs]
    if all(type(key) is str for key in keys):
        if len(set(keys)) == len(keys):
            return pairs
        identities: list[Node] = keys
    else:
        numbers: dict[Node, int] = {}
        identities = [_identity(key, numbers) for key in keys]
    last: dict[Node, tuple[Node, Node]] = {}
    for identity, (key, value) in zip(identities, pairs, strict=True):
        if identity in last:
            repeated.append(str(key) if type(key) is str else type(key).__name__)
            key = last[identity][0]
        last[identity] = (key, value)
    return list(last.values())


def _identity(key: Node, numbers: dict[Node, int]) -> Node:
    """A stand-in that is equal when Python holds the keys equal, and hashes in linear time without collisions.

    Numbers become bytes or text: Python's own hash of a number lets a file choose thousands of keys that collide.
    """
    if type(key) is tuple:
        return _tuple_identity(key, numbers)
    if type(key) in (Dict, List) or (type(key) is Object and str(key.function) in UNHASHABLE):
        raise PickleError("The pickle uses a value as a dict key that Python cannot hash.")
    if type(key) is float:
        if key != key:
            return id(key)
        if not key.is_integer():
            return "f", key.hex()
        key = int(key)
    if type(key) in (int, bool):
        return "n", int(key).to_bytes(key.bit_length() // 8 + 1, "little", signed=True)
    return id(key) if type(key) in (Object, Entry) else key


def _tuple_identity(root: tuple[Node, ...], numbers: dict[Node, int]) -> Node:
    """The identity of a tuple key. Shared parts are looked at once; a deep one is refused (it crashes C pickle).

    `numbers` gives each distinct tuple of one dict a number that stands for it, so that nested sharing does not multiply.
    """
    names: dict[int, Node] = {}
    stack = [(root, 1)]
    while stack:
        node, depth = stack[-1]
        if depth > MAX_KEY_DEPTH:
            raise PickleError(f"The pickle uses a tuple nested more than {MAX_KEY_DEPTH} deep as a dict key.")
        waiting = [(part, depth + 1) for part in node if type(part) is tuple and id(part) not in names]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        if id(node) not in names:
            parts = tuple(names[id(part)] if type(part) is tuple else _identity(part, numbers) for part in node)
            names[id(node)] = ("t", numbers.setdefault(parts, len(numbers)))
    return names[id(root)]
