"""What is said again once everything is paired: order that other pairs contradict, and lone pairs that nothing supports."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import TypeAlias

from ckpt_tools.matching.blocks import Family
from ckpt_tools.matching.lexicon import numbers, stem
from ckpt_tools.matching.resolve import Counted, UnitPair, meaning
from ckpt_tools.matching.units import Path, Unit

Count: TypeAlias = tuple[int, ...]


def doubtful(pairs: Sequence[UnitPair], olds: Sequence[Unit], news: Sequence[Unit]) -> list[UnitPair]:
    """The pairs that do not stand: they rest on a counting order that others contradict, or on nothing but a shape."""
    broken = _broken(pairs)
    found = [pair for pair in pairs if not broken.isdisjoint(pair.counted)]
    if len(pairs) == len(olds) == len(news):  # with nothing left over on either side, a shape that is there once is enough
        return found
    known = _longest_in_order(pairs) | set(map(id, found))
    return found + [pair for pair in pairs if id(pair) not in known and _stands_alone(pair)]


# --- counting


def _broken(pairs: Sequence[UnitPair]) -> set[Counted]:
    """What was counted that holds two numbered families whose members do not come in one order on both sides."""
    wanted = {counted for pair in pairs for counted in pair.counted}
    crossed = _crossed(_numbers_seen(pairs, wanted)) if wanted else {}
    return {each for each in wanted if any(not each[1].isdisjoint(crossed.get(family, ())) for family in each[0])}


# The numbers under which members of two families, one on each side, are partners.
_Seen: TypeAlias = dict[tuple[Family, Family], set[tuple[Count, Count]]]


def _numbers_seen(pairs: Sequence[UnitPair], wanted: Iterable[Counted]) -> _Seen:
    """The numbers of partners in every two families that were counted beside each other."""
    beside: dict[Family, list[frozenset[Family]]] = defaultdict(list)
    for families, others in wanted:
        for family in families:
            beside[family].append(others)
    seen: _Seen = defaultdict(set)
    for pair in pairs:
        for (family, count), (other, other_count) in product(_members(pair.old.path), _members(pair.new.path)):
            if any(other in others for others in beside.get(family, ())):
                seen[family, other].add((count, other_count))
    return seen


def _crossed(seen: _Seen) -> dict[Family, set[Family]]:
    """Family -> the families of the other side whose members come in another order."""
    crossed: dict[Family, set[Family]] = defaultdict(set)
    for (family, other), counts in seen.items():
        if any(later[1] < earlier[1] for earlier, later in pairwise(sorted(counts))):
            crossed[family].add(other)
    return crossed


def _members(path: Path) -> Iterator[tuple[Family, Count]]:
    """The numbered families that a path goes through, with its number in each."""
    for length, part in enumerate(path):
        if count := numbers(part):
            yield (path[:length], stem(part)), count


# --- support


def _stands_alone(pair: UnitPair) -> bool:
    """Whether a pair rests on nothing but a shape that is there once: not in a block, and no word or concept is shared."""
    if pair.how != "unique" or pair.depth:
        return False
    return not (meaning(pair.old.path) & meaning(pair.new.path) or set(pair.old.path) & set(pair.new.path))


def _longest_in_order(pairs: Iterable[UnitPair]) -> set[int]:
    """The ids of the longest run of pairs that both sides register in the same order."""
    ordered = sorted(pairs, key=lambda pair: pair.new.index)
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for number, pair in enumerate(ordered):
        at = bisect_left(tails, pair.old.index)
        tails[at : at + 1], ends[at : at + 1] = [pair.old.index], [number]
        before.append(ends[at - 1] if at else -1)
    found, number = set(), ends[-1] if ends else -1
    while number >= 0:
        found.add(id(ordered[number]))
        number = before[number]
    return found
