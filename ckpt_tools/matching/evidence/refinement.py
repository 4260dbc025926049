"""Colours of the layers of two networks: equal ones where all that feeds them, and all that they feed, is alike.

The first-order Weisfeiler-Leman test on both networks at once. Nothing depends on the order in which a file has its names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from random import Random
from typing import Any, TypeAlias

from ckpt_tools.matching.evidence.gathered import Gathered

Node: TypeAlias = Hashable
Label: TypeAlias = Hashable
Sums: TypeAlias = frozenset[tuple[Label, int]]
Colours: TypeAlias = tuple[dict[Node, int], dict[Node, int]]
_MOST_STEPS = 3_000_000


class Marks(dict[Hashable, int]):
    """A number of 128 bits for everything that is looked up. Sums of them are equal where the same was summed up."""

    def __init__(self) -> None:
        self._random = Random(0)

    def __missing__(self, key: Hashable) -> int:
        self[key] = found = self._random.getrandbits(128)
        return found


class Network:
    """Layers, and of each what it is fed by: labels and layers.

    Attributes:
        nodes: all layers. feeding: what a layer is fed by. sets: all of those sets, each behind its base.
        places: layer -> label -> the sets that have both among what their base lacks.
    """

    def __init__(self, feeding: Mapping[Node, Gathered[tuple[Label, Node]]]) -> None:
        self.feeding = {node: found for node, found in feeding.items() if found.items}
        self.sets: dict[int, Gathered[tuple[Label, Node]]] = {}
        for found in self.feeding.values():
            self._add(found)
        self.places: dict[Node, dict[Label, list[int]]] = defaultdict(lambda: defaultdict(list))
        for key, each in self.sets.items():
            for label, node in each.more:
                self.places[node][label].append(key)
        self.nodes: set[Node] = {*self.feeding, *self.places}
        self.size = len(self.nodes) + len(self.feeding) + 2 * sum(1 + len(each.more) for each in self.sets.values())

    def _add(self, found: Gathered[tuple[Label, Node]]) -> None:
        todo = []
        at: Gathered[tuple[Label, Node]] | None = found
        while at is not None and id(at) not in self.sets:
            todo.append(at)
            at = at.base
        self.sets.update((id(each), each) for each in reversed(todo))

    def before(self, marks: Mapping[Hashable, int], values: Mapping[Any, Hashable]) -> dict[Node, int]:
        """Of each layer the sum of the marks of what feeds it: of labels, and of the values of layers that have one."""
        sums: dict[int, int] = {}
        for key, each in self.sets.items():
            start = 0 if each.base is None else sums[id(each.base)]
            sums[key] = start + sum(marks[label, values[node]] for label, node in each.more if node in values)
        return {node: sums[id(found)] for node, found in self.feeding.items()}

    def behind(self, marks: Mapping[Hashable, int], values: Mapping[Any, Hashable]) -> dict[Node, Sums]:
        """Of each layer what it feeds: for each label the sum of the marks of the layers' values."""
        sums = dict.fromkeys(self.sets, 0)
        for node, found in self.feeding.items():
            if node in values:
                sums[id(found)] += marks[values[node]]
        for key, each in reversed(self.sets.items()):
            if each.base is not None:
                sums[id(each.base)] += sums[key]
        return {
            node: frozenset((label, sum(map(sums.__getitem__, keys))) for label, keys in places.items())
            for node, places in self.places.items()
        }

    def ways_on(self) -> dict[Hashable, list[Hashable]]:
        """Each layer and each set (by a number) with what it goes into: layers into sets, these into larger ones and layers."""
        found: dict[Hashable, list[Hashable]] = {node: [] for node in self.nodes}
        names = {key: ("set", number) for number, key in enumerate(self.sets)}
        found.update((name, []) for name in names.values())
        for key, each in self.sets.items():
            if each.base is not None:
                found[names[id(each.base)]].append(names[key])
            for _, node in each.more:
                found[node].append(names[key])
        for node, each in self.feeding.items():
            found[names[id(each)]].append(node)
        return found


def rounds(
    networks: tuple[Network, Network], start: tuple[Mapping[Node, Hashable], Mapping[Node, Hashable]]
) -> Iterator[Colours]:
    """The colours after looking one, two, three ... edges far, until they say no more; a colour is one on both sides."""
    table: dict[Hashable, int] = {}
    colours: Colours = tuple(  # type: ignore[assignment]
        {node: table.setdefault(("start", start[side][node]), len(table)) for node in networks[side].nodes} for side in (0, 1)
    )
    steps = sum(network.size for network in networks)
    kinds, marks = _kinds(colours), Marks()
    for _ in range(max(1, _MOST_STEPS // max(1, steps))):
        table = {}
        colours = _further(networks[0], colours[0], marks, table), _further(networks[1], colours[1], marks, table)
        yield colours
        if kinds == (kinds := _kinds(colours)):
            return


def _further(network: Network, colours: dict[Node, int], marks: Marks, table: dict[Hashable, int]) -> dict[Node, int]:
    """A colour for each layer's colour with the colours before and behind it; how many of each there are counts."""
    before, behind = network.before(marks, colours), network.behind(marks, colours)
    return {
        node: table.setdefault((colour, before.get(node, 0), behind.get(node)), len(table)) for node, colour in colours.items()
    }


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
