"""The stage of the computation graphs: it doubts what they contradict, and decides what names and shapes leave open."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from ckpt_tools.matching.feeds import Feed, Gathered, Hidden, united
from ckpt_tools.matching.flow import ROLES, Arrival, FlowTooLargeError, flow_of
from ckpt_tools.matching.fused import Cuts, split_fused
from ckpt_tools.matching.order import in_order_of_names
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.refinement import Colouring, Label, Marks, Network, Node, Sums
from ckpt_tools.matching.resolve import UnitPair, conflicts, meaning
from ckpt_tools.matching.structure import Alignment, take_back
from ckpt_tools.matching.units import Unit, units_of, untied
from ckpt_tools.tree.graphs import Graph

# --- the layers of two models as networks to compare


# How much of an edge counts: that it is there; what part its numbers play in an attention or a product; all that is done.
LEVELS = ("plain", "roles", "all")


@dataclass(frozen=True, slots=True)
class Followed:
    """The units of one side, none of them split, and what goes into each of them, by its place in the list."""

    units: list[Unit]
    arrivals: list[Arrival]

    @classmethod
    def through(cls, graph: Graph, units: list[Unit]) -> Followed:
        """Follow all numbers through a graph."""
        return cls(units, flow_of(graph, {name: at for at, unit in enumerate(units) for name in unit.roles.values()}))

    def cuts(self) -> Cuts:
        """Of layers whose rows go different ways: the parts, which follow one another and are all of it."""
        rows: dict[int, dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
        for feed in {feed for arrival in self.arrivals for feed in arrival.feeds.items}:
            if feed.rows is not None and isinstance(feed.owner, int):
                rows[feed.owner][feed.rows] |= feed.words & {"query", "key"}
        found = ((self.units[owner], sorted(parts.items())) for owner, parts in rows.items())
        return {unit.path: _parts(parts) for unit, parts in found if _are_all_of(unit, [size for size, _ in parts])}


def _are_all_of(unit: Unit, rows: Sequence[tuple[int, int]]) -> bool:
    """Whether these are two parts of a layer and more, one behind the other."""
    ends = [0, *(last for _, last in rows)]
    follow = all(first == end for (first, _), end in zip(rows, ends, strict=False))
    return len(rows) > 1 and follow and ends[-1] == unit.shapes.get("weight", (0,))[0]


def _parts(parts: Sequence[tuple[tuple[int, int], set[str]]]) -> list[tuple[str, int]]:
    """What the parts are, with their numbers of rows: what an attention says; else numbers, which no name speaks against."""
    roles = [words for _, words in parts]
    names = [next(iter(words)) if len(words) == 1 else f"part{number}" for number, words in enumerate(roles)]
    if sorted(map(sorted, roles)) == [[], ["key"], ["query"]]:
        names[roles.index(set())] = "value"
    return [(name, last - first) for name, ((first, last), _) in zip(names, parts, strict=True)]


class Layers:
    """One side: its units by number, and the networks of them."""

    def __init__(self, followed: Followed, units: list[Unit]) -> None:
        self.units = units
        self.place: dict[tuple[str, int | None], int] = {}
        self.rows: dict[int, tuple[int, int]] = {}
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, unit in enumerate(units):
            part = None if unit.fused is None else unit.fused[1]
            for name in unit.roles.values():
                self.place[name, part] = number
                numbers[name].append(number)
        self.wholes = [numbers[next(iter(unit.roles.values()))] for unit in followed.units]
        for whole in self.wholes:
            self._measure(whole)
        arrivals: dict[Node, list[Gathered[Feed]]] = defaultdict(list)
        for arrival in followed.arrivals:
            for node in self._nodes(arrival.into, arrival.rows):
                arrivals[node].append(arrival.feeds)
        self.networks = {level: self._network(arrivals, level) for level in LEVELS}

    def _measure(self, whole: Sequence[int]) -> None:
        """Which rows of a fused layer its parts are."""
        at = 0
        for number in whole if len(whole) > 1 else ():
            rows = self.units[number].shapes["weight"][0]
            self.rows[number] = at, at + rows
            at += rows

    def _nodes(self, owner: object, rows: tuple[int, int] | None) -> list[Node]:
        """The nodes of a layer that some of its rows are in."""
        if not isinstance(owner, int):
            return [owner]
        whole = self.wholes[owner]
        if rows is None or len(whole) == 1:
            return [*whole]
        return [number for number in whole if self.rows[number][0] < rows[1] and rows[0] < self.rows[number][1]]

    def _network(self, arrivals: Mapping[Node, list[Gathered[Feed]]], level: str) -> Network:
        """What goes into nodes, with as much of what is said of it as the level has."""

        def labelled(feed: Feed) -> Iterator[tuple[Label, Node]]:
            label = _label(feed.words, level)
            return ((label, node) for node in self._nodes(feed.owner, feed.rows))

        return Network({node: united(feeds.changed(level, labelled) for feeds in found) for node, found in arrivals.items()})

    def number(self, unit: Unit) -> int | None:
        """The number of a unit, or of the same one as another list has it."""
        part = None if unit.fused is None else unit.fused[1]
        return next((self.place[name, part] for name in unit.roles.values() if (name, part) in self.place), None)

    def starts(self) -> dict[Node, object]:
        """What is known of the nodes at first: the shapes of their tensors."""
        nodes = self.networks[LEVELS[0]].nodes
        others: dict[Node, object] = {node: "hidden" if isinstance(node, Hidden) else node for node in nodes}
        return {**others, **{number: unit.loose for number, unit in enumerate(self.units)}}


def _label(words: frozenset[str], level: str) -> frozenset[str]:
    return frozenset() if level == "plain" else words & ROLES if level == "roles" else words


def layers_of(pairing: Pairing, graphs: tuple[Graph, Graph]) -> tuple[tuple[Layers, Layers], tuple[Cuts, Cuts]]:
    """Both sides, all of their tensors; and what the layers of each are seen to be divided into."""
    known: Mapping[str, str] = pairing.known
    olds = in_order_of_names(pairing.source.values(), known.__getitem__)
    olds, news = untied(olds, in_order_of_names(pairing.target.values(), str))
    left = Followed.through(graphs[0], units_of(olds, known.__getitem__))
    right = Followed.through(graphs[1], units_of(news, str))
    cuts = left.cuts(), right.cuts()
    old_layers = Layers(left, split_fused(left.units, right.units, cuts[0]))
    return (old_layers, Layers(right, split_fused(right.units, left.units, cuts[1]))), cuts


# --- what the computations of both models decide


Groups: TypeAlias = list[tuple[list[Unit], list[Unit]]]
Numbers: TypeAlias = tuple[int, int]  # of two partners


class Evidence:
    """Two networks, compared; `cuts` are what the layers of each side are seen to be divided into."""

    def __init__(self, sides: tuple[Layers, Layers], cuts: tuple[Cuts, Cuts]) -> None:
        self.sides, self.cuts = sides, cuts
        self.networks = {level: (sides[0].networks[level], sides[1].networks[level]) for level in LEVELS}
        self._alone: dict[str, Colouring] = {}

    def numbers(self, old: Unit, new: Unit) -> Numbers | None:
        """Two units as nodes; None where one is in no network."""
        found = self.sides[0].number(old), self.sides[1].number(new)
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    # --- pairs that cannot be

    def contradicted(self, pairs: Iterable[Numbers]) -> set[Numbers]:
        """The pairs that no way of laying one network on the other has."""
        known = set(pairs)
        found: set[Numbers] = set()
        for level in LEVELS if known else ():
            colouring = self._without_pairs(level)
            if colouring.alike():
                found |= {pair for pair in known if not colouring.same(*pair)}
            elif level == LEVELS[0]:
                found |= self._crossed(known)
        return found

    def _without_pairs(self, level: str) -> Colouring:
        """The last colours that shapes and computations alone give; worked out once."""
        if level not in self._alone:
            self._alone[level] = colouring = Colouring(self.networks[level], self._starts({}))
            for _ in colouring.rounds():
                pass
        return self._alone[level]

    def _crossed(self, pairs: set[Numbers]) -> set[Numbers]:
        """Pairs of one kind that come one after the other here, and the other way round there."""
        ordered = sorted(pairs)
        behind = [
            _reached(network, {pair[side]: 1 << number for number, pair in enumerate(ordered)}, side)
            for side, network in enumerate(self.networks[LEVELS[0]])
        ]
        kinds: dict[object, int] = {}
        for number, (one, _) in enumerate(ordered):
            kind = self.sides[0].units[one].loose
            kinds[kind] = kinds.get(kind, 0) | 1 << number
        found = set()
        for one, other in ordered:
            same = kinds[self.sides[0].units[one].loose]
            if behind[0].get(one, 0) & behind[1].get(other, 0) & same:
                found.add((one, other))
        return found | self._partners_of_crossed(found, ordered, behind)

    @staticmethod
    def _partners_of_crossed(found: set[Numbers], ordered: list[Numbers], behind: list[dict[Node, int]]) -> set[Numbers]:
        """The other pair of each crossing."""
        both = 0
        for one, other in found:
            both |= behind[0][one] & behind[1][other]
        return {pair for number, pair in enumerate(ordered) if both >> number & 1}

    # --- pairs that are decided

    def decide(self, groups: Groups, anchors: Iterable[Numbers]) -> list[tuple[Unit, Unit]]:
        """Pairs among the units that are open, given the partners that are known."""
        open_pairs = _Open(groups, self)
        known = dict(anchors)
        decided: list[tuple[Unit, Unit]] = []
        while all(open_pairs.units) and (found := self._next(known, open_pairs)):
            known.update(found)
            decided += [open_pairs.take(pair) for pair in sorted(found)]
        return decided

    def _next(self, known: Mapping[int, int], open_pairs: _Open) -> set[Numbers]:
        """The pairs that can be decided now: those that all levels agree about."""
        said: dict[int, set[int]] = defaultdict(set)
        for one, other in self._only_ones(known):
            if isinstance(one, int) and isinstance(other, int) and one not in known:
                said[one].add(other)
        pairs = {(one, next(iter(others))) for one, others in said.items() if len(others) == 1}
        news = Counter(other for _, other in pairs)
        pairs = {pair for pair in pairs if news[pair[1]] == 1 and open_pairs.may_be(pair)}
        while bad := self._unfit(pairs, {**known, **dict(pairs)}):
            pairs -= bad
        return pairs

    def _only_ones(self, known: Mapping[int, int]) -> Iterator[tuple[Node, Node]]:
        """The layers that each side has one of, on any level and at any distance."""
        for networks in self.networks.values():
            for found in Colouring(networks, self._starts(known)).rounds():
                yield from found

    def _starts(self, known: Mapping[int, int]) -> tuple[dict[Node, object], dict[Node, object]]:
        olds, news = self.sides[0].starts(), self.sides[1].starts()
        for one, other in known.items():
            olds[one] = news[other] = ("partners", one)
        return olds, news

    def _unfit(self, pairs: set[Numbers], known: Mapping[int, int]) -> set[Numbers]:
        """The pairs whose neighbours with partners are not the partner's neighbours."""
        olds, news = self.networks[LEVELS[0]]
        marks, there = Marks(), {other: other for other in known.values()}
        before = olds.before(marks, known), news.before(marks, there)
        behind = olds.behind(marks, known), news.behind(marks, there)
        return {
            (one, other) for one, other in pairs
            if before[0].get(one, 0) != before[1].get(other, 0) or _plain(behind[0].get(one)) != _plain(behind[1].get(other))
        }  # fmt: skip


