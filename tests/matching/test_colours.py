"""Colours of layers: looking again at a few gives what looking at all of them gives; the work grows as a chain does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterator

import pytest
import torch
from torch import Tensor, nn

from ckpt_tools.fit.targets import read_target
from ckpt_tools.matching.evidence.gathered import Gathered
from ckpt_tools.matching.evidence.refinement import Colouring, Network
from tests.matching.test_match_graphs import compared, graphs_of
from tests.matching.test_match_structure import steps
from tests.support import opaque

Edge = tuple[Hashable, Hashable]
Place = tuple[int, Hashable]


def network(draw: random.Random, size: int) -> Network:
    """Layers that are fed by others, a few of them by sets that grow."""
    feeding: dict[Hashable, Gathered[Edge]] = {}
    sets: list[Gathered[Edge]] = [Gathered()]
    for node in range(size):
        edges = frozenset((draw.choice("ab"), draw.randrange(size)) for _ in range(draw.randrange(3)))
        feeding[node] = draw.choice(sets[-3:]).with_more(edges)
        sets.append(feeding[node])
    return Network(feeding)


def by_the_book(networks: tuple[Network, Network], start: list[dict[Hashable, Hashable]]) -> Iterator[dict[Place, Hashable]]:
    """The Weisfeiler-Leman test as it is defined: every layer again in every round."""
    edges = [[(label, one, node) for node, found in each.feeding.items() for label, one in found.items] for each in networks]
    colours: dict[Place, Hashable] = {(side, node): start[side][node] for side in (0, 1) for node in networks[side].nodes}
    table: dict[Hashable, int] = {}
    while True:
        said = {
            (side, node): (
                colour,
                frozenset(Counter((label, colours[side, one]) for label, one, to in edges[side] if to == node).items()),
                frozenset(Counter((label, colours[side, to]) for label, one, to in edges[side] if one == node).items()),
            )
            for (side, node), colour in colours.items()
        }
        before, colours = colours, {place: table.setdefault(text, len(table)) for place, text in said.items()}
        yield colours
        if len(set(before.values())) == len(set(colours.values())):
            return


def pairs_of(colours: dict[Place, Hashable]) -> set[tuple[Hashable, Hashable]]:
    """The layers whose colour each side has once."""
    count = Counter((side, colour) for (side, _), colour in colours.items())
    ones, others = (
        {colour: node for (side, node), colour in colours.items() if side == wanted and count[side, colour] == 1}
        for wanted in (0, 1)
    )
    return {(node, others[colour]) for colour, node in ones.items() if count[1, colour] == 1 and count[0, colour] == 1}


@pytest.mark.parametrize("seed", range(60))
def test_what_is_looked_at_again_is_enough(seed: int) -> None:
    """In every round the same layers are alike, and the same are the only ones, as where all are looked at."""
    draw = random.Random(seed)
    one = network(draw, draw.randrange(2, 14))
    networks = one, one if seed % 3 == 0 else network(draw, draw.randrange(2, 14))
    start: list[dict[Hashable, Hashable]] = [{node: draw.randrange(2) for node in each.nodes} for each in networks]
    if seed % 3 == 0:
        start[1] = start[0]
    colouring = Colouring(networks, (start[0], start[1]))
    said: set[tuple[Hashable, Hashable]] = set()
    rounds = list(by_the_book(networks, start))
    for number, found in enumerate(colouring.rounds()):
        colours = rounds[min(number, len(rounds) - 1)]
        said.update(found)
        now = {(side, node): colour for side in (0, 1) for node, colour in colouring.sides[side].colours.items()}
        assert len(set(zip(now.values(), (colours[place] for place in now), strict=True))) == len(set(now.values()))
        assert len(set(now.values())) == len(set(colours.values()))
        assert set(found) <= pairs_of(colours) <= said
    assert len(set(now.values())) == len(set(rounds[-1].values()))
    counts = (
        Counter(rounds[-1][place] for place in now if place[0] == 0),
        Counter(rounds[-1][place] for place in now if place[0]),
    )
    assert colouring.alike() == (counts[0] == counts[1])


def chain(names: list[str]) -> nn.Module:
    """Layers of one shape, one behind the other; defined in the order of the alphabet."""

    def computed(net: nn.Module, x: Tensor) -> Tensor:
        for name in names:
            x = torch.relu(getattr(net, name)(x))
        return x

    return opaque.Layers(opaque.linear(" ".join(sorted(names)), 4), computed)


def chains(length: int) -> tuple[nn.Module, nn.Module, dict[str, str]]:
    """Two chains whose names say nothing, and which layer is which."""
    words = [
        f"{prefix}{number:04d}".translate(str.maketrans("0123456789", "bcdfghjkmp"))
        for prefix in "xz"
        for number in range(length)
    ]
    olds, news = words[:length], words[length:]
    random.Random(0).shuffle(olds)
    random.Random(1).shuffle(news)
    return chain(olds), chain(news), dict(zip(olds, news, strict=True))


def test_a_chain_of_equal_layers_is_decided_from_its_ends() -> None:
    """A hundred layers of one shape: each is as far from an end as its partner."""
    old, new, truth = chains(100)
    found = compared(old, new, ["2x4"])
    assert {row.old.partition(".")[0]: row.new.partition(".")[0] for row in found.matched} == truth


def test_the_work_on_a_chain_grows_with_its_length() -> None:
    """Four times as many layers of one shape take four times the steps, about, and not sixteen."""
    counts = []
    for length in (60, 240):
        old, new, _ = chains(length)
        counts.append(steps(read_target(old).params, read_target(new).params, graphs_of(old, new, ["2x4"])))
    assert counts[1] < 6 * counts[0]
