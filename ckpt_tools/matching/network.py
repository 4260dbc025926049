"""The layers of two models as networks to compare: a node for each unit; a part of a fused one is a node of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.matching.feeds import Feed, Gathered, Hidden, united
from ckpt_tools.matching.flow import ROLES, Arrival, flow_of
from ckpt_tools.matching.fused import Cuts, split_fused
from ckpt_tools.matching.order import in_order_of_names
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.refinement import Label, Network, Node
from ckpt_tools.matching.units import Unit, units_of, untied
from ckpt_tools.tree.graphs import Graph

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
