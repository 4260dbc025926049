"""The stage of values: two copies of one network under other names, also one that was trained on from the other.

A few numbers of each tensor are compared, from all over it, and digests of those that agree. Two tensors that were trained
apart have a correlation near 0, so numbers that go up and down together show one tensor. What is constant (ones, zeros), a
mask, and integers that count say nothing. Matrices that agree once one of them is transposed are offers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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


class _Found(NamedTuple):
    old: str
    new: str
    confidence: float


_ByShape: TypeAlias = Mapping[Shape, dict[str, _Told]]


def match_values(pairing: Pairing) -> None:
    """Pair what is equal or alike in its numbers and in nothing else, and what lies beside it in the same module."""
    rows = pairing.allow_reshape
    found = _pairs(_by_shape(pairing.sources_left(), rows=rows), _by_shape(pairing.targets_left(), rows=rows))
    taken = {name for row in found for name in (("old", row.old), ("new", row.new))}
    # matrices of which one is the other's transpose, among those that are nothing's equal as they are
    olds = [param for param in pairing.sources_left() if len(param.shape) == 2 and ("old", param.name) not in taken]
    olds = [
        replace(param, sample=param.sample and turned(param.sample, param.shape), digest=None, shape=param.shape[::-1])
        for param in olds
    ]
    news = [param for param in pairing.targets_left() if len(param.shape) == 2 and ("new", param.name) not in taken]
    offers = [
        row._replace(confidence=min(row.confidence, TRANSPOSED))
        for row in _pairs(_by_shape(olds, rows=False), _by_shape(news, rows=False))
    ]
    for row in offers:
        shapes = (pairing.source[row.old].shape,), (pairing.target[row.new].shape,)
        pairing.offer(Offer("transpose", "values", (row.old,), (row.new,), *shapes, row.confidence))
    for row in [*found, *_beside(pairing, [*found, *offers])]:
        pairing.pair(row.old, row.new, "values", row.confidence)


def _by_shape(params: Iterable[Param], *, rows: bool) -> _ByShape:
    """The tensors of each shape; a patch embedding that is a convolution goes with one that is linear where `rows` is said."""
    found: dict[Shape, dict[str, _Told]] = defaultdict(dict)
    for param in params:
        if param.sample is not None and (curve := _curve(param.sample)) is not None:
            is_kernel = rows and len(param.shape) == _KERNEL
            shape = (param.shape[0], prod(param.shape[1:])) if is_kernel else param.shape
            found[shape][param.name] = _Told((param.sample, param.digest), curve)
    return found


def _curve(sample: Sequence[float]) -> Curve | None:
    """What a sample does, whatever its scale; None where it is too short, constant, a mask, a counter, or no number."""
    if len(sample) < _FEWEST or not all(map(isfinite, sample)):
        return None
    if len(set(sample)) <= _MASK or (all(map(float.is_integer, sample)) and list(sample) == sorted(sample)):
        return None
    mean = fsum(sample) / len(sample)
    rest = [value - mean for value in sample]
    length = sqrt(fsum(map(mul, rest, rest)))
    if length <= _CONSTANT * max(map(abs, sample)) * len(sample):
        return None
    return tuple(value / length for value in rest)


def _pairs(olds: _ByShape, news: _ByShape) -> list[_Found]:
    """Pairs among tensors of one shape: the equal ones first, then those that are alike when neither is like anything else."""
    found: list[_Found] = []
    for shape in olds.keys() & news.keys():
        left, right = dict(olds[shape]), dict(news[shape])
        names: dict[Key, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for side, tensors in enumerate((left, right)):
            for name, told in tensors.items():
                names[told.key][side].append(name)
        for old, new in names.values():
            if len(old) == len(new) == 1:
                found.append(_Found(old[0], new[0], EQUAL))
                del left[old[0]], right[new[0]]
        left, right = (
            {name: told for name, told in side.items() if len(told.curve) >= _FEWEST_ALIKE} for side in (left, right)
        )
        if len(left) * len(right) <= _MOST_COMPARED:
            found += _alike(left, right)
    return found


def _alike(olds: Mapping[str, _Told], news: Mapping[str, _Told]) -> Iterator[_Found]:
    scores = {(old, new): sum(map(mul, one.curve, two.curve)) for old, one in olds.items() for new, two in news.items()}
    close = [pair for pair, score in scores.items() if score >= _MOST_OTHER]
    counts = Counter(old for old, _ in close), Counter(new for _, new in close)
    for old, new in close:
        if scores[old, new] >= _LEAST and counts[0][old] == counts[1][new] == 1:
            yield _Found(old, new, ALIKE)


def _beside(pairing: Pairing, found: Sequence[_Found]) -> Iterator[_Found]:
    """What has the same last name and shape in two modules all of whose pairs are of these two: biases of zeros, counters."""
    modules: dict[str, dict[str, float]] = defaultdict(dict)
    back: dict[str, set[str]] = defaultdict(set)
    for row in found:
        old, new = row.old.rpartition(".")[0], row.new.rpartition(".")[0]
        modules[old][new] = min(row.confidence, modules[old].get(new, 1.0))
        back[new].add(old)
    taken = {row.old for row in found}
    free = {param.name for param in pairing.targets_left()} - {row.new for row in found}
    for param in pairing.sources_left():
        path, _, leaf = param.name.rpartition(".")
        others = [*modules.get(path, ())]
        new = f"{others[0]}.{leaf}" if len(others) == 1 else ""
        alone = path and new in free and back[others[0]] == {path}
        if alone and param.name not in taken and pairing.target[new].shape == param.shape:
            yield _Found(param.name, new, modules[path][others[0]])
