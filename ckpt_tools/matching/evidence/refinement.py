"""Colours of the layers of two networks: equal ones where all that feeds them, and all that they feed, is alike.

The first-order Weisfeiler-Leman test on both networks at once. Nothing depends on the order in which a file has its names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

Node: TypeAlias = Hashable
Colours: TypeAlias = tuple[dict[Node, int], dict[Node, int]]
_MOST_STEPS = 3_000_000


class Network:
    """Layers and the labelled edges between them."""

    def __init__(self, edges: Sequence[tuple[Node, Hashable, Node]]) -> None:
        self.before: dict[Node, set[tuple[Hashable, Node]]] = defaultdict(set)
        self.behind: dict[Node, set[tuple[Hashable, Node]]] = defaultdict(set)
        self.nodes: set[Node] = set()
        for one, label, other in edges:
            self.behind[one].add((label, other))
            self.before[other].add((label, one))
            self.nodes |= {one, other}

    @property
    def size(self) -> int:
        """How much there is to look at."""
        return len(self.nodes) + sum(map(len, self.before.values())) + sum(map(len, self.behind.values()))


def rounds(
    networks: tuple[Network, Network], start: tuple[Mapping[Node, Hashable], Mapping[Node, Hashable]]
) -> Iterator[Colours]:
    """The colours after looking one, two, three ... edges far, until they say no more; a colour is one on both sides."""
    table: dict[Hashable, int] = {}
    colours: Colours = tuple(  # type: ignore[assignment]
        {node: table.setdefault(("start", start[side][node]), len(table)) for node in networks[side].nodes} for side in (0, 1)
    )
    steps = sum(network.size for network in networks)
    kinds = _kinds(colours)
    for _ in range(max(1, _MOST_STEPS // max(1, steps))):
        table = {}
        colours = tuple(  # type: ignore[assignment]
            {node: table.setdefault(_around(network, own, node), len(table)) for node in network.nodes}
            for network, own in zip(networks, colours, strict=True)
        )
        yield colours
        if kinds == (kinds := _kinds(colours)):
            return


def _around(network: Network, colours: dict[Node, int], node: Node) -> Hashable:
    """A layer's colour, with the colours before and behind it; how many of each there are counts."""
    return colours[node], _seen(network.before, colours, node), _seen(network.behind, colours, node)


def _seen(edges: Mapping[Node, set[tuple[Hashable, Node]]], colours: dict[Node, int], node: Node) -> Hashable:
    return frozenset(Counter((label, colours[other]) for label, other in edges.get(node, ())).items())


def _kinds(colours: Colours) -> int:
    return len({*colours[0].values(), *colours[1].values()})


def alike(colours: Colours) -> bool:
    """Whether both networks have every colour as often: as far as colours can tell they are one."""
    return Counter(colours[0].values()) == Counter(colours[1].values())


def only_ones(colours: Colours) -> Iterator[tuple[Node, Node]]:
    """The layers whose colour each side has once."""
    nodes: list[dict[int, list[Node]]] = [defaultdict(list), defaultdict(list)]
    for side, found in enumerate(colours):
        for node, colour in found.items():
            nodes[side][colour].append(node)
    for colour, olds in nodes[0].items():
        news = nodes[1].get(colour, ())
        if len(olds) == len(news) == 1:
            yield olds[0], news[0]
