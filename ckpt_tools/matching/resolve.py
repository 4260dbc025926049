"""Tell apart what has one shape: by what names say, then by order where both sides say that the order means something."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, TypeAlias

from ckpt_tools.matching.blocks import Block, Family
from ckpt_tools.matching.lexicon import QKV, concepts, numbers, rank, sharpened, stem
from ckpt_tools.matching.units import Path, Unit

Item: TypeAlias = Unit | Block
How: TypeAlias = Literal["unique", "names", "order", "graph"]
Feature: TypeAlias = frozenset[tuple[str, str]]

_EXCLUSIVE = ("attention part", "token", "gated", "embedding", "sublayer", "end")
_CONCEPT, _CONFLICT = 4, 6
# Pairs of groups of items of one kind. No model has names that mean so many things; all would be compared with all again and
# again.
_MOST_SCORES = 10_000


# Families of the two sides, each of which was counted beside each of the other: their product can be too large to write down.
Counted: TypeAlias = tuple[frozenset[Family], frozenset[Family]]


@dataclass(frozen=True, slots=True)
class ItemPair:
    """Two items that are one, and how that was found; `counted` are the numbered families that their order rests on."""

    old: Item
    new: Item
    how: How
    counted: frozenset[Counted] = frozenset()
    open: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class UnitPair:
    """Two units that are one; `depth` is how many blocks they are in, `counted` includes what those rest on."""

    old: Unit
    new: Unit
    how: How
    depth: int
    counted: frozenset[Counted]


@dataclass(frozen=True, slots=True)
class Context:
    """Where items are compared: below two paths that are known to be partners (their lengths), on two sides."""

    depths: tuple[int, int]
    families: tuple[dict[Family, bool], dict[Family, bool]]
    whole: tuple[set[Path], set[Path]]
    counted: frozenset[Counted] = frozenset()
    level: int = 0
    open: frozenset[int] = frozenset()

    def below(self, pair: ItemPair) -> Context:
        """The context of two blocks that are partners."""
        depths = (len(pair.old.path), len(pair.new.path))
        counted, left_open = self.counted | pair.counted, self.open | pair.open
        return Context(depths, self.families, self.whole, counted, self.level + 1, left_open)

    def unit_pair(self, pair: ItemPair) -> UnitPair:
        """Two units that are partners here."""
        assert isinstance(pair.old, Unit)
        assert isinstance(pair.new, Unit)
        return UnitPair(pair.old, pair.new, pair.how, self.level, self.counted | pair.counted)


def meaning(path: Path) -> Feature:
    """The concepts of a path, with those that sharper ones explain left out."""
    return sharpened(frozenset().union(*map(concepts, path)))


def conflicts(one: Feature, other: Feature) -> int:
    """In how many groups of concepts the two say different things."""
    count = 0
    norms = ("kind", "norm") in one & other  # the last norm is the head's here and the pooler's there
    for group in _EXCLUSIVE[:-1] if norms else _EXCLUSIVE:
        mine, theirs = ({concept for g, concept in feature if g == group} for feature in (one, other))
        count += bool(mine and theirs and not mine & theirs)
    return count


def resolve(olds: Sequence[Item], news: Sequence[Item], context: Context) -> list[ItemPair]:
    """Pairs among items of one kind: those that are certain. The others stay undecided."""
    depth_old, depth_new = context.depths
    if not olds or not news:
        return []
    if len(olds) == len(news) == 1:
        clash = conflicts(meaning(olds[0].path[depth_old:]), meaning(news[0].path[depth_new:]))
        return [] if clash else [ItemPair(olds[0], news[0], "unique")]
    groups = _Groups(olds, news, context)
    if groups.comparisons > _MOST_SCORES:
        return []
    groups.compare()
    pairs: list[ItemPair] = []
    while found := groups.next_pair():
        own, others = found
        if len(own) == len(others) == 1:
            pairs.append(ItemPair(own[0], others[0], "names"))
        else:
            pairs += in_order(own, others, context)
    return pairs


_OLD, _NEW = 0, 1  # the two sides


class _Groups:
    """Items of both sides in groups of equal features, and how well the groups go together."""

    def __init__(self, olds: Sequence[Item], news: Sequence[Item], context: Context) -> None:
        self.equal = len(olds) == len(news)
        features = [
            [meaning(item.path[depth:]) for item in items] for items, depth in zip((olds, news), context.depths, strict=True)
        ]
        self.telling = frozenset.intersection(*map(_telling, features))
        self.sides = (_grouped(olds, features[_OLD], self.telling), _grouped(news, features[_NEW], self.telling))
        self.scores: dict[tuple[Feature, Feature], int] = {}

    @property
    def comparisons(self) -> int:
        """How many scores there are to work out."""
        return len(self.sides[_OLD]) * len(self.sides[_NEW])

    def compare(self) -> None:
        """Work out how well each group goes with each of the other side."""
        self.scores = {(a, b): _score(a, b, self.telling) for a, b in product(*self.sides)}

    def best(self, side: int, feature: Feature) -> tuple[int, set[Feature]]:
        """The best score of a group of one side, and the groups of the other side that reach it."""
        scores = {
            other: self.scores[(feature, other) if side == _OLD else (other, feature)] for other in self.sides[_NEW - side]
        }
        top = max(scores.values())
        return top, {other for other, score in scores.items() if score == top}

    def next_pair(self) -> tuple[list[Item], list[Item]] | None:
        """The items of the next groups that belong together, which are taken out; None where none are certain."""
        if not all(self.sides):
            return None
        found = next(self._mutual(), None) or (next(self._tied(), None) if self.equal else None)
        return None if found is None else (self._take(_OLD, found[_OLD]), self._take(_NEW, found[_NEW]))

    def _mutual(self) -> Iterator[tuple[set[Feature], set[Feature]]]:
        """Two groups of one size that prefer each other to all else; by a shared meaning, or since nothing else is left."""
        least = 0 if self.equal and self.comparisons == 1 else 1
        for old in self.sides[_OLD]:
            score, news = self.best(_OLD, old)
            if len(news) == 1 and score >= least and self._prefer(_NEW, news, {old}) and self._as_many({old}, news):
                yield {old}, news

    def _tied(self) -> Iterator[tuple[set[Feature], set[Feature]]]:
        """Groups that are all equally good for one another, and for no others."""
        for start in self.sides[_OLD]:
            score, news = self.best(_OLD, start)
            olds = set().union(*(self.best(_NEW, new)[1] for new in news))
            closed = all(self.best(_OLD, old) == (score, news) for old in olds) and self._prefer(_NEW, news, olds)
            if closed and score >= 0 and self._as_many(olds, news):
                yield olds, news

    def _prefer(self, side: int, features: set[Feature], others: set[Feature]) -> bool:
        """Whether all of these groups go best with just those of the other side."""
        return all(self.best(side, feature)[1] == others for feature in features)

    def _as_many(self, olds: set[Feature], news: set[Feature]) -> bool:
        """Whether the groups of both sides hold as many items."""
        count = [sum(len(self.sides[side][feature]) for feature in features) for side, features in ((_OLD, olds), (_NEW, news))]
        return count[_OLD] == count[_NEW]

    def _take(self, side: int, features: set[Feature]) -> list[Item]:
        """Remove groups of one side; their items in order of registration."""
        return sorted((item for feature in features for item in self.sides[side].pop(feature)), key=_index)


def _index(item: Item) -> int:
    return item.index


def _telling(features: list[Feature]) -> Feature:
    """What some of them have and others do not; concepts that exclude others always count."""
    some = frozenset().union(*features)
    everywhere = frozenset.intersection(*features)
    return some - everywhere


def _grouped(items: Sequence[Item], features: list[Feature], telling: Feature) -> dict[Feature, list[Item]]:
    groups: dict[Feature, list[Item]] = defaultdict(list)
    for item, feature in zip(items, features, strict=True):
        exclusive = {pair for pair in feature if pair[0] in _EXCLUSIVE}
        groups[(feature & telling) | exclusive].append(item)
    return groups


def _score(one: Feature, other: Feature, telling: Feature) -> int:
    return _CONCEPT * len(one & other & telling) - _CONFLICT * conflicts(one, other)


# --- order


def in_order(olds: Sequence[Item], news: Sequence[Item], context: Context) -> list[ItemPair]:
    """Items paired in the order of registration, if both sides say that this order is one; else none."""
    depth_old, depth_new = context.depths
    if _may_be_parallel(olds) or _may_be_parallel(news):
        return []
    if any(meaning(item.path[depth:]) & QKV for items, depth in ((olds, depth_old), (news, depth_new)) for item in items):
        return []
    supported = all(
        _is_ordered(items, depth, families)
        for items, depth, families in zip((olds, news), context.depths, context.families, strict=True)
    )
    counted = frozenset([(_families(olds, depth_old), _families(news, depth_new))])
    return [ItemPair(old, new, "order", counted) for old, new in zip(olds, news, strict=True)] if supported else []


def _families(items: Sequence[Item], depth: int) -> frozenset[Family]:
    """The numbered families that the order of the items rests on."""
    return frozenset(
        (one.path[:at], stem(one.path[at]))
        for one, other in pairwise(items)
        if (at := _split(one.path, other.path, depth)) is not None and stem(one.path[at]) == stem(other.path[at])
    )


def _split(one: Path, other: Path, depth: int) -> int | None:
    """Where two paths part."""
    return next((at for at in range(depth, min(len(one), len(other))) if one[at] != other[at]), None)


def _may_be_parallel(items: Sequence[Item]) -> bool:
    """Three square matrices and more in an attention are q, k, v ... in an order of its author's."""
    first = items[0]
    shape = first.shapes.get("weight", ()) if isinstance(first, Unit) else ()
    square = len(shape) == 2 and shape[0] == shape[1] and len(items) > 2
    return square and any(("sublayer", "attention") in meaning(item.path) for item in items)


def _is_ordered(items: Sequence[Item], depth: int, families: dict[Family, bool]) -> bool:
    return all(comes_before(one.path, other.path, depth, families) for one, other in pairwise(items))


def comes_before(one: Path, other: Path, depth: int, families: dict[Family, bool]) -> bool:
    """Whether names say that the first comes before the second: by numbers that count up, or by words with an order."""
    split = _split(one, other, depth)
    if split is None:
        return False
    a, b = one[split], other[split]
    if stem(a) == stem(b):
        return numbers(a) < numbers(b) and families.get((one[:split], stem(a)), False)
    ranks = rank(a), rank(b)
    return ranks[0] is not None and ranks[1] is not None and ranks[0] < ranks[1]
