"""Batch norms by the layer that they follow: many have one shape, but the convolution before each is often certain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ckpt_tools.matching.blocks import Family, families_of
from ckpt_tools.matching.resolve import (
    Counted,
    UnitPair,
    comes_before,
    meaning,
)
from ckpt_tools.matching.units import Unit


def followed(units: Sequence[Unit]) -> dict[int, Unit]:
    """Batch norms (by id) -> the layer registered right before, when its outputs are as many; for kinds where all have one.

    Names must say so too: the norm is called one, or the two are numbered one after the other. Where a module registers its
    convolutions first and its norms behind them, the last convolution would seem to belong to the first norm; the other norms
    follow no layer then, and nothing is said about any of the kind.
    """
    found: dict[int, Unit] = {}
    broken: set[int] = set()
    families = families_of(units)
    norms = ((before, unit) for before, unit in pairwise([None, *units]) if unit is not None and "variance" in unit.roles)
    for before, unit in norms:
        if before is not None and _follows(before, unit, families):
            found[id(unit)] = before
        else:
            broken.add(unit.kind)
    return {id(unit): found[id(unit)] for unit in units if id(unit) in found and unit.kind not in broken}


def _follows(layer: Unit, norm: Unit, families: dict[Family, bool]) -> bool:
    weight = layer.shapes.get("weight", ())
    said = ("kind", "norm") in meaning(norm.path) or comes_before(layer.path, norm.path, 0, families)
    return said and len(weight) > 1 and norm.shapes["variance"] == weight[:1]


class Anchors:
    """The layers before the batch norms of both sides, and what is known about those layers."""

    def __init__(self, olds: Sequence[Unit], news: Sequence[Unit]) -> None:
        self.before = followed(olds), followed(news)
        self.pairs: dict[int, UnitPair] = {}

    def add(self, pair: UnitPair) -> None:
        """Two units are partners."""
        self.pairs[id(pair.old)] = pair

    def agree(self, old: Unit, new: Unit) -> bool | None:
        """Whether the layers before two batch norms are partners; None where that is not known."""
        one, other = self.before[0].get(id(old)), self.before[1].get(id(new))
        if one is None or other is None or id(one) not in self.pairs:
            return None
        return self.pairs[id(one)].new is other

    def agreeing(self, olds: Sequence[Unit], news: Sequence[Unit]) -> Iterator[tuple[Unit, Unit]]:
        """All pairs of batch norms that are known to follow partners."""
        behind: dict[int, list[Unit]] = defaultdict(list)
        for new in news:
            if (layer := self.before[1].get(id(new))) is not None:
                behind[id(layer)].append(new)
        for old in olds:
            layer = self.before[0].get(id(old))
            if layer is not None and id(layer) in self.pairs:
                yield from ((old, new) for new in behind.get(id(self.pairs[id(layer)].new), ()))

    def rests_on(self, old: Unit) -> frozenset[Counted]:
        """The counted families that the pair of the layer before rests on."""
        return self.pairs[id(self.before[0][id(old)])].counted
