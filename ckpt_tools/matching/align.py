"""Leaf modules aligned by shape, by the blocks that they are in, by what names mean, and by order.

Two implementations of one network have the same leaf modules under other names, in nearly the same order. The alignment goes
from large to small: blocks that hold the same kinds of units and can be no others are partners; what is inside is compared
inside only. What has one shape is told apart by `resolve`. Whatever stays undecided is ambiguous, never chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import TypeAlias

from ckpt_tools.matching.lexicon import numbers, stem
from ckpt_tools.matching.resolve import (
    Block,
    Context,
    Counted,
    Family,
    Pair,
    UnitPair,
    above,
    comes_before,
    families_of,
    meaning,
    resolve,
)
from ckpt_tools.matching.units import Path, Signature, Unit

# --- blocks: what lies below one module path


_Key: TypeAlias = frozenset[tuple[int, int]]  # kinds of units, and how many of each


def _blocks_of(units: Sequence[Unit], depth: int, counted: Collection[int]) -> dict[_Key, list[Block]]:
    """The blocks of two units and more below a module path of this depth, by key; not the whole itself."""
    below: dict[Path, list[Unit]] = defaultdict(list)
    for unit in units:
        for path in above(unit.path, depth):
            below[path].append(unit)
    found: dict[_Key, list[Block]] = defaultdict(list)
    for path, members in below.items():
        longer = members[0].path[: len(path) + 1]
        same_below = len(longer) > len(path) and len(below[longer]) == len(members)
        if 2 <= len(members) < len(units) and not same_below:
            key = frozenset(Counter(unit.kind for unit in members if unit.kind in counted).items())
            found[key].append(Block(members[0].index, path, tuple(members)))
    return found


# --- the alignment

_MOST_ROUNDS, _MOST_UNITS = 100, 2_000_000


@dataclass(slots=True)
class Alignment:
    """Pairs of units, and what could not be decided: units of the target with their candidates."""

    pairs: list[UnitPair] = field(default_factory=list)
    undecided: list[tuple[list[Unit], list[Unit]]] = field(default_factory=list)

    def leave(self, olds: Iterable[Unit], news: Iterable[Unit], taken: Iterable[UnitPair]) -> None:
        """What pairs do not take of two lists is undecided, where both sides have some left."""
        gone = {id(unit) for pair in taken for unit in (pair.old, pair.new)}
        rest = [[unit for unit in units if id(unit) not in gone] for units in (olds, news)]
        if all(rest):
            self.undecided.append((rest[0], rest[1]))

    def take_back(self, pairs: list[UnitPair]) -> None:
        """Pairs that do not stand become undecided."""
        gone = set(map(id, pairs))
        self.pairs = [pair for pair in self.pairs if id(pair) not in gone]
        self.undecided += [([pair.old], [pair.new]) for pair in pairs]


def align(olds: Sequence[Unit], news: Sequence[Unit]) -> Alignment:
    _set_kinds(olds, news)
    alignment = Alignment()
    start = Context((0, 0), (families_of(olds), families_of(news)))
    pending = [(list(olds), list(news), start)]
    while pending:
        left, right, context = pending.pop()
        # one side has more of these: one that is left when blocks are taken out may be another than the other side's
        counts = [Counter(unit.kind for unit in units) for units in (left, right)]
        uneven = {kind for kind in counts[0].keys() | counts[1].keys() if counts[0][kind] != counts[1][kind]}
        for pair in _pair_blocks(left, right, context):
            below = Context(
                (len(pair.old.path), len(pair.new.path)), context.families, context.counted | pair.counted,
                context.open | pair.open,
            )  # fmt: skip
            pending.append((list(pair.old.units), list(pair.new.units), below))
        _pair_units(left, right, replace(context, open=context.open | uneven), alignment)
    _follow(alignment, olds, news)
    alignment.take_back(_doubtful(alignment.pairs, olds, news))
    return alignment


def _set_kinds(olds: Sequence[Unit], news: Sequence[Unit]) -> None:
    """Number the signatures. Where the sides do not have one equally often, sizes of 1 are left out of it."""
    counts = [Counter(unit.signature for unit in units) for units in (olds, news)]

    def signature(unit: Unit) -> tuple[bool, Signature]:
        even = counts[0][unit.signature] == counts[1][unit.signature]
        return even, unit.signature if even else unit.loose

    signatures = [[signature(unit) for unit in units] for units in (olds, news)]
    shared = {found: number for number, found in enumerate(set(signatures[0]) & set(signatures[1]))}
    for units, found in zip((olds, news), signatures, strict=True):
        for unit, each in zip(units, found, strict=True):
            unit.kind = shared.get(each, -1)


def _pair_blocks(left: list[Unit], right: list[Unit], context: Context) -> list[Pair[Block]]:
    """Blocks that are partners, the largest first; their units are taken out of the two lists."""
    found: list[Pair[Block]] = []
    effort = max(_MOST_UNITS, _MOST_ROUNDS * (len(left) + len(right)))
    while effort > 0 and (pairs := _next_blocks(left, right, context)):
        effort -= len(left) + len(right)
        gone = {id(unit) for pair in pairs for block in (pair.old, pair.new) for unit in block.units}
        left[:] = [unit for unit in left if id(unit) not in gone]
        right[:] = [unit for unit in right if id(unit) not in gone]
        found += pairs
    return found


def _next_blocks(left: list[Unit], right: list[Unit], context: Context) -> list[Pair[Block]]:
    """The largest blocks that are partners; kinds of units that one side has more of count only at first."""
    totals = [Counter(unit.kind for unit in units if unit.kind >= 0) for units in (left, right)]
    even = {kind for kind, count in totals[0].items() if totals[1][kind] == count}
    for counted in (totals[0].keys() | totals[1].keys(), even):
        olds, news = (_blocks_of(units, depth, counted) for units, depth in zip((left, right), context.depths, strict=True))
        shared = [key for key in olds.keys() & news.keys() if key]
        for key in sorted(shared, key=lambda key: (-sum(count for _, count in key), min(block.index for block in news[key]))):
            many = len(olds[key])
            # some kind of unit is nowhere but in these blocks, on both sides: then these blocks are each other's partners
            anchored = any(all(total[kind] == many * count for total in totals) for kind, count in key)
            if many != len(news[key]) or not anchored or _around(olds[key], left, even) != _around(news[key], right, even):
                continue
            if pairs := resolve(olds[key], news[key], context):
                kinds = frozenset(kind for kind, _ in key if many == 1 and kind not in even)
                return [replace(pair, open=kinds) for pair in pairs]
    return []


def _around(blocks: list[Block], units: list[Unit], even: set[int]) -> Counter[tuple[int, str]]:
    """How many units of the blocks' kinds, of those that both sides have as many of, lie before, between and behind them."""
    kinds = {unit.kind for block in blocks for unit in block.units} & even
    inside = {id(unit) for block in blocks for unit in block.units}
    first, last = min(block.index for block in blocks), max(block.index for block in blocks)
    places: Counter[tuple[int, str]] = Counter()
    for unit in units:
        if unit.kind in kinds and id(unit) not in inside:
            where = "before" if unit.index < first else "behind" if unit.index > last else "between"
            places[unit.kind, where] += 1
    return places