class _Open:
    """The units without partners, and which of them may be partners."""

    def __init__(self, groups: Groups, evidence: Evidence) -> None:
        self.units: tuple[dict[int, Unit], dict[int, Unit]] = ({}, {})
        self.pools: tuple[dict[int, set[object]], dict[int, set[object]]] = ({}, {})
        for number, group in enumerate(groups):
            for side, unit in [*((0, old) for old in group[0]), *((1, new) for new in group[1])]:
                if (node := evidence.sides[side].number(unit)) is not None:
                    self.units[side][node] = unit
                    self.pools[side].setdefault(node, set()).update(self._pools(number, group, unit))

    @staticmethod
    def _pools(number: int, group: tuple[list[Unit], list[Unit]], unit: Unit) -> Iterator[object]:
        yield number
        if len(group[0]) == len(group[1]) == 1:  # a pair that was taken back: the partner is elsewhere
            yield "taken back", unit.kind

    def may_be(self, pair: Numbers) -> bool:
        """Whether both are open, for one another, and no name says otherwise."""
        if pair[0] not in self.units[0] or pair[1] not in self.units[1]:
            return False
        if self.pools[0][pair[0]].isdisjoint(self.pools[1][pair[1]]):
            return False
        old, new = self.units[0][pair[0]], self.units[1][pair[1]]
        return old.kind == new.kind and not conflicts(meaning(old.path), meaning(new.path))

    def take(self, pair: Numbers) -> tuple[Unit, Unit]:
        """Two units that are partners now."""
        return self.units[0].pop(pair[0]), self.units[1].pop(pair[1])


