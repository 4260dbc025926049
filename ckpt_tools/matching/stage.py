"""The stage of the computation graphs: it doubts what they contradict, and decides what names and shapes leave open.

Layers of both models are compared by the first-order Weisfeiler-Leman test: equal colours where all that feeds them, and all
that they feed, is alike. Nothing depends on the order in which a file has its names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeAlias

from ckpt_tools.matching.align import Alignment
from ckpt_tools.matching.flow import Arrival, FlowTooLargeError, Hidden, flow_of
from ckpt_tools.matching.fused import Cuts, split_fused
from ckpt_tools.matching.order import in_order_of_names
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.resolve import Pair, conflicts, meaning
from ckpt_tools.matching.units import Unit, units_of, untied

# How much of an edge counts: that it is there; all that is done with its numbers.
LEVELS = ("plain", "all")
_MOST_STEPS = 3_000_000
_WHY = "its name, and what feeds it when the models run, say different things"
Node: TypeAlias = Hashable
Network: TypeAlias = dict[Node, frozenset[tuple[frozenset[str], Node]]]  # layer -> what it is fed by: words, and layers
Numbers: TypeAlias = tuple[int, int]  # of two partners
Sides: TypeAlias = tuple[dict[int, Unit], dict[int, Unit]]


# --- colours


class Colouring:
    """The colours of the layers of two networks; at first those of what is known of them.

    Only what lies beside a layer whose colour is new is looked at again, and of a colour that is divided the largest part keeps
    it (Hopcroft): a long chain costs as many steps as it has layers, about, and not their square.
    """

    def __init__(self, networks: Sequence[Network], starts: Sequence[Mapping[Node, Hashable]]) -> None:
        self.places = [(side, node) for side, network in enumerate(networks) for node in _nodes(network)]
        numbers = {place: number for number, place in enumerate(self.places)}
        self.beside: list[list[tuple[int, int]]] = [[] for _ in self.places]  # of each layer: how, and which other
        table: dict[Hashable, int] = {}
        self.colours = [table.setdefault(starts[side][node], len(table)) for side, node in self.places]
        self.members: dict[int, set[int]] = defaultdict(set)
        for number, colour in enumerate(self.colours):
            self.members[colour].add(number)
        ways: dict[Hashable, int] = {}
        for side, network in enumerate(networks):
            for node, feeding in network.items():
                fed = numbers[side, node]
                for words, other in feeding:
                    way = ways.setdefault(words, len(ways) + 1)
                    self.beside[fed].append((way, numbers[side, other]))
                    self.beside[numbers[side, other]].append((-way, fed))

    def rounds(self) -> Iterator[list[tuple[Node, Node]]]:
        """Look one, two, three ... edges far until that says no more. Each time: what is now the only one of a colour."""
        todo, touched, steps = set(range(len(self.places))), set(self.members), 0
        while todo and steps <= _MOST_STEPS:
            steps += sum(len(self.beside[place]) for place in todo)
            changed = self._divide(todo)
            touched.update(changed.values(), (self.colours[place] for place in changed))
            only = [dict(map(self.places.__getitem__, m)) for colour in touched if len(m := self.members[colour]) == 2]
            yield [(sides[0], sides[1]) for sides in only if len(sides) == 2]
            touched = set()
            todo = {other for place in changed for _, other in self.beside[place]}

    def _divide(self, places: Iterable[int]) -> dict[int, int]:
        """Give layers that are no longer alike colours of their own; the old ones of those that have another now."""
        parts: dict[int, dict[Hashable, set[int]]] = defaultdict(lambda: defaultdict(set))
        for place in places:
            seen = Counter([(way, self.colours[other]) for way, other in self.beside[place]])
            parts[self.colours[place]][frozenset(seen.items())].add(place)
        changed: dict[int, int] = {}
        for colour, by_sight in parts.items():
            divided = [*by_sight.values()]
            if rest := self.members[colour].difference(*divided):
                divided.append(rest)
            most = max(map(len, divided))
            largest = [part for part in divided if len(part) == most]
            for part in divided:
                if part is not largest[0] or len(largest) > 1:  # of two that are as large none is to be preferred
                    changed.update(dict.fromkeys(part, colour))
                    self._recolour(colour, part)
        return changed

    def _recolour(self, colour: int, part: set[int]) -> None:
        new = len(self.members)
        self.members[colour] -= part
        self.members[new] = part
        for place in part:
            self.colours[place] = new

    def alike(self) -> bool:
        """Whether both networks have every colour as often: as far as colours can tell they are one."""
        return all(2 * sum(self.places[each][0] for each in each_of) == len(each_of) for each_of in self.members.values())


def _nodes(network: Network) -> set[Node]:
    return {*network, *(node for feeding in network.values() for _, node in feeding)}


# --- the layers of two models as networks to compare


class Layers:
    """One side: its units by number, what they are fed by, and the parts that they are seen to be divided into."""

    def __init__(self, whole: list[Unit], arrivals: list[Arrival], units: list[Unit]) -> None:
        self.units = units
        self.place: dict[tuple[str, int | None], int] = {}
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, unit in enumerate(units):
            for name in unit.roles.values():
                self.place[name, _part_of(unit)] = number
                numbers[name].append(number)
        self.parts = [numbers[next(iter(unit.roles.values()))] for unit in whole]
        self.networks = {level: self._network(arrivals, level) for level in LEVELS}

    def _network(self, arrivals: Iterable[Arrival], level: str) -> Network:
        """What goes into nodes, with as much of what is said of it as the level has."""
        found: dict[Node, set[tuple[frozenset[str], Node]]] = defaultdict(set)
        for arrival in arrivals:
            feeding: set[tuple[frozenset[str], Node]] = set()
            for feed in arrival.feeds:
                words = frozenset() if level == "plain" else feed.words
                feeding.update((words, node) for node in self._nodes(feed.owner, feed.rows))
            for node in self._nodes(arrival.into, arrival.rows):
                found[node] |= feeding
        return {node: frozenset(feeding) for node, feeding in found.items() if feeding}

    def _nodes(self, owner: Node, rows: tuple[int, int] | None) -> list[Node]:
        """The nodes of a layer that some of its rows are in."""
        if not isinstance(owner, int):
            return [owner]
        parts, found, at = self.parts[owner], [], 0
        if rows is None or len(parts) == 1:
            return [*parts]
        for number in parts:
            end = at + self.units[number].shapes["weight"][0]
            if at < rows[1] and rows[0] < end:
                found.append(number)
            at = end
        return [*found]

    def number(self, unit: Unit) -> int | None:
        """The number of a unit, or of the same one as another list has it."""
        return next((self.place[key] for name in unit.roles.values() if (key := (name, _part_of(unit))) in self.place), None)

    def starts(self) -> dict[Node, object]:
        """What is known of the nodes at first: the shapes of their tensors."""
        nodes = _nodes(self.networks[LEVELS[0]])
        others: dict[Node, object] = {node: "hidden" if isinstance(node, Hidden) else node for node in nodes}
        return {**others, **{number: unit.loose for number, unit in enumerate(self.units)}}


def _both(one: int | None, other: int | None) -> Numbers | None:
    return None if one is None or other is None else (one, other)


def _part_of(unit: Unit) -> int | None:
    return None if unit.fused is None else unit.fused[1]


def cuts_of(units: Sequence[Unit], arrivals: Iterable[Arrival]) -> Cuts:
    """Of layers whose rows go different ways: the parts, which follow one another and are all of it."""
    seen: dict[int, dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    for feed in {feed for arrival in arrivals for feed in arrival.feeds}:
        if feed.rows is not None and isinstance(feed.owner, int):
            seen[feed.owner][feed.rows] |= feed.words & {"query", "key"}
    cuts: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for owner, words in seen.items():
        unit, rows = units[owner], sorted(words)
        follow = rows[0][0] == 0 and all(one[1] == other[0] for one, other in pairwise(rows))
        if len(rows) > 1 and follow and rows[-1][1] == unit.shapes.get("weight", (0,))[0]:
            roles = [words[each] for each in rows]
            # what an attention says; else numbers, which no name speaks against
            names = [next(iter(said)) if len(said) == 1 else f"part{at}" for at, said in enumerate(roles)]
            if sorted(map(sorted, roles)) == [[], ["key"], ["query"]]:
                names[roles.index(set())] = "value"
            cuts[unit.path] = [(name, last - first) for name, (first, last) in zip(names, rows, strict=True)]
    return cuts


# --- what the computations of both models decide


class Evidence:
    """Two networks, compared; `cuts` are what the layers of each side are seen to be divided into."""

    def __init__(self, pairing: Pairing) -> None:
        assert pairing.graphs is not None
        known = pairing.known.__getitem__
        olds, news = in_order_of_names(pairing.source.values(), known), in_order_of_names(pairing.target.values(), str)
        olds, news = untied(olds, news)
        wholes = units_of(olds, known), units_of(news, str)
        arrivals = [
            flow_of(graph, {name: at for at, unit in enumerate(units) for name in unit.roles.values()})
            for graph, units in zip(pairing.graphs, wholes, strict=True)
        ]
        self.cuts = cuts_of(wholes[0], arrivals[0]), cuts_of(wholes[1], arrivals[1])
        self.sides = (
            Layers(wholes[0], arrivals[0], split_fused(wholes[0], wholes[1], self.cuts[0])),
            Layers(wholes[1], arrivals[1], split_fused(wholes[1], wholes[0], self.cuts[1])),
        )
        self._alone: dict[str, Colouring] = {}

    def numbers(self, old: Unit, new: Unit) -> Numbers | None:
        """Two units as nodes; None where one is in no network."""
        return _both(self.sides[0].number(old), self.sides[1].number(new))

    def named(self, old: str, new: str) -> Numbers | None:
        return _both(self.sides[0].place.get((old, None)), self.sides[1].place.get((new, None)))

    def by_name(self, pairing: Pairing) -> list[Numbers]:
        found = (self.named(match.old, new) for new, match in pairing.matches.items())
        return [numbers for numbers in found if numbers is not None]

    def _colouring(self, level: str, known: Mapping[int, int]) -> Colouring:
        starts = self.sides[0].starts(), self.sides[1].starts()
        for one, other in known.items():
            starts[0][one] = starts[1][other] = ("partners", one)
        return Colouring([side.networks[level] for side in self.sides], starts)

    # --- pairs that cannot be

    def contradicted(self, pairs: Iterable[Numbers]) -> set[Numbers]:
        """The pairs that no way of laying one network on the other has."""
        known = set(pairs)
        found: set[Numbers] = set()
        for level in LEVELS if known else ():
            if level not in self._alone:
                self._alone[level] = self._colouring(level, {})
                for _ in self._alone[level].rounds():
                    pass
            colouring = self._alone[level]
            if colouring.alike():
                colours = dict(zip(colouring.places, colouring.colours, strict=True))
                found |= {pair for pair in known if colours.get((0, pair[0])) != colours.get((1, pair[1]))}
            elif level == LEVELS[0]:
                found |= self._crossed(sorted(known))
        return found

    def _crossed(self, ordered: list[Numbers]) -> set[Numbers]:
        """Pairs of one kind that come one after the other here, and the other way round there."""
        units = self.sides[0].units
        kinds: dict[object, int] = defaultdict(int)
        for number, (one, _) in enumerate(ordered):
            kinds[units[one].loose] |= 1 << number
        bits = [{pair[side]: 1 << number for number, pair in enumerate(ordered)} for side in (0, 1)]
        after, before = (_reached(self.sides[side].networks[LEVELS[0]], bits[side], side) for side in (0, 1))
        others = {pair: after.get(pair[0], 0) & before.get(pair[1], 0) for pair in ordered}
        crossed = {pair for pair in ordered if others[pair] & kinds[units[pair[0]].loose]}
        both = 0
        for pair in crossed:
            both |= others[pair]
        return crossed | {pair for number, pair in enumerate(ordered) if both >> number & 1}

    # --- pairs that are decided

    def decide(self, groups: Sequence[tuple[list[Unit], list[Unit]]], anchors: Iterable[Numbers]) -> list[tuple[Unit, Unit]]:
        """Pairs among the units that are open, given the partners that are known."""
        open_units, may_be = self._open(groups)
        known = dict(anchors)
        decided: list[tuple[Unit, Unit]] = []
        while all(open_units):
            pairs = {pair for pair in self._only_ones(known) if may_be(pair)}
            while bad := self._unfit(pairs, {**known, **dict(pairs)}):
                pairs -= bad
            if not pairs:
                break
            known.update(pairs)
            decided += [(open_units[0].pop(one), open_units[1].pop(other)) for one, other in sorted(pairs)]
        return decided

    def _open(self, groups: Sequence[tuple[list[Unit], list[Unit]]]) -> tuple[Sides, Callable[[Numbers], bool]]:
        """The units without partners, and whether two of them may be partners."""
        open_units: Sides = ({}, {})
        pools: tuple[dict[int, set[object]], dict[int, set[object]]] = (defaultdict(set), defaultdict(set))
        for number, group in enumerate(groups):
            for side, units in enumerate(group):
                for unit in units:
                    if (node := self.sides[side].number(unit)) is not None:
                        open_units[side][node] = unit
                        pools[side][node].add(number)
                        if len(group[0]) == len(group[1]) == 1:  # a pair that was taken back: the partner is elsewhere
                            pools[side][node].add(("taken back", unit.kind))

        def may_be(pair: Numbers) -> bool:
            if not (pair[0] in open_units[0] and pair[1] in open_units[1]) or pools[0][pair[0]].isdisjoint(pools[1][pair[1]]):
                return False
            old, new = open_units[0][pair[0]], open_units[1][pair[1]]
            return old.kind == new.kind and not conflicts(meaning(old.path), meaning(new.path))

        return open_units, may_be

    def _only_ones(self, known: Mapping[int, int]) -> list[Numbers]:
        """The layers that each side has one of, on any level and at any distance, where all levels agree."""
        said: dict[int, set[int]] = defaultdict(set)
        for level in LEVELS:
            for found in self._colouring(level, known).rounds():
                for one, other in found:
                    if isinstance(one, int) and isinstance(other, int) and one not in known:
                        said[one].add(other)
        pairs = [(one, others.pop()) for one, others in said.items() if len(others) == 1]
        news = Counter(other for _, other in pairs)
        return [pair for pair in pairs if news[pair[1]] == 1]

    def _unfit(self, pairs: set[Numbers], known: Mapping[int, int]) -> set[Numbers]:
        """The pairs whose neighbours with partners are not the partner's neighbours."""
        back, beside = {other: one for one, other in known.items()}, []
        for side, names in zip(self.sides, ({one: one for one in known}, back), strict=True):
            found: dict[Node, set[tuple[str, int]]] = defaultdict(set)
            for node, feeding in side.networks[LEVELS[0]].items():
                for _, other in feeding:
                    found[node].update([("fed by", names[other])] if other in names else [])
                    found[other].update([("feeds", names[node])] if node in names else [])
            beside.append(found)
        return {(one, other) for one, other in pairs if beside[0][one] != beside[1][other]}