def _pair_units(left: list[Unit], right: list[Unit], context: Context, alignment: Alignment) -> None:
    """What blocks leave: kinds of units one by one."""
    kinds: dict[int, tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for side, units in enumerate((left, right)):
        for unit in units:
            if unit.kind >= 0:
                kinds[unit.kind][side].append(unit)
    for kind, (olds, news) in kinds.items():
        pairs = [pair for pair in resolve(olds, news, context) if kind not in context.open or pair.how != "unique"]
        alignment.pairs += [replace(pair, counted=context.counted | pair.counted) for pair in pairs]
        alignment.leave(olds, news, pairs)


# --- batch norms by the layers that they follow


def _follow(alignment: Alignment, olds: Sequence[Unit], news: Sequence[Unit]) -> None:
    """Decide batch norms by the layers that they follow, and doubt pairs of them that follow different ones."""
    layers = _followed(olds), _followed(news)
    pairs = {id(pair.old): pair for pair in alignment.pairs}

    def before(old: Unit) -> UnitPair | None:
        return pairs.get(id(layers[0].get(id(old))))

    wrong = [
        pair for pair in alignment.pairs
        if (found := before(pair.old)) is not None and layers[1].get(id(pair.new), found.new) is not found.new
    ]  # fmt: skip
    undecided, alignment.undecided = alignment.undecided, []
    alignment.take_back(wrong)
    for left, right in undecided:
        behind: dict[int, list[Unit]] = defaultdict(list)
        for new in right:
            behind[id(layers[1].get(id(new)))].append(new)
        decided = [
            Pair(old, new, "names", pair.counted)
            for old in left
            if (pair := before(old)) is not None
            for new in behind.get(id(pair.new), ())
        ]
        alignment.pairs += decided
        alignment.leave(left, right, decided)


def _followed(units: Sequence[Unit]) -> dict[int, Unit]:
    """Batch norms (by id) -> the layer registered right before, when its outputs are as many; for kinds where all have one."""
    found: dict[int, Unit] = {}
    broken: set[int] = set()
    families = families_of(units)
    for layer, norm in pairwise([None, *units]):
        if norm is None or "variance" not in norm.roles:
            continue
        weight = () if layer is None else layer.shapes.get("weight", ())
        fits = len(weight) > 1 and norm.shapes["variance"] == weight[:1]
        said = ("kind", "norm") in meaning(norm.path)
        if layer is not None and fits and (said or comes_before(layer.path, norm.path, 0, families)):
            found[id(norm)] = layer
        else:
            broken.add(norm.kind)
    return {id(unit): found[id(unit)] for unit in units if id(unit) in found and unit.kind not in broken}


# --- pairs that do not stand


def _doubtful(pairs: Sequence[UnitPair], olds: Sequence[Unit], news: Sequence[Unit]) -> list[UnitPair]:
    """Pairs that rest on a counting order that others contradict, or on nothing but a shape that is there once."""
    broken = _broken(pairs)
    found = [pair for pair in pairs if not broken.isdisjoint(pair.counted)]
    if len(pairs) == len(olds) == len(news):  # with nothing left over on either side, a shape that is there once is enough
        return found
    known = _longest_in_order(pairs) | set(map(id, found))
    for pair in pairs:
        shares = meaning(pair.old.path) & meaning(pair.new.path) or set(pair.old.path) & set(pair.new.path)
        if id(pair) not in known and pair.how == "unique" and not shares:
            found.append(pair)
    return found


def _broken(pairs: Sequence[UnitPair]) -> set[Counted]:
    """What was counted that holds two numbered families whose members do not come in one order on both sides."""
    wanted = {counted for pair in pairs for counted in pair.counted}
    beside: dict[Family, list[frozenset[Family]]] = defaultdict(list)
    for families, others in wanted:
        for family in families:
            beside[family].append(others)
    # the numbers under which members of two families, one on each side, are partners
    seen: dict[tuple[Family, Family], set[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(set)
    for pair in pairs if wanted else ():
        for (family, count), (other, other_count) in product(_members(pair.old.path), _members(pair.new.path)):
            if any(other in others for others in beside.get(family, ())):
                seen[family, other].add((count, other_count))
    crossed: dict[Family, set[Family]] = defaultdict(set)
    for (family, other), counts in seen.items():
        if any(later[1] < earlier[1] for earlier, later in pairwise(sorted(counts))):
            crossed[family].add(other)
    return {each for each in wanted if any(not each[1].isdisjoint(crossed.get(family, ())) for family in each[0])}


def _members(path: Path) -> Iterator[tuple[Family, tuple[int, ...]]]:
    """The numbered families that a path goes through, with its number in each."""
    for length, part in enumerate(path):
        if count := numbers(part):
            yield (path[:length], stem(part)), count


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