def _plain(sums: Sums | None) -> int:
    """The one sum where nothing is said of edges; none is as good as one of nothing."""
    return sum(number for _, number in sums or ())


def _reached(network: Network, bits: Mapping[Node, int], side: int) -> dict[Node, int]:
    """Of each node those that it reaches (side 0) or that reach it (side 1), as bits; nothing where there is a circle."""
    edges = network.ways_on()
    try:
        order = [*TopologicalSorter(edges).static_order()]  # what is reached comes first
    except CycleError:  # a layer that is used twice
        return {}
    found: dict[Node, int] = dict.fromkeys(order, 0)
    for node in order if side == 0 else reversed(order):
        for other in edges[node]:
            if side == 0:
                found[node] |= found[other] | bits.get(other, 0)
            else:
                found[other] |= found[node] | bits.get(node, 0)
    return found


def pairs_of(decided: Iterable[tuple[Unit, Unit]]) -> list[UnitPair]:
    """What was decided, as the structural stage has it."""
    return [UnitPair(old, new, "graph", 1, frozenset()) for old, new in decided]


_WHY = "its name, and what feeds it when the models run, say different things"


def doubt_contradicted(pairing: Pairing) -> None:
    """Doubt pairs by name that the computations contradict."""
    if (evidence := evidence_of(pairing)) is None:
        return
    wrong = evidence.contradicted(_by_name(pairing, evidence))
    for new, match in list(pairing.matches.items()):
        if match.reason not in ("pair", "values") and _numbers(evidence, match.old, new) in wrong:
            del pairing.matches[new]
            pairing.used.pop(match.old, None)
            pairing.doubt(new, [match.old], _WHY)


