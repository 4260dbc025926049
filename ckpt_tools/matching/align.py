"""Leaf modules aligned by shape, by the blocks that they are in, by what names mean, and by order.

Two implementations of one network have the same leaf modules under other names, in nearly the same order. The alignment goes
from large to small: blocks that hold the same kinds of units and can be no others are partners; what is inside is compared
inside only. What has one shape is told apart by `resolve`. Whatever stays undecided is ambiguous, never chosen.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from operator import attrgetter
from typing import Generic, Literal, TypeAlias, TypeVar

from ckpt_tools.matching.lexicon import LETTER, QKV, concepts, end_of, numbers, rank, sharpened, stem
from ckpt_tools.matching.pairing import flattened
from ckpt_tools.matching.records import Param, Shape
from ckpt_tools.tree.names import unwrap

Path: TypeAlias = tuple[str, ...]
Signature: TypeAlias = tuple[tuple[str, Shape, bool], ...]
Meaning: TypeAlias = frozenset[tuple[str, str]]
Family: TypeAlias = tuple[Path, str]  # numbered siblings: the path above, the name without number
# Families of the two sides, each of which was counted beside each of the other: their product can be too large to write down.
Counted: TypeAlias = tuple[frozenset[Family], frozenset[Family]]

# --- units: the tensors that share a parent name, with the role that each plays there

_ROLES = {
    "weight": "weight", "kernel": "weight", "bias": "bias", "running_mean": "mean", "moving_mean": "mean",
    "running_var": "variance", "moving_variance": "variance",
}  # fmt: skip
_COUNTER = "num_batches_tracked"  # old checkpoints lack it; it never tells modules apart
_SUFFIXED = re.compile(r"(.+)_(weight|bias)")
_GATED = {"w1": "gate", "w2": "down", "w3": "up"}
_MAX_PARTS = 64  # of a name; what is deeper counts as one part


@dataclass(slots=True)
class Unit:
    """A leaf module of one side."""

    index: int
    path: Path
    roles: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    integers: dict[str, bool] = field(default_factory=dict)
    counter: str | None = None
    fused: tuple[Unit, int] | None = None
    kind: int = -1

    @property
    def signature(self) -> Signature:
        return tuple((role, self.shapes[role], self.integers[role]) for role in sorted(self.roles))

    @property
    def loose(self) -> Signature:
        """The signature in flattened shapes; a parameter that stands alone and the weight of a module are one thing."""
        names = {"weight": "tensor"} if len(self.roles) == 1 else {}
        return tuple((names.get(role, role), flattened(shape), integer) for role, shape, integer in self.signature)

    def partner_of(self, role: str, other: Unit) -> str | None:
        """The name of the tensor that plays this role of the other unit here."""
        if role not in self.roles and len(self.roles) == len(other.roles) == 1:
            return next(iter(self.roles.values()))
        return self.roles.get(role)


def units_of(params: Iterable[Param], known: Callable[[str], str]) -> list[Unit]:
    """The leaf modules of one side, in order of registration. `known` gives the name to read a tensor's place from."""
    rows = [(param, *unwrap(known(param.name)).rpartition(".")) for param in params if param.kind == "tensor"]
    leaves: dict[str, set[str]] = defaultdict(set)
    for _, parent, _, leaf in rows:
        leaves[parent].add(leaf)
    units: dict[Path, Unit] = {}
    for param, parent, _, leaf in rows:
        path, role = _place(parent, leaf, leaves[parent])
        unit = units.setdefault(path, Unit(len(units), path))
        if role == _COUNTER:
            unit.counter = param.name
        elif role not in unit.roles:
            unit.roles[role], unit.shapes[role] = param.name, param.shape
            unit.integers[role] = (param.dtype or "").startswith(("int", "uint", "bool"))
    for path in [path for path in units if path[-1:] == ("w1",)]:  # beside w2 and w3, as the first Llama has them
        gates = [gate for name in _GATED if (gate := units.get((*path[:-1], name))) is not None]
        shapes = [gate.shapes.get("weight", ()) for gate in gates]
        if len(gates) == len(_GATED) and len(shapes[0]) == 2 and shapes[0] == shapes[2] == shapes[1][::-1]:
            for gate, name in zip(gates, _GATED.values(), strict=True):
                gate.path = (*path[:-1], name)
    return [unit for unit in units.values() if unit.roles]