def _reached(network: Network, bits: Mapping[int, int], side: int) -> dict[Node, int]:
    """Of each node those that it reaches (side 0) or that reach it (side 1), as bits; nothing where there is a circle."""
    before = {node: {other for _, other in feeding} for node, feeding in network.items()}
    try:
        order = [*TopologicalSorter(before).static_order()]  # what feeds comes first
    except CycleError:  # a layer that is used twice
        return {}
    found: dict[Node, int] = dict.fromkeys(order, 0)
    for node in order if side == 1 else reversed(order):
        for other in before.get(node, ()):
            if side == 1:
                found[node] |= found[other] | bits.get(other, 0)  # type: ignore[call-overload]
            else:
                found[other] |= found[node] | bits.get(node, 0)  # type: ignore[call-overload]
    return found


# --- the stage


def evidence_of(pairing: Pairing) -> Evidence | None:
    """What both models compute, compared; worked out once. None where there is nothing, or too much of it to be followed."""
    if pairing.evidence is None and pairing.graphs is not None:
        try:
            pairing.evidence = Evidence(pairing)
        except FlowTooLargeError:
            pairing.graphs = None
    evidence: Evidence | None = pairing.evidence
    return evidence


def doubt_contradicted(pairing: Pairing) -> None:
    """Doubt pairs by name that the computations contradict."""
    if (evidence := evidence_of(pairing)) is None:
        return
    wrong = evidence.contradicted(evidence.by_name(pairing))
    for new, match in list(pairing.matches.items()):
        if match.reason not in ("pair", "values") and evidence.named(match.old, new) in wrong:
            del pairing.matches[new]
            pairing.used.pop(match.old, None)
            pairing.doubt(new, [match.old], _WHY)


def settle(pairing: Pairing, evidence: Evidence, alignment: Alignment) -> None:
    """Take back what the computations contradict, and pair what they decide among the units that are open."""
    numbered = {id(pair): evidence.numbers(pair.old, pair.new) for pair in alignment.pairs}
    by_name = evidence.by_name(pairing)
    wrong = evidence.contradicted([*by_name, *(numbers for numbers in numbered.values() if numbers is not None)])
    alignment.take_back([pair for pair in alignment.pairs if numbered[id(pair)] in wrong])
    kept = [numbers for pair in alignment.pairs if (numbers := numbered[id(pair)]) is not None]
    decided = evidence.decide(alignment.undecided, [*by_name, *kept])
    alignment.pairs += (found := [Pair(old, new, "graph") for old, new in decided])
    undecided, alignment.undecided = alignment.undecided, []
    for olds, news in undecided:
        alignment.leave(olds, news, found)
