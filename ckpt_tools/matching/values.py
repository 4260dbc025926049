"""The stage of values: two copies of one network under other names, also one that was trained on from the other.

A few numbers of each tensor are compared, from all over it, and digests of those that agree. Two tensors that were trained
apart have a correlation near 0, so numbers that go up and down together show one tensor. What is constant (ones, zeros), a
mask, and integers that count say nothing. Matrices that agree once one of them is transposed are offers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, prod, sqrt
from operator import mul
from typing import NamedTuple, TypeAlias

from ckpt_tools.matching.order import turned
from ckpt_tools.matching.pairing import TRANSPOSED, Pairing
from ckpt_tools.matching.records import Offer, Param, Shape

EQUAL, ALIKE = 0.99, 0.95  # how sure a pair is
_FEWEST, _FEWEST_ALIKE = 8, 32  # numbers: fewer go up and down together by accident
_LEAST, _MOST_OTHER = 0.9, 0.6  # correlations: of a pair, and of either with anything else
_MOST_COMPARED = 250_000  # pairs of tensors of one shape
_CONSTANT = 1e-9
_MASK = 2  # different numbers
_KERNEL = 4  # dimensions: [out, channels, height, width]
Curve: TypeAlias = tuple[float, ...]  # numbers less their mean, of length 1
Key: TypeAlias = tuple[Sequence[float], bytes | None]  # a sample, and the digest of what it is not all of


class _Told(NamedTuple):
    """What tells a tensor: equal keys are equal numbers, `curve` is what a sample does, whatever its scale."""

    key: Key
    curve: Curve


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
    offers = _turned(pairing, found)
    for row in offers:
        shapes = (pairing.source[row.old].shape,), (pairing.target[row.new].shape,)
        pairing.offer(Offer("transpose", "values", (row.old,), (row.new,), *shapes, row.confidence))
    for row in [*found, *_beside(pairing, [*found, *offers])]:
        pairing.pair(row.old, row.new, "values", row.confidence)


def _by_shape(params: Iterable[Param], *, rows: bool) -> Mapping[Shape, dict[str, _Told]]:
    """The tensors of each shape; a patch embedding that is a convolution goes with one that is linear where `rows` is said."""
    found: dict[Shape, dict[str, _Told]] = defaultdict(dict)
    for param in params:
        if (told := _told(param.sample, param.digest)) is not None:
            is_kernel = rows and len(param.shape) == _KERNEL
            shape = (param.shape[0], prod(param.shape[1:])) if is_kernel else param.shape
            found[shape][param.name] = told
    return found


def _turned(pairing: Pairing, found: Sequence[_Found]) -> list[_Found]:
    """Matrices of which one is the other's transpose, among those that are nothing's equal as they are."""
    taken = {row.old for row in found}, {row.new for row in found}
    olds: dict[Shape, dict[str, _Told]] = defaultdict(dict)
    news: dict[Shape, dict[str, _Told]] = defaultdict(dict)
    for param in pairing.sources_left():
        is_matrix = len(param.shape) == 2 and param.sample is not None and param.name not in taken[0]
        if is_matrix and (told := _told(turned(param.sample or (), param.shape), None)) is not None:
            olds[param.shape[::-1]][param.name] = told
    for param in pairing.targets_left():
        is_matrix = len(param.shape) == 2 and param.name not in taken[1]
        if is_matrix and (told := _told(param.sample, param.digest)) is not None:
            news[param.shape][param.name] = told
    rows = [row for shape in olds.keys() & news.keys() for row in _pairs(olds[shape], news[shape])]
    return [_Found(row.old, row.new, min(row.confidence, TRANSPOSED)) for row in rows]


def _told(sample: Sequence[float] | None, digest: bytes | None) -> _Told | None:
    curve = _curve(sample)
    return None if curve is None or sample is None else _Told((sample, digest), curve)


def _curve(sample: Sequence[float] | None) -> Curve | None:
    """What a sample does, whatever its scale; None where it is too short, constant, a mask, a counter, or no number."""
    if sample is None or len(sample) < _FEWEST or not all(map(isfinite, sample)):
        return None
    if len(set(sample)) <= _MASK or (all(map(float.is_integer, sample)) and list(sample) == sorted(sample)):
        return None
    mean = fsum(sample) / len(sample)
    rest = [value - mean for value in sample]
    length = sqrt(fsum(map(mul, rest, rest)))
    if length <= _CONSTANT * max(map(abs, sample)) * len(sample):
        return None
    return tuple(value / length for value in rest)


def _pairs(olds: dict[str, _Told], news: dict[str, _Told]) -> list[_Found]:
    """Pairs among tensors of one shape: the equal ones first."""
    found = _equal(olds, news)
    taken = {row.old for row in found}, {row.new for row in found}
    left, right = (
        {name: told.curve for name, told in side.items() if name not in gone and len(told.curve) >= _FEWEST_ALIKE}
        for side, gone in zip((olds, news), taken, strict=True)
    )
    return found + (_alike(left, right) if len(left) * len(right) <= _MOST_COMPARED else [])


def _equal(olds: dict[str, _Told], news: dict[str, _Told]) -> list[_Found]:
    names: dict[Key, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((olds, news)):
        for name, told in tensors.items():
            names[told.key][side].append(name)
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
