"""Nodes of a tree exchanged for others, in place where they have identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt_tools.errors import LimitError

if TYPE_CHECKING:
    pass
from ckpt_tools.tree.nodes import (
    PLAIN,
    RECORDS,
    Dict,
    Entry,
    Extras,
    List,
    Node,
    Object,
)


class _Drop:
    """What `swap` returns for a record that is to be left out."""


DROP = _Drop()
_MAX_ATTACHED = 50  # tensors in the attributes of tensors, in tuples


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
