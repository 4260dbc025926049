"""What is in a value: numbers of layers, and what has been done with them since."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Gathered(Generic[T]):
    """A set: all items of `base`, and `more`, which are others."""

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


Owner: TypeAlias = Hashable
Words: TypeAlias = frozenset[str]
NO_WORDS: Words = frozenset()


class Feed(NamedTuple):
    """Numbers of a layer (of some of its rows, where that is known) that are in a value, and what has been done with them."""

    owner: Owner
    rows: tuple[int, int] | None
    words: Words


class End(NamedTuple):
    """An input or an output of the model, by its number."""

    side: str
    number: int


class Hidden(NamedTuple):
    """A layer of the model that neither the checkpoint nor the target knows by its name."""

    name: str


class Feeds(NamedTuple):
    """All feeds of a value: those of `start`, each once for every way that its numbers went since."""

    start: Gathered[Feed]
    ways: frozenset[Words] = frozenset([NO_WORDS])

    @property
    def all(self) -> Gathered[Feed]:
        """The feeds, one by one."""
        if self.ways == _AS_IT_IS:
            return self.start
        return self.start.changed(self.ways, self._on_all_ways)

    def _on_all_ways(self, feed: Feed) -> Iterator[Feed]:
        for words in self.ways:
            yield feed._replace(words=feed.words | words)

    def saying(self, *words: str) -> Feeds:
        """The same, with more said of them."""
        return Feeds(self.start, frozenset(way.union(words) for way in self.ways)) if words else self


_AS_IT_IS = frozenset([NO_WORDS])
NO_FEEDS = Feeds(Gathered())


def feeds_of(items: Iterable[Feed]) -> Feeds:
    """Feeds that are there one by one."""
    return Feeds(Gathered(frozenset(items)))


def together(several: Iterable[Feeds]) -> Feeds:
    """All of several feeds."""
    starts: dict[int, tuple[Gathered[Feed], frozenset[Words]]] = {}
    for start, ways in several:
        if start.items:
            starts[id(start)] = start, ways | starts.get(id(start), (start, frozenset()))[1]
    found = [Feeds(*each) for each in starts.values()]
    return found[0] if len(found) == 1 else Feeds(united(feeds.all for feeds in found))


def reaching(feeds: Feeds) -> Gathered[Feed]:
    """What reaches a layer: the model's inputs count where nothing else does (a mask is made of them, too)."""
    found = feeds.all
    return inner if (inner := found.changed("inner", _inner)).items else found.changed("said", lambda feed: [_said(feed)])


def _inner(feed: Feed) -> list[Feed]:
    return [] if isinstance(feed.owner, End) else [_said(feed)]


def _said(feed: Feed) -> Feed:
    """Without what was only to be kept until a softmax."""
    return feed._replace(words=frozenset(word for word in feed.words if not word.startswith("@")))
