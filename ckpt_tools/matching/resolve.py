"""Items of one shape: told apart by what names say, then by order where both sides say that the order means something."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from operator import attrgetter
from typing import Generic, Literal, TypeAlias, TypeVar

from ckpt_tools.matching.lexicon import LETTER, concepts, numbers, rank, sharpened, stem
from ckpt_tools.matching.units import Path, Unit

Meaning: TypeAlias = frozenset[tuple[str, str]]
Family: TypeAlias = tuple[Path, str]  # numbered siblings: the path above, the name without number
# Families of the two sides, each of which was counted beside each of the other: their product can be too large to write down.
Counted: TypeAlias = tuple[frozenset[Family], frozenset[Family]]


@dataclass(frozen=True, slots=True)
class Block:
    """The units below a path; `index` is the place of the first in the order of registration."""

    index: int
    path: Path
    units: tuple[Unit, ...]


Item: TypeAlias = Unit | Block


def above(path: Path, depth: int = 0) -> Iterator[Path]:
    return (path[:length] for length in range(depth + 1, len(path) + 1))


def families_of(units: Iterable[Unit]) -> dict[Family, bool]:
    """Numbered siblings -> whether they are registered in counting order; letters must be a, b, c, or they are names."""
    seen: dict[Family, list[tuple[int, ...]]] = defaultdict(list)
    for path in dict.fromkeys(path for unit in units for path in above(unit.path)):
        seen[path[:-1], stem(path[-1])].append(numbers(path[-1]))
    return {
        family: all(one < other for one, other in pairwise(row))
        and (family[1] != LETTER or (len(row) > 2 and sorted(row) == [(n,) for n in range(1, len(row) + 1)]))
        for family, row in seen.items()
    }


How: TypeAlias = Literal["unique", "names", "order", "graph"]
_EXCLUSIVE = ("attention part", "token", "gated", "embedding", "sublayer", "end")
_CONCEPT, _CONFLICT = 4, 6
# Pairs of groups of items of one kind. No model has names that mean so many things; all would be compared with all again and
# again.
_MOST_SCORES = 10_000


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True, eq=False)
class Pair(Generic[T]):
    """Two items that are one, and how that was found.

    `counted` are the numbered families that their order rests on.
    """

    old: T
    new: T
    how: How
    counted: frozenset[Counted] = frozenset()
    open: frozenset[int] = frozenset()


UnitPair: TypeAlias = Pair[Unit]


@dataclass(frozen=True, slots=True)
class Context:
    """Where items are compared: below two paths that are known to be partners (their lengths), on two sides."""

    depths: tuple[int, int]
    families: tuple[dict[Family, bool], dict[Family, bool]]
    counted: frozenset[Counted] = frozenset()
    open: frozenset[int] = frozenset()


def meaning(path: Path) -> Meaning:
    """The concepts of a path, with those that sharper ones explain left out."""
    return sharpened(frozenset().union(*map(concepts, path)))


def conflicts(one: Meaning, other: Meaning) -> int:
    """In how many groups of concepts the two say different things."""
    count = 0
    norms = ("kind", "norm") in one & other  # the last norm is the head's here and the pooler's there
    for group in _EXCLUSIVE[:-1] if norms else _EXCLUSIVE:
        mine, theirs = ({concept for g, concept in said if g == group} for said in (one, other))
        count += bool(mine and theirs and not mine & theirs)
    return count


def resolve(olds: Sequence[T], news: Sequence[T], context: Context) -> list[Pair[T]]:
    """Pairs among items of one kind: those that are certain. The others stay undecided."""
    if not olds or not news:
        return []
    sides = [[meaning(item.path[at:]) for item in items] for items, at in zip((olds, news), context.depths, strict=True)]
    if len(olds) == len(news) == 1:
        return [] if conflicts(sides[0][0], sides[1][0]) else [Pair(olds[0], news[0], "unique")]
    # what some of them have and others do not; concepts that exclude others always count
    telling = frozenset.intersection(*(frozenset().union(*side) - frozenset.intersection(*side) for side in sides))
    groups: list[dict[Meaning, list[T]]] = [defaultdict(list), defaultdict(list)]
    for group, items, side in zip(groups, (olds, news), sides, strict=True):
        for item, said in zip(items, side, strict=True):
            group[frozenset(pair for pair in said if pair in telling or pair[0] in _EXCLUSIVE)].append(item)
    if len(groups[0]) * len(groups[1]) > _MOST_SCORES:
        return []
    scores = {
        (one, other): _CONCEPT * len(one & other & telling) - _CONFLICT * conflicts(one, other)
        for one, other in product(*groups)
    }
    pairs: list[Pair[T]] = []
    while found := _mutual(groups, scores, equal=len(olds) == len(news)):
        own, others = (sorted(group.pop(said), key=attrgetter("index")) for group, said in zip(groups, found, strict=True))
        pairs += [Pair(own[0], others[0], "names")] if len(own) == 1 else _in_order(own, others, context)
    return pairs


def _mutual(
    groups: Sequence[Mapping[Meaning, Sequence[Item]]], scores: Mapping[tuple[Meaning, Meaning], int], *, equal: bool
) -> tuple[Meaning, Meaning] | None:  # fmt: skip
    """Two groups of one size that prefer each other to all else; by a shared meaning, or since nothing else is left."""
    olds, news = groups
    least = 0 if equal and len(olds) == len(news) == 1 else 1
    for old in olds if news else ():
        best = max(scores[old, new] for new in news)
        liked = [new for new in news if scores[old, new] == best]
        if len(liked) == 1 and best >= least and len(olds[old]) == len(news[liked[0]]):
            most = max(scores[other, liked[0]] for other in olds)
            if [other for other in olds if scores[other, liked[0]] == most] == [old]:
                return old, liked[0]
    return None


def _in_order(olds: Sequence[T], news: Sequence[T], context: Context) -> list[Pair[T]]:
    """Items paired in the order of registration, if both sides say that this order is one; else none."""
    families: list[frozenset[Family]] = []
    for items, depth, known in zip((olds, news), context.depths, context.families, strict=True):
        shape = items[0].shapes.get("weight", ()) if isinstance(items[0], Unit) else ()
        said = [meaning(item.path) for item in items]
        # three square matrices and more in an attention are q, k, v ... in an order of its author's
        are_parts = len(shape) == 2 and shape[0] == shape[1] and len(items) > 2
        if are_parts and any(("sublayer", "attention") in one for one in said):
            return []
        counts = all(comes_before(one.path, other.path, depth, known) for one, other in pairwise(items))
        if not counts:
            return []
        parting = [(one.path, other.path, _split(one.path, other.path, depth) or 0) for one, other in pairwise(items)]
        families.append(frozenset((one[:at], stem(one[at])) for one, other, at in parting if stem(one[at]) == stem(other[at])))
    counted = frozenset([(families[0], families[1])])
    return [Pair(old, new, "order", counted) for old, new in zip(olds, news, strict=True)]


def _split(one: Path, other: Path, depth: int) -> int | None:
    return next((at for at in range(depth, min(len(one), len(other))) if one[at] != other[at]), None)


def comes_before(one: Path, other: Path, depth: int, families: Mapping[Family, bool]) -> bool:
    """Whether names say that the first comes before the second: by numbers that count up, or by words with an order."""
    split = _split(one, other, depth)
    if split is None:
        return False
    a, b = one[split], other[split]
    if stem(a) == stem(b):
        return numbers(a) < numbers(b) and families.get((one[:split], stem(a)), False)
    ranks = rank(a), rank(b)
    return ranks[0] is not None and ranks[1] is not None and ranks[0] < ranks[1]