def _place(parent: str, leaf: str, siblings: set[str]) -> tuple[Path, str]:
    path = tuple(parent.split(".", _MAX_PARTS)) if parent else ()
    if leaf == _COUNTER or leaf in _ROLES:
        return path, _ROLES.get(leaf, _COUNTER)
    if leaf in ("gamma", "beta") and {"gamma", "beta"} <= siblings:  # as TensorFlow calls them in norms
        return path, "weight" if leaf == "gamma" else "bias"
    if path[-2:-1] == ("parametrizations",) and leaf in ("original0", "original1"):  # the newer form of weight_g, weight_v
        return path[:-2], f"{path[-1]}_{'gv'[int(leaf[-1])]}"
    if leaf.startswith(("weight_", "bias_")):  # weight_g of a weight norm, weight_ih_l0 of an LSTM: its module's own word
        return path, leaf
    if (match := _SUFFIXED.fullmatch(leaf)) is not None:  # in_proj_weight
        return (*path, match[1]), match[2]
    return (*path, leaf), "tensor"


def untied(source: Sequence[Param], target: Sequence[Param]) -> tuple[list[Param], list[Param]]:
    """Both sides with one tensor of each group of tied ones; but all of it where the other side holds as many apart."""
    groups: list[dict[object, list[Param]]] = [{}, {}]
    for side, params in enumerate((source, target)):
        for number, param in enumerate(params):
            groups[side].setdefault((number,) if param.tie is None else ("tie", param.tie), []).append(param)
    full = [Counter(param.shape for param in side) for side in (source, target)]
    distinct = [Counter(members[0].shape for members in side.values()) for side in groups]

    def one_side(own: int, other: int) -> list[Param]:
        kept: set[str] = set()
        for first, *rest in groups[own].values():
            apart = distinct[own][first.shape] != distinct[other][first.shape] == full[own][first.shape]
            kept.update(param.name for param in ([first, *rest] if apart else [first]))
        return [param for param in (source, target)[own] if param.name in kept]

    return one_side(0, 1), one_side(1, 0)


# --- blocks: what lies below one module path


@dataclass(frozen=True, slots=True)
class Block:
    """The units below a path; `index` is the place of the first in the order of registration."""

    index: int
    path: Path
    units: tuple[Unit, ...]


_Key: TypeAlias = frozenset[tuple[int, int]]  # kinds of units, and how many of each
Item: TypeAlias = Unit | Block


def _above(path: Path, depth: int = 0) -> Iterator[Path]:
    return (path[:length] for length in range(depth + 1, len(path) + 1))


def _blocks_of(units: Sequence[Unit], depth: int, counted: Collection[int]) -> dict[_Key, list[Block]]:
    """The blocks of two units and more below a module path of this depth, by key; not the whole itself."""
    below: dict[Path, list[Unit]] = defaultdict(list)
    for unit in units:
        for path in _above(unit.path, depth):
            below[path].append(unit)
    found: dict[_Key, list[Block]] = defaultdict(list)
    for path, members in below.items():
        longer = members[0].path[: len(path) + 1]
        same_below = len(longer) > len(path) and len(below[longer]) == len(members)
        if 2 <= len(members) < len(units) and not same_below:
            key = frozenset(Counter(unit.kind for unit in members if unit.kind in counted).items())
            found[key].append(Block(members[0].index, path, tuple(members)))
    return found


def _families_of(units: Iterable[Unit]) -> dict[Family, bool]:
    """Numbered siblings -> whether they are registered in counting order; letters must be a, b, c, or they are names."""
    seen: dict[Family, list[tuple[int, ...]]] = defaultdict(list)
    for path in dict.fromkeys(path for unit in units for path in _above(unit.path)):
        seen[path[:-1], stem(path[-1])].append(numbers(path[-1]))
    return {
        family: all(one < other for one, other in pairwise(row))
        and (family[1] != LETTER or (len(row) > 2 and sorted(row) == [(n,) for n in range(1, len(row) + 1)]))
        for family, row in seen.items()
    }


