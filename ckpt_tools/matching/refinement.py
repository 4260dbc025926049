"""Colours of the layers of two networks: equal ones where all that feeds them, and all that they feed, is alike.

The first-order Weisfeiler-Leman test on both networks at once. Only what lies beside a layer whose colour is new is looked at
again, and of a colour that is divided the largest part keeps it (Hopcroft): a long chain costs as many steps as it has layers,
about, and not their square. Nothing depends on the order in which a file has its names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any, TypeAlias

from ckpt_tools.matching.feeds import Gathered

Node: TypeAlias = Hashable
Label: TypeAlias = Hashable
Sums: TypeAlias = frozenset[tuple[Label, int]]
_MOST_STEPS = 3_000_000
_Known: TypeAlias = Mapping[Node, Hashable]
_Place: TypeAlias = tuple[int, Node]  # a layer of one of the two sides


class Marks(dict[Hashable, int]):
    """A number of 128 bits for everything that is looked up. Sums of them are equal where the same was summed up."""

    def __init__(self) -> None:
        self._random = Random(0)

    def __missing__(self, key: Hashable) -> int:
        self[key] = found = self._random.getrandbits(128)
        return found


class Network:
    """Layers, and of each what it is fed by: labels and layers."""

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


class _Side:
    """One network with the sums of the marks of its colours, which follow what colours become."""

    def __init__(self, network: Network, colours: dict[Node, int], marks: Marks) -> None:
        self.network, self.colours, self.marks = network, colours, marks
        self.numbers = {key: number for number, key in enumerate(network.sets)}
        sets = list(network.sets.values())
        self.base = [None if each.base is None else self.numbers[id(each.base)] for each in sets]
        self.more = [each.more for each in sets]
        self.grown: list[list[int]] = [[] for _ in sets]
        for number, base in enumerate(self.base):
            if base is not None:
                self.grown[base].append(number)
        self.feeding = {node: self.numbers[id(found)] for node, found in network.feeding.items()}
        self.fed: list[list[Node]] = [[] for _ in sets]
        for node, number in self.feeding.items():
            self.fed[number].append(node)
        self.places = {
            node: [(label, [self.numbers[key] for key in keys]) for label, keys in places.items()]
            for node, places in network.places.items()
        }
        self.before, self.behind, self.changed = [0] * len(sets), [0] * len(sets), 0
        self.change(dict.fromkeys(colours))

    def said(self, node: Node) -> Hashable:
        """The colour of a layer, those before it and those behind it; how many of each there are counts."""
        number = self.feeding.get(node)
        behind = frozenset((label, sum([self.behind[one] for one in numbers])) for label, numbers in self.places.get(node, ()))
        return self.colours[node], 0 if number is None else self.before[number], behind

    def change(self, olds: Mapping[Node, int | None]) -> set[Node]:
        """Follow layers that have other colours than these now. All layers that lie beside them."""
        before: dict[int, int] = defaultdict(int)
        behind: dict[int, int] = defaultdict(int)
        marks = self.marks
        for node, old in olds.items():
            new = self.colours[node]
            for label, numbers in self.places.get(node, ()):
                change = marks[label, new] - (0 if old is None else marks[label, old])
                for number in numbers:
                    before[number] += change
            if (found := self.feeding.get(node)) is not None:
                behind[found] += marks[new] - (0 if old is None else marks[old])
        larger, smaller = self._spread(before, self.before, 1), self._spread(behind, self.behind, -1)
        self.changed = len(larger) + len(smaller)
        return {
            *(node for number in larger for node in self.fed[number]),
            *(node for number in smaller for _, node in self.more[number]),
        }

    def _spread(self, changes: dict[int, int], sums: list[int], way: int) -> list[int]:
        """Add changes to sums, and to those of all sets that grow out of these (way 1) or that these grew out of (-1)."""
        heap = [way * number for number in changes]
        heapify(heap)
        found = []
        while heap:
            number = way * heappop(heap)
            change = changes[number]
            sums[number] += change
            found.append(number)
            base = self.base[number]
            onward = self.grown[number] if way == 1 else [] if base is None else [base]
            for other in onward:
                if other not in changes:
                    heappush(heap, way * other)
                    changes[other] = 0
                changes[other] += change
        return found


class Colouring:
    """The colours of the layers of two networks; at first those of what is known of them."""

    def __init__(self, networks: tuple[Network, Network], start: tuple[_Known, _Known]) -> None:
        table: dict[Hashable, int] = {}
        colours = [
            {node: table.setdefault(known[node], len(table)) for node in network.nodes}
            for network, known in zip(networks, start, strict=True)
        ]
        marks = Marks()
        self.sides = _Side(networks[0], colours[0], marks), _Side(networks[1], colours[1], marks)
        self.members: dict[int, set[_Place]] = defaultdict(set)
        for side, found in enumerate(colours):
            for node, colour in found.items():
                self.members[colour].add((side, node))
        self.count = len(table)

    def rounds(self) -> Iterator[list[tuple[Node, Node]]]:
        """Look one, two, three ... edges far until that says no more. Each time: what is now the only one of a colour."""
        todo = {place for members in self.members.values() for place in members}
        touched = set(self.members)
        steps = 0
        while todo and steps <= _MOST_STEPS:
            before = self._divide(todo)
            for number, olds in enumerate(before):
                touched.update(olds.values(), (self.sides[number].colours[node] for node in olds))
            yield [*self._only_ones(touched)]
            touched = set()
            todo = {(number, node) for number, side in enumerate(self.sides) for node in side.change(before[number])}
            steps += len(todo) + sum(side.changed for side in self.sides)

    def _divide(self, places: Iterable[_Place]) -> tuple[dict[Node, int], dict[Node, int]]:
        """Give layers that are no longer alike colours of their own; the old ones of those that have another now."""
        groups: dict[Hashable, set[_Place]] = defaultdict(set)
        for side, node in places:
            groups[self.sides[side].said(node)].add((side, node))
        parts: dict[int, list[set[_Place]]] = defaultdict(list)
        for group in groups.values():
            side, node = next(iter(group))
            parts[self.sides[side].colours[node]].append(group)
        olds: tuple[dict[Node, int], dict[Node, int]] = ({}, {})
        for colour, divided in parts.items():
            for part in _but_the_largest(self.members[colour], divided):
                self._recolour(part, olds)
        return olds

    def _recolour(self, part: set[_Place], olds: tuple[dict[Node, int], dict[Node, int]]) -> None:
        """One part of the layers of a colour gets a new one."""
        for side, node in part:
            colours = self.sides[side].colours
            olds[side][node] = colours[node]
            colours[node] = self.count
        side, node = next(iter(part))
        self.members[olds[side][node]] -= part
        self.members[self.count] = part
        self.count += 1

    def _only_ones(self, colours: Iterable[int]) -> Iterator[tuple[Node, Node]]:
        """The layers whose colour each side has once."""
        for members in map(self.members.__getitem__, colours):
            by_side = dict(members) if len(members) == len(self.sides) else {}
            if len(by_side) == len(self.sides):
                yield by_side[0], by_side[1]

    def alike(self) -> bool:
        """Whether both networks have every colour as often: as far as colours can tell they are one."""
        return all(2 * sum(side for side, _ in members) == len(members) for members in self.members.values())

    def same(self, one: Node, other: Node) -> bool:
        """Whether a layer of the first network has the colour of one of the second."""
        return self.sides[0].colours.get(one) == self.sides[1].colours.get(other)


def _but_the_largest(whole: set[_Place], parts: list[set[_Place]]) -> list[set[_Place]]:
    """The parts of a whole, and what is in none, without the largest; all of them where there is more than one of its size."""
    rest = len(whole) - sum(map(len, parts))
    sizes = [rest, *map(len, parts)]
    largest = max(sizes) if sizes.count(max(sizes)) == 1 else -1
    others = [part for part in parts if len(part) != largest]
    return [*others, whole.difference(*parts)] if rest and rest != largest else others
