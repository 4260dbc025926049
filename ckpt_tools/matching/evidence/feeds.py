"""What is in a value: numbers of layers, and what has been done with them since."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from ckpt_tools.matching.evidence.gathered import Gathered, united

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
    """All feeds of a value: those of `start`, each once for every way that its numbers went since.

    A norm that is written out takes the numbers of a stream several ways. What is made of the stream is then made once for
    all of its depths.
    """

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
