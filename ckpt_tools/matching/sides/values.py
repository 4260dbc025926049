"""The stage of values: two copies of one network under other names, also one that was trained on from the other.

A few numbers of each tensor are compared, from its start to its end. Two that were trained apart have a correlation near 0, so
numbers that are equal, or go up and down together, show one tensor. What is constant (ones, zeros) says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, prod, sqrt
from operator import mul
from typing import TypeAlias

from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.params import Param
from ckpt_tools.matching.records import Shape

EQUAL, ALIKE = 0.99, 0.95  # how sure a pair is
_FEWEST, _FEWEST_ALIKE = 8, 32  # numbers: fewer go up and down together by accident
_LEAST, _MOST_OTHER = 0.9, 0.6  # correlations: of a pair, and of either with anything else
_MOST_COMPARED = 250_000  # pairs of tensors of one shape
_CONSTANT = 1e-9
_KERNEL = 4  # dimensions: [out, channels, height, width]
Curve: TypeAlias = tuple[float, ...]  # numbers less their mean, of length 1


@dataclass(frozen=True, slots=True)
class _Found:
    old: str
    new: str
    confidence: float


def match_values(pairing: Pairing) -> None:
    """Pair what is equal or alike in its numbers and in nothing else, and what lies beside it in the same module."""
    rows = pairing.allow_reshape
    olds, news = _by_shape(pairing.sources_left(), rows=rows), _by_shape(pairing.targets_left(), rows=rows)
    found: list[_Found] = []
    for shape in olds.keys() & news.keys():
        found += _pairs(olds[shape], news[shape])
    for row in [*found, *_beside(pairing, found)]:
        pairing.pair(row.old, row.new, "values", row.confidence)


def _by_shape(params: Iterable[Param], *, rows: bool) -> Mapping[Shape, dict[str, Curve]]:
    """The tensors of each shape; a patch embedding that is a convolution goes with one that is linear where `rows` is said.

    Equal numbers in equal places show that both have their columns as channel, height, width; no other order gives them.
    """
    found: dict[Shape, dict[str, Curve]] = defaultdict(dict)
    for param in params:
        if (curve := _curve(param.sample)) is not None:
            is_kernel = rows and len(param.shape) == _KERNEL
            shape = (param.shape[0], prod(param.shape[1:])) if is_kernel else param.shape
            found[shape][param.name] = curve
    return found


def _curve(sample: Sequence[float] | None) -> Curve | None:
    """What a sample does, whatever its scale; None where it is too short, constant, or no number."""
    if sample is None or len(sample) < _FEWEST or not all(map(isfinite, sample)):
        return None
    mean = fsum(sample) / len(sample)
    rest = [value - mean for value in sample]
    length = sqrt(fsum(map(mul, rest, rest)))
    if length <= _CONSTANT * max(map(abs, sample)) * len(sample):
        return None
    return tuple(value / length for value in rest)


def _pairs(olds: dict[str, Curve], news: dict[str, Curve]) -> list[_Found]:
    """Pairs among tensors of one shape: the equal ones first."""
    found = _equal(olds, news)
    taken = {row.old for row in found}, {row.new for row in found}
    left = {name: curve for name, curve in olds.items() if name not in taken[0] and len(curve) >= _FEWEST_ALIKE}
    right = {name: curve for name, curve in news.items() if name not in taken[1] and len(curve) >= _FEWEST_ALIKE}
    return found + (_alike(left, right) if len(left) * len(right) <= _MOST_COMPARED else [])


def _equal(olds: dict[str, Curve], news: dict[str, Curve]) -> list[_Found]:
    names: dict[Curve, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, curves in enumerate((olds, news)):
        for name, curve in curves.items():
            names[curve][side].append(name)
    return [_Found(old[0], new[0], EQUAL) for old, new in names.values() if len(old) == len(new) == 1]


def _alike(olds: dict[str, Curve], news: dict[str, Curve]) -> list[_Found]:
    """Pairs that go up and down together, when neither does so with anything else."""
    scores = {(old, new): sum(map(mul, one, other)) for old, one in olds.items() for new, other in news.items()}
    close = {pair for pair, score in scores.items() if score >= _MOST_OTHER}
    olds_close, news_close = (defaultdict[str, int](int) for _ in range(2))
    for old, new in close:
        olds_close[old] += 1
        news_close[new] += 1
    return [
        _Found(old, new, ALIKE)
        for old, new in scores
        if (old, new) in close and scores[old, new] >= _LEAST and olds_close[old] == news_close[new] == 1
    ]


def _beside(pairing: Pairing, found: Sequence[_Found]) -> list[_Found]:
    """What has the same last name and shape in two modules all of whose pairs are of these two: biases of zeros, counters."""
    modules: dict[str, set[str]] = defaultdict(set)
    back: dict[str, set[str]] = defaultdict(set)
    sure: dict[tuple[str, str], float] = {}
    for row in found:
        old, new = row.old.rpartition(".")[0], row.new.rpartition(".")[0]
        modules[old].add(new)
        back[new].add(old)
        sure[old, new] = min(row.confidence, sure.get((old, new), 1.0))
    taken = {row.old for row in found}, {row.new for row in found}
    free = {param.name for param in pairing.targets_left()} - taken[1]
    rows = []
    for param in pairing.sources_left():
        path, _, leaf = param.name.rpartition(".")
        others = modules.get(path, set())
        new = f"{next(iter(others), '')}.{leaf}"
        alone = bool(path) and len(others) == 1 and back[next(iter(others))] == {path}
        if alone and param.name not in taken[0] and new in free and pairing.target[new].shape == param.shape:
            rows.append(_Found(param.name, new, sure[path, next(iter(others))]))
    return rows
