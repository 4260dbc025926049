"""The structural stage: leaf modules aligned by shape, by the blocks that they are in, by names, and by order.

Two implementations of one network have the same leaf modules under other names, in nearly the same order. The alignment goes
from large to small: blocks that hold the same kinds of units and can be no others are partners; what is inside is compared
inside only. What has one shape is told apart by `resolve`. Whatever stays undecided is ambiguous, never chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TypeAlias

from ckpt_tools.matching.blocks import Block, Family, Key, blocks_of, families_of, whole_paths
from ckpt_tools.matching.lexicon import end_of, numbers, stem
from ckpt_tools.matching.resolve import Context, Counted, ItemPair, UnitPair, comes_before, meaning, resolve
from ckpt_tools.matching.units import Path, Signature, Unit

_MOST_ROUNDS, _MOST_UNITS = 100, 2_000_000


@dataclass(slots=True)
class Alignment:
    """Pairs of units, and what could not be decided: units of the target with their candidates."""

    pairs: list[UnitPair]
    undecided: list[tuple[list[Unit], list[Unit]]]


def set_kinds(olds: Sequence[Unit], news: Sequence[Unit]) -> None:
    """Number the signatures. Where the sides do not have one equally often, sizes of 1 are left out of it."""
    counts = [Counter(unit.signature for unit in units) for units in (olds, news)]

    def signature(unit: Unit) -> tuple[bool, Signature]:
        exact = unit.signature
        even = counts[0][exact] == counts[1][exact]
        return even, exact if even else unit.loose

    signatures = [[signature(unit) for unit in units] for units in (olds, news)]
    shared = {found: number for number, found in enumerate(set(signatures[0]) & set(signatures[1]))}
    for units, found in zip((olds, news), signatures, strict=True):
        for unit, each in zip(units, found, strict=True):
            unit.kind = shared.get(each, -1)


def align(olds: Sequence[Unit], news: Sequence[Unit]) -> Alignment:
    """Align the units of two sides."""
    set_kinds(olds, news)
    alignment = Alignment([], [])
    start = Context((0, 0), (families_of(olds), families_of(news)), (whole_paths(olds), whole_paths(news)))
    pending = [(list(olds), list(news), start)]
    while pending:
        left, right, context = pending.pop()
        left_open = context.open | _uneven(left, right)
        for pair in _pair_blocks(left, right, context):
            assert isinstance(pair.old, Block)
            assert isinstance(pair.new, Block)
            pending.append((list(pair.old.units), list(pair.new.units), context.below(pair)))
        _pair_units(left, right, replace(context, open=left_open), alignment)
    _follow(alignment, Anchors(olds, news))
    take_back(alignment, doubtful(alignment.pairs, olds, news))
    return alignment


def _uneven(left: list[Unit], right: list[Unit]) -> frozenset[int]:
    """The kinds that one side has more of: one that is left when blocks are taken out may be another than the other side's."""
    counts = [Counter(unit.kind for unit in units) for units in (left, right)]
    return frozenset(kind for kind in counts[0].keys() | counts[1].keys() if counts[0][kind] != counts[1][kind])


def _follow(alignment: Alignment, anchors: Anchors) -> None:
    """Decide batch norms by the layers that they follow, and doubt pairs of them that follow different ones."""
    for pair in alignment.pairs:
        anchors.add(pair)
    undecided, alignment.undecided = alignment.undecided, []
    take_back(alignment, [pair for pair in alignment.pairs if anchors.agree(pair.old, pair.new) is False])
    for olds, news in undecided:
        found = list(anchors.agreeing(olds, news))
        alignment.pairs += [UnitPair(old, new, "names", 1, anchors.rests_on(old)) for old, new in found]
        gone = {id(unit) for pair in found for unit in pair}
        rest = tuple([unit for unit in units if id(unit) not in gone] for units in (olds, news))
        if all(rest):
            alignment.undecided.append((rest[0], rest[1]))


def take_back(alignment: Alignment, pairs: list[UnitPair]) -> None:
    """Pairs that do not stand become undecided."""
    gone = set(map(id, pairs))
    alignment.pairs = [pair for pair in alignment.pairs if id(pair) not in gone]
    alignment.undecided += [([pair.old], [pair.new]) for pair in pairs]


# --- blocks


def _pair_blocks(left: list[Unit], right: list[Unit], context: Context) -> list[ItemPair]:
    """Blocks that are partners, the largest first; their units are taken out of the two lists."""
    found: list[ItemPair] = []
    effort = max(_MOST_UNITS, _MOST_ROUNDS * (len(left) + len(right)))
    while effort > 0 and (pairs := _next_blocks(left, right, context)):
        effort -= len(left) + len(right)
        gone = {id(unit) for pair in pairs for block in (pair.old, pair.new) for unit in block.units}  # type: ignore[union-attr]
        left[:] = [unit for unit in left if id(unit) not in gone]
        right[:] = [unit for unit in right if id(unit) not in gone]
        found += pairs
    return found


