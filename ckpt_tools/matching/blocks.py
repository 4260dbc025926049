"""Blocks: what lies below one module path. Two blocks are alike when they hold the same kinds of units, as often."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ckpt_tools.matching.lexicon import LETTER, numbers, stem
from ckpt_tools.matching.units import Path, Unit

Key: TypeAlias = frozenset[tuple[int, int]]
Family: TypeAlias = tuple[Path, str]
_FEWEST_LETTERS = 3


@dataclass(frozen=True, slots=True)
class Block:
    """The units below a path; `index` is the place of the first in the order of registration."""

    index: int
    path: Path
    units: tuple[Unit, ...]


def whole_paths(units: Sequence[Unit]) -> set[Path]:
    """The paths whose units are registered one after another, as those of a module are."""
    last: dict[Path, int] = {}
    broken: set[Path] = set()
    for number, unit in enumerate(units):
        for length in range(1, len(unit.path) + 1):
            path = unit.path[:length]
            if last.setdefault(path, number - 1) != number - 1:
                broken.add(path)
            last[path] = number
    return last.keys() - broken


def blocks_of(units: Sequence[Unit], depth: int, counted: Collection[int], whole: set[Path]) -> dict[Key, list[Block]]:
    """The blocks of two units and more below a module path of this depth, by key; not the whole itself."""
    below: dict[Path, list[Unit]] = defaultdict(list)
    for unit in units:
        for length in range(depth + 1, len(unit.path) + 1):
            below[unit.path[:length]].append(unit)
    found: dict[Key, list[Block]] = defaultdict(list)
    for path, members in below.items():
        if 2 <= len(members) < len(units) and path in whole and not _same_below(path, members, below):
            key = frozenset(Counter(unit.kind for unit in members if unit.kind in counted).items())
            found[key].append(Block(members[0].index, path, tuple(members)))
    return found


def _same_below(path: Path, members: list[Unit], below: dict[Path, list[Unit]]) -> bool:
    """Whether a longer path holds all the same units."""
    longer = members[0].path[: len(path) + 1]
    return len(longer) > len(path) and len(below[longer]) == len(members)


def families_of(units: Iterable[Unit]) -> dict[Family, bool]:
    """Numbered siblings, by the path above and the name without number -> whether they are registered in counting order."""
    seen: dict[Family, list[tuple[int, ...]]] = defaultdict(list)
    known: set[Path] = set()
    for unit in units:
        for length in range(1, len(unit.path) + 1):
            path = unit.path[:length]
            if path not in known:
                known.add(path)
                seen[path[:-1], stem(path[-1])].append(numbers(path[-1]))
    return {family: _counts_up(family, row) for family, row in seen.items()}


def _counts_up(family: Family, row: list[tuple[int, ...]]) -> bool:
    """Numbers in counting order; letters must be a, b, c without a gap, or they are names."""
    if family[1] == LETTER and (len(row) < _FEWEST_LETTERS or sorted(row) != [(n,) for n in range(1, len(row) + 1)]):
        return False
    return all(one < other for one, other in pairwise(row))
