"""The layers of two models as networks to compare: a node for each unit; a part of a fused one is a node of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ckpt_tools.matching.evidence.feeds import End, Feed, Hidden
from ckpt_tools.matching.evidence.flow import FlowTooLargeError, flow_of
from ckpt_tools.matching.evidence.gathered import Gathered, united
from ckpt_tools.matching.evidence.operations import ROLES
from ckpt_tools.matching.evidence.refinement import Label, Network, Node
from ckpt_tools.matching.fused import Cuts, split_fused
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.units import Path, Unit, units_of, untied
from ckpt_tools.tree.graphs import Graph

Group: TypeAlias = tuple[int, ...]
# How much of an edge counts: that it is there; what part its numbers play in an attention or a product; all that is done.
LEVELS = ("plain", "roles", "all")


class Layers:
    """One side: its units by number, and the networks of them.

    Attributes:
        units: all of the side, fused ones split where the other side has them apart. place: (tensor, part) -> number.
        networks: by level.
    """

    def __init__(self, units: list[Unit], graph: Graph) -> None:
        self.units = units
        self.place: dict[tuple[str, int | None], int] = {}
        self.rows: dict[int, tuple[int, int]] = {}
        groups: dict[str, Group] = {}
        for number, unit in enumerate(units):
            part = None if unit.fused is None else unit.fused[1]
            for name in unit.roles.values():
                self.place[name, part] = number
                groups[name] = (*groups.get(name, ()), number) if part is not None else (number,)
        for group in set(groups.values()):
            self._measure(group)
        arrivals: dict[Node, list[Gathered[Feed]]] = defaultdict(list)
        for arrival in flow_of(graph, groups):
            for node in self._nodes(arrival.into, arrival.rows):
                arrivals[node].append(arrival.feeds)
        self.networks = {level: self._network(arrivals, level) for level in LEVELS}

    def _measure(self, group: Group) -> None:
        """Which rows of a fused layer its parts are."""
        at = 0
        for number in group if len(group) > 1 else ():
            rows = self.units[number].shapes["weight"][0]
            self.rows[number] = at, at + rows
            at += rows

    def _nodes(self, owner: object, rows: tuple[int, int] | None) -> list[Node]:
        """The nodes of a layer that some of its rows are in."""
        if isinstance(owner, End | Hidden):
            return [owner]
        assert isinstance(owner, tuple)
        if rows is None or len(owner) == 1:
            return [*owner]
        return [number for number in owner if self.rows[number][0] < rows[1] and rows[0] < self.rows[number][1]]

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


def layers_of(pairing: Pairing, graphs: tuple[Graph, Graph]) -> tuple[Layers, Layers]:
    """Both sides, all of their tensors."""
    olds, news = untied([*pairing.source.values()], [*pairing.target.values()])
    known: Mapping[str, str] = pairing.known
    left, right = units_of(olds, known.__getitem__), units_of(news, lambda name: name)
    cuts = cuts_of(pairing, graphs)
    return Layers(split_fused(left, right, cuts[0]), graphs[0]), Layers(split_fused(right, left, cuts[1]), graphs[1])


def cuts_of(pairing: Pairing, graphs: tuple[Graph, Graph]) -> tuple[Cuts, Cuts]:
    """What the layers of both sides are seen to be divided into; worked out once."""
    if pairing.cuts is None:
        pairing.cuts = _both_cuts(pairing, graphs)
    cuts: tuple[Cuts, Cuts] = pairing.cuts
    return cuts


def _both_cuts(pairing: Pairing, graphs: tuple[Graph, Graph]) -> tuple[Cuts, Cuts]:
    left = units_of(pairing.source.values(), pairing.known.__getitem__)
    right = units_of(pairing.target.values(), lambda name: name)
    try:
        return _cuts(left, graphs[0]), _cuts(right, graphs[1])
    except FlowTooLargeError:
        return {}, {}


def _cuts(units: list[Unit], graph: Graph) -> Cuts:
    """Of layers whose rows go different ways: the parts, which follow one another and are all of it."""
    owners = {name: unit.path for unit in units for name in unit.roles.values()}
    rows: dict[Path, dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    for feed in {feed for arrival in flow_of(graph, owners) for feed in arrival.feeds.items}:
        if feed.rows is not None and isinstance(feed.owner, tuple) and not isinstance(feed.owner, Hidden):
            rows[feed.owner][feed.rows] |= feed.words & {"query", "key"}
    found: dict[Path, list[tuple[str, int]]] = {}
    for unit in units:
        parts = sorted(rows.get(unit.path, {}).items())
        ends = [0, *(last for (_, last), _ in parts)]
        follow = all(first == end for ((first, _), _), end in zip(parts, ends, strict=False))
        if len(parts) > 1 and follow and ends[-1] == unit.shapes.get("weight", (0,))[0]:
            names = _part_names([words for _, words in parts])
            found[unit.path] = [(name, last - first) for name, ((first, last), _) in zip(names, parts, strict=True)]
    return found


def _part_names(roles: list[set[str]]) -> list[str]:
    """What the parts are, where an attention says it; numbers else, which no name speaks against."""
    names = [next(iter(words)) if len(words) == 1 else f"part{number}" for number, words in enumerate(roles)]
    if sorted(map(sorted, roles)) == [[], ["key"], ["query"]]:
        names[roles.index(set())] = "value"
    return names
