"""Nodes of a tree exchanged for others, in place where they have identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Final, TypeAlias

from ckpt_tools.errors import LimitError
from ckpt_tools.tree.nodes import PLAIN, RECORDS, Append, Dict, Entry, Extras, List, Node, Object, Pair, SetItems, Step


class Drop(Enum):
    """What `swap` returns for a record that is to be left out."""

    DROP = "drop"


DROP: Final = Drop.DROP
Swap: TypeAlias = Callable[[Node], Node | Drop]
_MAX_ATTACHED = 50  # tensors in the attributes of tensors, in tuples


def replace(root: Node, swap: Swap, *, values: frozenset[type] = frozenset()) -> Node:
    """Exchange records everywhere, keys and arguments included."""
    return _Exchange(swap, values).run(root)


class _Exchange:
    def __init__(self, swap: Swap, values: frozenset[type]) -> None:
        self.swap = swap
        self.swapped, self.kept = frozenset(RECORDS) | values, PLAIN - values
        # id -> (the old one, kept alive so that its id stays its own; the new one)
        self.done: dict[int, tuple[Node | Drop, Node | Drop]] = {}
        self.pending: list[Dict | List | Object] = []
        self.depth = 0

    def run(self, root: Node) -> Node:
        new = _or_none(self.node(root))
        seen: set[int] = set()
        while self.pending:
            node = self.pending.pop()
            if id(node) not in seen:
                seen.add(id(node))
                _edit(node, self.node, self.kept)
        return new

    def node(self, node: Node) -> Node | Drop:
        if type(node) is not tuple:
            return self.leaf(node)
        return node if self.kept.issuperset(map(type, node)) else _exchange_tuple(node, self.leaf, self.done)

    def leaf(self, node: Node) -> Node | Drop:
        new: Node | Drop = node
        if type(node) in self.swapped:
            if id(node) not in self.done:
                self.record(node)
            new = self.done[id(node)][1]
        if type(new) is Dict or type(new) is List or type(new) is Object:
            self.pending.append(new)
        return new

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
        hooks, state = _or_none(self.node(extras.hooks)), _or_none(self.node(extras.state))
        self.depth -= 1
        return dataclasses.replace(extras, hooks=hooks, state=state)


def _or_none(node: Node | Drop) -> Node:
    """A node, or None in the place of one that is left out."""
    return None if node is DROP else node


def _edit(node: Dict | List | Object, exchange: Swap, kept: frozenset[type]) -> None:
    if type(node) is Dict:
        node.items[:] = _edit_pairs(node.items, exchange, kept)
        if node.attributes is not None:
            attributes = exchange(node.attributes)  # the same Dict, edited in place
            assert type(attributes) is Dict
            node.attributes = attributes
    elif type(node) is List:
        node.items[:] = _edit_list(node.items, exchange, kept)
    else:
        node.function, node.args, node.kwargs = (_or_none(exchange(part)) for part in (node.function, node.args, node.kwargs))
        node.steps[:] = [step for step in node.steps if _edit_step(step, exchange, kept)]


def _edit_step(step: Step, exchange: Swap, kept: frozenset[type]) -> bool:
    """Edit a step of an object; whether it stays."""
    if type(step) is SetItems:
        step.pairs = _edit_pairs(step.pairs, exchange, kept)
    elif type(step) is Append:
        step.items = _edit_list(step.items, exchange, kept)
    else:
        state = exchange(step.state)
        if state is DROP:
            return False
        step.state = state
    return True


def _edit_pairs(pairs: list[Pair], exchange: Swap, kept: frozenset[type]) -> list[Pair]:
    if all(type(key) in kept and type(value) in kept for key, value in pairs):
        return pairs
    edited = ((exchange(key), exchange(value)) for key, value in pairs)
    return [(key, value) for key, value in edited if key is not DROP and value is not DROP]


def _edit_list(items: list[Node], exchange: Swap, kept: frozenset[type]) -> list[Node]:
    if kept.issuperset(map(type, items)):
        return items
    new = [item if type(item) in kept else exchange(item) for item in items]
    return [item for item in new if item is not DROP]


def _exchange_tuple(root: tuple[Node, ...], leaf: Swap, done: dict[int, tuple[Node | Drop, Node | Drop]]) -> Node | Drop:
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
            changed = tuple(map(_or_none, leaves))
            same = all(new is old for new, old in zip(changed, node, strict=True))
            done[id(node)] = (node, node if same else changed)
    return done[id(root)][1]