def settle(pairing: Pairing, alignment: Alignment) -> None:
    """Take back what the computations contradict, and pair what they decide among the units that are open."""
    if (evidence := evidence_of(pairing)) is None:
        return
    numbered = {id(pair): evidence.numbers(pair.old, pair.new) for pair in alignment.pairs}
    by_name = [*_by_name(pairing, evidence)]
    wrong = evidence.contradicted([*by_name, *(numbers for numbers in numbered.values() if numbers is not None)])
    take_back(alignment, [pair for pair in alignment.pairs if numbered[id(pair)] in wrong])
    kept = [numbers for pair in alignment.pairs if (numbers := numbered[id(pair)]) is not None]
    decided = evidence.decide(alignment.undecided, [*by_name, *kept])
    alignment.pairs += pairs_of(decided)
    gone = {id(unit) for pair in decided for unit in pair}
    rest = [tuple([unit for unit in units if id(unit) not in gone] for units in group) for group in alignment.undecided]
    alignment.undecided = [(olds, news) for olds, news in rest if olds and news]


def evidence_of(pairing: Pairing) -> Evidence | None:
    """What both models compute, compared; worked out once. None where there is nothing, or too much of it to be followed."""
    if pairing.evidence is None and pairing.graphs is not None:
        try:
            pairing.evidence = Evidence(*layers_of(pairing, pairing.graphs))
        except FlowTooLargeError:
            pairing.graphs = None
    evidence: Evidence | None = pairing.evidence
    return evidence


def _by_name(pairing: Pairing, evidence: Evidence) -> Iterator[Numbers]:
    """The pairs that are there already."""
    for new, match in pairing.matches.items():
        if (numbers := _numbers(evidence, match.old, new)) is not None:
            yield numbers


def _numbers(evidence: Evidence, old: str, new: str) -> Numbers | None:
    found = evidence.sides[0].place.get((old, None)), evidence.sides[1].place.get((new, None))
    return None if found[0] is None or found[1] is None else (found[0], found[1])
