"""Dict keys and set elements that are objects: their plain form must be hashable, and different from every other key."""

from __future__ import annotations

from collections.abc import Hashable

from ckpt_tools import limits
from ckpt_tools.tree import visit
from ckpt_tools.tree.exchange import DROP, Drop, Swap
from ckpt_tools.tree.nodes import (
    Dict,
    Global,
    List,
    Node,
    Object,
    Pair,
    SetItems,
)

_SETS = ("builtins.set", "builtins.frozenset")
_SIMPLE = frozenset((type(None), bool, int, float, str, bytes))
_HASHABLE = ("builtins.complex", "torch.Size", "torch.device")
_MAX_DEPTH = 100
_COST_OF_PART = 8  # each is made plain, compared and hashed


def plain_keys(root: Node, plain: Swap, simple: frozenset[type] = _SIMPLE) -> list[tuple[Node, Node]]:
    """Make the keys of dicts and the elements of sets plain, in place."""
    keys = _Keys(plain, simple)
    for node in list(visit.reachable(root)):
        if type(node) is Dict:
            keys.edit(node.items)
        elif type(node) is Object:
            for pairs in [step.pairs for step in node.steps if type(step) is SetItems]:
                keys.edit(pairs)
            if node.name in _SETS:
                keys.edit_set(node)
    return keys.changed


class _Keys:
    def __init__(self, plain: Swap, simple: frozenset[type]) -> None:
        self.plain, self.simple = plain, simple
        self.changed: list[tuple[Node, Node]] = []
        self.parts = 0

    def edit_set(self, node: Object) -> None:
        pairs: list[Pair] = [(item, None) for item in _elements(node)]
        self.edit(pairs)
        node.args = (List([key for key, _ in pairs]),)

    def edit(self, pairs: list[Pair]) -> None:
        """The keys of one dict. Simple keys stay; whatever comes to be beside them has to differ."""
        if self.simple.issuperset(type(key) for key, _ in pairs):
            return
        taken = {_identity(key) for key, _ in pairs if type(key) in self.simple}
        numbers: dict[str, int] = {}
        for index, (key, value) in enumerate(pairs):
            if type(key) in self.simple:
                continue
            new = self.key(key, 0)
            if new is DROP or _identity(new) in taken:
                new = _free_name(key, taken, numbers)
                self.changed.append((key, new))
            taken.add(_identity(new))
            pairs[index] = (new, value)

    def key(self, node: Node, depth: int) -> Node | Drop:
        """The plain form of a key; DROP where none can be hashed."""
        if type(node) is tuple:
            return self.tuple(node, depth)
        if type(node) is bytes and bytes not in self.simple:
            text = node.decode("latin1")
            self.changed.append((node, text))
            return text
        if type(node) is not Object and type(node) is not Global:
            return DROP if type(node) in (Dict, List) else node
        new = _elements(node) if type(node) is Object and node.name == "builtins.frozenset" else self.plain(node)
        new = self.tuple(new, depth) if type(new) is tuple else new
        if new is DROP or type(new) in (Dict, List) or (type(new) is Object and new.name not in _HASHABLE):
            return DROP
        if new is not node:
            self.changed.append((node, new))
        return new

    def tuple(self, node: tuple[Node, ...], depth: int) -> Node | Drop:
        if depth > _MAX_DEPTH:
            return DROP
        self.parts += _COST_OF_PART * len(node)  # of a set in sets that each hold the next one twice there is no end
        limits.PATHS.check(self.parts, "The checkpoint has dict keys of more parts than any other.")
        parts = [self.key(part, depth + 1) for part in node]
        hashable = tuple(part for part in parts if part is not DROP)
        return hashable if len(hashable) == len(parts) else DROP


def _elements(node: Object) -> tuple[Node, ...]:
    """The elements of a set."""
    args = node.args
    return tuple(args[0].items) if type(args) is tuple and args and type(args[0]) is List else ()


def _free_name(key: Node, taken: set[Hashable], numbers: dict[str, int]) -> str:
    """The name of a key's class, with a number where that is taken."""
    name = text = _class_name(key)
    while text in taken:
        numbers[name] = numbers.get(name, 1) + 1
        text = f"{name} {numbers[name]}"
    return text


def _identity(key: Node) -> Hashable:
    """Equal for keys that Python holds equal. Numbers as text: a file could choose numbers whose hashes collide."""
    if type(key) is tuple:
        return tuple(map(_identity, key))
    if type(key) is bool or type(key) is int or (type(key) is float and key.is_integer()):
        return "n", hex(int(key))
    return key if type(key) in _SIMPLE else id(key)


def _class_name(key: Node) -> str:
    if type(key) is bytes:
        return key.decode("latin1")
    return key.name if type(key) is Object else str(key) if type(key) is Global else "tuple"
