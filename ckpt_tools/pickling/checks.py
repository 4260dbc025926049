"""What a tree read from a pickle must satisfy before anyone uses it: depth, hashable keys, each key once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ckpt_tools import limits
from ckpt_tools.errors import PickleError
from ckpt_tools.tree.nodes import (
    PLAIN,
    Append,
    Dict,
    Entry,
    List,
    Node,
    Object,
    Pair,
    SetItems,
)
from ckpt_tools.tree.visit import is_short_row

UNHASHABLE = ("builtins.bytearray", "builtins.set", "collections.OrderedDict", "collections.Counter", "collections.defaultdict")


def validate(root: Node) -> list[str]:
    """Check the tree and merge keys that are set twice (the last value wins, as in Python).

    Returns:
        The keys that were set twice, as text.

    Raises:
        LimitError: nested too deep. PickleError: a key that Python cannot hash.
    """
    keys = _Keys()
    seen: set[int] = set()
    level: Sequence[Node] = [root]
    depth, deepest = 0, limits.DEPTH.value
    while level:
        depth += 1
        if depth > deepest:
            raise limits.DEPTH.error("The pickle is nested too deep.")
        below: list[Node] = []
        for node in level:
            if type(node) in PLAIN or (type(node) is Entry and node.extras is None) or id(node) in seen or is_short_row(node):
                continue
            seen.add(id(node))
            parts = _validate_one(node, keys)
            if not PLAIN.issuperset(map(type, parts)):
                below.extend(parts)
        level = below
    return keys.repeated


def _validate_one(node: Node, keys: _Keys) -> Sequence[Node]:
    if type(node) is Dict:
        if not node.items and node.attributes is None:
            return ()
        node.items = keys.merge(node.items)
        values = [value for _, value in node.items]
        return [*values, node.attributes] if node.attributes is not None else values
    if type(node) is List:
        return node.items
    if type(node) is tuple:
        return node
    if type(node) is Entry and node.extras is not None:
        return [node.extras.hooks, node.extras.metadata, node.extras.state]
    return _validate_object(node, keys) if type(node) is Object else []


def _validate_object(node: Object, keys: _Keys) -> list[Node]:
    below = [node.function, node.args, node.kwargs]
    for step in node.steps:
        if type(step) is SetItems:
            step.pairs = keys.merge(step.pairs)
            below.extend(value for _, value in step.pairs)
        elif type(step) is Append:
            below.extend(step.items)
        else:
            below.append(step.state)
    return below


class _Keys:
    """The keys of all dicts of one tree, as stand-ins that are equal when Python holds the keys equal.

    They hash in linear time without collisions: numbers of 32 bits and more become bytes or text, since Python's own hash of
    such a number lets a file choose thousands of keys that collide. A tuple is looked at once, however many keys it is or is
    part of.

    Attributes:
        repeated: the keys that were set twice, the first thousand.
    """

    def __init__(self) -> None:
        self.repeated: list[str] = []
        self.numbers: dict[tuple[Hashable, ...], int] = {}  # the parts of a tuple -> a number that stands for it
        self.tuples: dict[int, _Tuple] = {}  # by id
        self.parts = 0  # of all keys so far

    def merge(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs with each key once, at its first place with its last value."""
        only_text = all(type(key) is str for key, _ in pairs)
        identities = [key if only_text else self.identity(key) for key, _ in pairs]
        if len(set(identities)) == len(pairs):
            return pairs
        last: dict[Hashable, Pair] = {}
        for identity, (key, value) in zip(identities, pairs, strict=True):
            if identity in last:
                if len(self.repeated) < 1000:
                    self.repeated.append(str(key) if type(key) is str else type(key).__name__)
                key = last[identity][0]
            last[identity] = (key, value)
        return list(last.values())

    def identity(self, key: Node) -> Hashable:
        """The stand-in of a key."""
        if type(key) is int:
            return key if key.bit_length() < _SHORT else _long(key)
        if type(key) is tuple:
            known = self._tuple(key)
            self._spend(known.parts)
            return known.stand_in
        if type(key) in (Dict, List) or (type(key) is Object and key.name in UNHASHABLE):
            raise PickleError("The pickle uses a value as a dict key that Python cannot hash.")
        if type(key) is float:
            if key != key:
                return "id", id(key)
            if not key.is_integer():
                return "f", key.hex()
            key = int(key)
        if type(key) is int or type(key) is bool:
            return int(key) if key.bit_length() < _SHORT else _long(int(key))
        if type(key) is Object:
            self._spend(_elements(key))
        return ("id", id(key)) if type(key) in (Object, Entry) else key

    def _part(self, key: Node) -> Hashable:
        """The stand-in of a part of a tuple: never a number, since Python's hash of several lets a file choose collisions."""
        found = self.identity(key)
        return _long(found) if type(found) is int else found

    def _spend(self, parts: int) -> None:
        self.parts += parts
        limits.PATHS.check(self.parts, "The pickle has dict keys of more parts than any checkpoint.")

    def _tuple(self, root: tuple[Node, ...]) -> _Tuple:
        """What is known of a tuple, worked out for parts before wholes. A deep one is refused: it crashes C pickle."""
        stack = [root]
        while stack:
            node = stack[-1]
            known = id(node) in self.tuples
            waiting = [] if known else [part for part in node if type(part) is tuple and id(part) not in self.tuples]
            stack.extend(waiting)
            if not waiting:
                self._add_tuple(stack.pop())
        return self.tuples[id(root)]

    def _add_tuple(self, node: tuple[Node, ...]) -> None:
        if id(node) in self.tuples:
            return
        inner = [self.tuples[id(part)] for part in node if type(part) is tuple]
        depth = 1 + max((part.depth for part in inner), default=0)
        limits.JSON_DEPTH.check(depth, "The pickle uses tuples nested too deep as a dict key.")
        parts = tuple(self.tuples[id(part)].stand_in if type(part) is tuple else self._part(part) for part in node)
        count = len(node) + sum(part.parts for part in inner)
        self.tuples[id(node)] = _Tuple(node, ("t", self.numbers.setdefault(parts, len(self.numbers))), depth, count)


_SHORT = 32  # bits: of a longer number Python's hash lets a file choose collisions


def _long(number: int) -> Hashable:
    return "n", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


class _Tuple(NamedTuple):
    """What is known about a tuple: itself (kept, so that its id stays its own), its stand-in, depth and number of parts."""

    node: tuple[Node, ...]
    stand_in: Hashable
    depth: int
    parts: int


def _elements(key: Object) -> int:
    """How many elements a frozenset has, or whatever else is made of a list."""
    first = key.args[0] if type(key.args) is tuple and key.args else None
    return len(first.items) if type(first) is List else 1
