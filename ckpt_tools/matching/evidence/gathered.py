"""Sets that grow by a few items at a time, as what is in a residual stream: what is worked out of one is kept for all that
it grows into, so that work and edges grow with the depth of a network, and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Gathered(Generic[T]):
    """A set: all items of `base`, and `more`, which are others.

    Attributes:
        items: all of them.
    """

    __slots__ = ("_made", "base", "items", "more")

    def __init__(self, more: frozenset[T] = frozenset(), base: Gathered[T] | None = None) -> None:
        self.base, self.more = base, more
        self.items: frozenset[T] = more if base is None else base.items | more
        self._made: dict[Hashable, Gathered[Any]] = {}

    def with_more(self, items: frozenset[T]) -> Gathered[T]:
        """The same and others; itself where there are none."""
        more = items - self.items
        if not more:
            return self
        return Gathered(more, self) if self.items else Gathered(more)

    def changed(self, key: Hashable, change: Callable[[T], Iterable[Any]]) -> Gathered[Any]:
        """What `change` makes of each item. One key stands for one change: what it made of a base is not made again."""
        if not self.items:
            return self
        todo: list[Gathered[Any]] = []
        at: Gathered[Any] | None = self
        while at is not None and key not in at._made:
            todo.append(at)
            at = at.base
        made = None if at is None else at._made[key]
        for each in reversed(todo):
            new = frozenset(one for item in each.more for one in change(item))
            same = made is each.base and new == each.more
            made = each if same else Gathered(new) if made is None else made.with_more(new)
            each._made[key] = made
        assert made is not None
        return made


def united(several: Iterable[Gathered[T]]) -> Gathered[T]:
    """The items of all: those of the largest, and of the others what it lacks."""
    largest, *others = sorted(several, key=lambda one: -len(one.items)) or [Gathered()]
    return largest.with_more(frozenset().union(*(one.items for one in others))) if others else largest