# --- what has one shape: by what names say, then by order where both sides say that the order means something

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

    `counted` are the numbered families that their order rests on, `depth` is how many blocks they are in.
    """

    old: T
    new: T
    how: How
    counted: frozenset[Counted] = frozenset()
    depth: int = 0
    open: frozenset[int] = frozenset()


UnitPair: TypeAlias = Pair[Unit]


@dataclass(frozen=True, slots=True)
class _Context:
    """Where items are compared: below two paths that are known to be partners (their lengths), on two sides."""

    depths: tuple[int, int]
    families: tuple[dict[Family, bool], dict[Family, bool]]
    counted: frozenset[Counted] = frozenset()
    level: int = 0
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


def _resolve(olds: Sequence[T], news: Sequence[T], context: _Context) -> list[Pair[T]]:
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


def _in_order(olds: Sequence[T], news: Sequence[T], context: _Context) -> list[Pair[T]]:
    """Items paired in the order of registration, if both sides say that this order is one; else none."""
    families: list[frozenset[Family]] = []
    for items, depth, known in zip((olds, news), context.depths, context.families, strict=True):
        shape = items[0].shapes.get("weight", ()) if isinstance(items[0], Unit) else ()
        said = [meaning(item.path) for item in items]
        # three square matrices and more in an attention are q, k, v ... in an order of its author's
        are_parts = len(shape) == 2 and shape[0] == shape[1] and len(items) > 2
        if are_parts and any(("sublayer", "attention") in one for one in said):
            return []
        counts = all(_comes_before(one.path, other.path, depth, known) for one, other in pairwise(items))
        if not counts or any(meaning(item.path[depth:]) & QKV for item in items):
            return []
        parting = [(one.path, other.path, _split(one.path, other.path, depth) or 0) for one, other in pairwise(items)]
        families.append(frozenset((one[:at], stem(one[at])) for one, other, at in parting if stem(one[at]) == stem(other[at])))
    counted = frozenset([(families[0], families[1])])
    return [Pair(old, new, "order", counted) for old, new in zip(olds, news, strict=True)]


def _split(one: Path, other: Path, depth: int) -> int | None:
    return next((at for at in range(depth, min(len(one), len(other))) if one[at] != other[at]), None)


def _comes_before(one: Path, other: Path, depth: int, families: Mapping[Family, bool]) -> bool:
    """Whether names say that the first comes before the second: by numbers that count up, or by words with an order."""
    split = _split(one, other, depth)
    if split is None:
        return False
    a, b = one[split], other[split]
    if stem(a) == stem(b):
        return numbers(a) < numbers(b) and families.get((one[:split], stem(a)), False)
    ranks = rank(a), rank(b)
    return ranks[0] is not None and ranks[1] is not None and ranks[0] < ranks[1]


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
    start = _Context((0, 0), (_families_of(olds), _families_of(news)))
    pending = [(list(olds), list(news), start)]
    while pending:
        left, right, context = pending.pop()
        # one side has more of these: one that is left when blocks are taken out may be another than the other side's
        counts = [Counter(unit.kind for unit in units) for units in (left, right)]
        uneven = {kind for kind in counts[0].keys() | counts[1].keys() if counts[0][kind] != counts[1][kind]}
        for pair in _pair_blocks(left, right, context):
            below = _Context(
                (len(pair.old.path), len(pair.new.path)), context.families, context.counted | pair.counted,
                context.level + 1, context.open | pair.open,
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


def _pair_blocks(left: list[Unit], right: list[Unit], context: _Context) -> list[Pair[Block]]:
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


def _next_blocks(left: list[Unit], right: list[Unit], context: _Context) -> list[Pair[Block]]:
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
            if pairs := _resolve(olds[key], news[key], context):
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
            places[unit.kind, end_of(unit.path) or where] += 1
    return places


def _pair_units(left: list[Unit], right: list[Unit], context: _Context, alignment: Alignment) -> None:
    """What blocks leave: kinds of units one by one."""
    kinds: dict[int, tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for side, units in enumerate((left, right)):
        for unit in units:
            if unit.kind >= 0:
                kinds[unit.kind][side].append(unit)
    for kind, (olds, news) in kinds.items():
        pairs = [pair for pair in _resolve(olds, news, context) if kind not in context.open or pair.how != "unique"]
        alignment.pairs += [replace(pair, depth=context.level, counted=context.counted | pair.counted) for pair in pairs]
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
            Pair(old, new, "names", pair.counted, 1)
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
    families = _families_of(units)
    for layer, norm in pairwise([None, *units]):
        if norm is None or "variance" not in norm.roles:
            continue
        weight = () if layer is None else layer.shapes.get("weight", ())
        fits = len(weight) > 1 and norm.shapes["variance"] == weight[:1]
        said = ("kind", "norm") in meaning(norm.path)
        if layer is not None and fits and (said or _comes_before(layer.path, norm.path, 0, families)):
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
        if id(pair) not in known and pair.how == "unique" and not pair.depth and not shares:
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


# --- fused against split layers: `qkv` against `q`, `k`, `v`. A fused unit is compared part by part; the result is an offer


# What a fused layer's name says about its parts, in the order in which they lie along the first dimension: torch's
# MultiheadAttention, timm and transformers put q, k, v (and k, v) in this order, and the gate before what it gates. A
# `query_key_value` (GPT-NeoX, BLOOM, Falcon) is not here: its parts alternate by head. Of a `wqkv` with fewer keys than
# queries some libraries make groups, so parts of different sizes are taken from a `qkv_proj` only.
_PARTS = {
    **dict.fromkeys(
        ("qkv", "inproj", "cattn", "wqkv", "qkvproj", "toqkv", "projqkv", "qkvlinear", "linearqkv", "attnqkv"),
        ("query", "key", "value"),
    ),
    **dict.fromkeys(("kv", "tokv", "kvproj", "wkv", "projkv", "kvlinear", "linearkv"), ("key", "value")),
    **dict.fromkeys(("gateup", "gateupproj", "w12"), ("gate", "up")),
}
_UNEQUAL = "qkvproj"
_GROUP = {"query": "attention part", "key": "attention part", "value": "attention part", "gate": "gated", "up": "gated"}
Cuts: TypeAlias = Mapping[Path, Sequence[tuple[str, int]]]  # what a layer is seen to be divided into: names and rows


def split_fused(units: Sequence[Unit], others: Sequence[Unit], cuts: Cuts | None = None) -> list[Unit]:
    """The units with each fused one that the other side has split exchanged for its parts; numbered again in order."""
    counts, theirs = (Counter(unit.signature for unit in side) for side in (units, others))
    sizes: dict[str, set[Shape]] = defaultdict(set)
    for unit in others:
        for word in _named_parts(unit) if "weight" in unit.shapes else ():
            sizes[word].add(unit.shapes["weight"])
    # biases of parts that are parameters of their own beside a fused weight: `q_bias` and `v_bias` of BEiT and Swin V2
    lone = {(unit.path[:-1], word): unit for unit in units if [*unit.roles] == ["bias"] for word in _named_parts(unit)}
    found: list[Unit] = []
    given: set[Path] = set()
    for unit in units:
        more = counts[unit.signature] > theirs[unit.signature]
        parts = _parts(unit, sizes) if more else []
        if more and not parts and cuts:
            parts = _cut(unit, cuts.get(unit.path, ()), theirs - counts)
        for part in parts or [unit]:
            bias = lone.get((part.path[:-1], part.path[-1])) if parts and "bias" not in unit.roles else None
            if bias is not None and bias.shapes["bias"] == part.shapes["weight"][:1]:
                given.add(bias.path)
                part.roles = {**part.roles, **bias.roles}
                part.shapes, part.integers = {**part.shapes, **bias.shapes}, {**part.integers, **bias.integers}
            found.append(part)
    return [replace(unit, index=index) for index, unit in enumerate(unit for unit in found if unit.path not in given)]


def _named_parts(unit: Unit) -> set[str]:
    """Which parts of a fused layer a unit is named as; by the last part of its name, or the one before (`query.linear`)."""
    for component in reversed(unit.path[-2:]):
        if found := {concept for group, concept in concepts(component) if _GROUP.get(concept) == group}:
            return found
    return set()


def _parts(unit: Unit, sizes: Mapping[str, set[Shape]]) -> list[Unit]:
    """The parts of a fused unit, where the other side's shapes add up to it in one way only."""
    fused = re.sub(r"[^a-z0-9]", "", unit.path[-1].lower()) if unit.path else ""
    names = _PARTS.get(fused, ())
    weight = unit.shapes.get("weight", ())
    if not names or not weight or set(unit.roles) - {"weight", "bias"}:
        return []
    rows = [sorted(shape[0] for shape in sizes.get(name, ()) if shape and shape[1:] == weight[1:]) for name in names]
    ways = [way for way in product(*rows) if sum(way) == weight[0]]
    if len(ways) != 1 or (len(set(ways[0])) > 1 and fused != _UNEQUAL):
        return []
    return [_part(unit, number, name, count) for number, (name, count) in enumerate(zip(names, ways[0], strict=True))]


def _part(unit: Unit, number: int, name: str, rows: int) -> Unit:
    shapes = {role: (rows, *shape[1:]) for role, shape in unit.shapes.items()}
    return replace(unit, path=(*unit.path[:-1], name), shapes=shapes, counter=None, fused=(unit, number))


def _cut(unit: Unit, rows: Sequence[tuple[str, int]], more: Counter[Signature]) -> list[Unit]:
    """The parts that a layer is seen to be divided into, where the other side has more layers like each of them."""
    if set(unit.roles) - {"weight", "bias"} or "weight" not in unit.shapes:
        return []
    parts = [_part(unit, number, name, count) for number, (name, count) in enumerate(rows)]
    wanted = Counter(part.signature for part in parts)
    return parts if all(more[signature] >= count for signature, count in wanted.items()) else []