def _next_blocks(left: list[Unit], right: list[Unit], context: Context) -> list[ItemPair]:
    """The largest blocks that are partners; kinds of units that one side has more of count only at first."""
    totals = [Counter(unit.kind for unit in units if unit.kind >= 0) for units in (left, right)]
    even = {kind for kind, count in totals[0].items() if totals[1][kind] == count}
    for counted in (totals[0].keys() | totals[1].keys(), even):
        olds, news = (
            blocks_of(units, depth, counted, whole)
            for units, depth, whole in zip((left, right), context.depths, context.whole, strict=True)
        )
        shared = [key for key in olds.keys() & news.keys() if key]
        for key in sorted(shared, key=lambda key: (-sum(count for _, count in key), min(block.index for block in news[key]))):
            count = len(olds[key])
            if count != len(news[key]) or not _is_anchored(key, count, totals):
                continue
            if _places(olds[key], left, even) != _places(news[key], right, even):
                continue
            if pairs := resolve(olds[key], news[key], context):
                kinds = frozenset(kind for kind, _ in key if count == 1 and kind not in even)
                return [replace(pair, open=kinds) for pair in pairs]
    return []


def _is_anchored(key: Key, blocks: int, totals: list[Counter[int]]) -> bool:
    """Whether some kind of unit is nowhere but in these blocks, on both sides: then these blocks are each other's partners."""
    return any(all(total[kind] == blocks * count for total in totals) for kind, count in key)


def _places(blocks: list[Block], units: list[Unit], even: set[int]) -> Counter[tuple[int, str]]:
    """How many units of the blocks' kinds, of those that both sides have as many of, lie before, between and behind them."""
    kinds = {unit.kind for block in blocks for unit in block.units} & even
    inside = {id(unit) for block in blocks for unit in block.units}
    first, last = min(block.index for block in blocks), max(block.index for block in blocks)
    places: Counter[tuple[int, str]] = Counter()
    for unit in units:
        if unit.kind in kinds and id(unit) not in inside:
            said = end_of(unit.path)
            places[unit.kind, said or ("before" if unit.index < first else "behind" if unit.index > last else "between")] += 1
    return places


# --- units


def _pair_units(left: list[Unit], right: list[Unit], context: Context, alignment: Alignment) -> None:
    """What blocks leave: kinds of units one by one; norms by the layer that they follow."""
    kinds: dict[int, tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for side, units in enumerate((left, right)):
        for unit in units:
            if unit.kind >= 0:
                kinds[unit.kind][side].append(unit)
    for olds, news in kinds.values():
        pairs = resolve(olds, news, context)
        if olds and olds[0].kind in context.open:
            pairs = [pair for pair in pairs if pair.how != "unique"]
        alignment.pairs += map(context.unit_pair, pairs)
        gone = {id(unit) for pair in pairs for unit in (pair.old, pair.new)}
        rest = [[unit for unit in units if id(unit) not in gone] for units in (olds, news)]
        if all(rest):
            alignment.undecided.append((rest[0], rest[1]))


def followed(units: Sequence[Unit]) -> dict[int, Unit]:
    """Batch norms (by id) -> the layer registered right before, when its outputs are as many; for kinds where all have one."""
    found: dict[int, Unit] = {}
    broken: set[int] = set()
    families = families_of(units)
    norms = ((before, unit) for before, unit in pairwise([None, *units]) if unit is not None and "variance" in unit.roles)
    for before, unit in norms:
        if before is not None and _follows(before, unit, families):
            found[id(unit)] = before
        else:
            broken.add(unit.kind)
    return {id(unit): found[id(unit)] for unit in units if id(unit) in found and unit.kind not in broken}


def _follows(layer: Unit, norm: Unit, families: dict[Family, bool]) -> bool:
    weight = layer.shapes.get("weight", ())
    said = ("kind", "norm") in meaning(norm.path) or comes_before(layer.path, norm.path, 0, families)
    return said and len(weight) > 1 and norm.shapes["variance"] == weight[:1]


class Anchors:
    """The layers before the batch norms of both sides, and what is known about those layers."""

    def __init__(self, olds: Sequence[Unit], news: Sequence[Unit]) -> None:
        self.before = followed(olds), followed(news)
        self.pairs: dict[int, UnitPair] = {}

    def add(self, pair: UnitPair) -> None:
        """Two units are partners."""
        self.pairs[id(pair.old)] = pair

    def agree(self, old: Unit, new: Unit) -> bool | None:
        """Whether the layers before two batch norms are partners; None where that is not known."""
        one, other = self.before[0].get(id(old)), self.before[1].get(id(new))
        if one is None or other is None or id(one) not in self.pairs:
            return None
        return self.pairs[id(one)].new is other

    def agreeing(self, olds: Sequence[Unit], news: Sequence[Unit]) -> Iterator[tuple[Unit, Unit]]:
        """All pairs of batch norms that are known to follow partners."""
        behind: dict[int, list[Unit]] = defaultdict(list)
        for new in news:
            if (layer := self.before[1].get(id(new))) is not None:
                behind[id(layer)].append(new)
        for old in olds:
            layer = self.before[0].get(id(old))
            if layer is not None and id(layer) in self.pairs:
                yield from ((old, new) for new in behind.get(id(self.pairs[id(layer)].new), ()))

    def rests_on(self, old: Unit) -> frozenset[Counted]:
        """The counted families that the pair of the layer before rests on."""
        return self.pairs[id(self.before[0][id(old)])].counted


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
