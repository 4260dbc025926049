"""The fewest questions that would settle what is ambiguous. Modules that differ in their numbers alone are one question."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TypeAlias

from ckpt_tools.matching.records import Ambiguous

_NUMBER = re.compile(r"[0-9]+")
_LETTERS = "ijklmn"
_MOST_CANDIDATES, _MOST_WAYS = 8, 64
_Modules: TypeAlias = dict[str, tuple[frozenset[str], int]]  # a module of the target -> its candidates, how many tensors


@dataclass(frozen=True, slots=True)
class Question:
    """Which module, or tensor, of the checkpoint is this one of the target?

    Attributes:
        new: the target's name, with `{i}` for numbers. candidates: names of the checkpoint that it may be, so too.
        tensors: how many names of the target the answer settles.
    """

    new: str
    candidates: tuple[str, ...]
    tensors: int

    def answer(self, old: str) -> str:
        """What `--pair` takes when `old`, one of the candidates, is the answer."""
        return f"{old}={self.new}"


def questions(ambiguous: Sequence[Ambiguous]) -> list[Question]:
    """The questions that settle everything that has candidates; of as many modules as candidates the last needs none."""
    groups: dict[tuple[str, ...], list[Question]] = defaultdict(list)
    for question in every_question(ambiguous):
        groups[question.candidates].append(question)
    return [each for candidates, group in groups.items() for each in _without_last(group, candidates)]


def every_question(ambiguous: Sequence[Ambiguous]) -> list[Question]:
    """All questions that can be asked, in the order of the names, whatever that of the files is."""
    found: dict[str, _Modules] = defaultdict(dict)
    for new, (candidates, count) in _modules(sorted(ambiguous, key=_counting)).items():
        found[_NUMBER.sub("#", new)][new] = (candidates, count)
    return [question for members in found.values() for question in _folded(members)]


def _counting(row: Ambiguous) -> list[tuple[str, int]]:
    """By text, and by numbers as they count."""
    *parts, text = _NUMBER.split(row.new)
    return [*zip(parts, (int(digits[:18]) for digits in _NUMBER.findall(row.new)), strict=True), (text, 0)]


def _without_last(group: list[Question], candidates: tuple[str, ...]) -> list[Question]:
    """Of two modules and two candidates one answer says both."""
    return group[:-1] if len(group) == len(candidates) > 1 else group


def _modules(ambiguous: Sequence[Ambiguous]) -> _Modules:
    """Modules whose tensors have partners of the same last names in the candidates; else the tensors themselves."""
    rows: dict[str, list[Ambiguous]] = defaultdict(list)
    for row in ambiguous:
        path, _, leaf = row.new.rpartition(".")
        plain = all(name.rpartition(".")[2] == leaf and "." in name for name in row.candidates)
        if row.candidates:
            rows[path if path and plain else row.new].append(row)
    found: _Modules = {}
    for new, members in rows.items():
        whole = members[0].new != new
        names = [frozenset(name.rpartition(".")[0] if whole else name for name in row.candidates) for row in members]
        if len(set(names)) == 1:
            found[new] = (names[0], len(members))
        else:
            found.update((row.new, (frozenset(row.candidates), 1)) for row in members)
    return found


def _folded(members: _Modules) -> Iterator[Question]:
    """One question for all members where names with their numbers are candidates of each; else for those of one last name."""
    question = _one_for_all(members) if len(members) > 1 else None
    by_last: dict[str, _Modules] = defaultdict(dict)
    for new, row in members.items() if question is None else ():
        by_last[new.rpartition(".")[2]][new] = row
    if question is not None:
        yield question
    elif 1 < len(by_last) < len(members):
        for some in by_last.values():
            yield from _folded(some)
    else:
        for new, (candidates, count) in members.items():
            yield Question(new, tuple(sorted(candidates)[:_MOST_CANDIDATES]), count)


def _one_for_all(members: _Modules) -> Question | None:
    numbers = [_NUMBER.findall(new) for new in members]
    varied = [place for place, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1][: len(_LETTERS)]
    letters = dict(zip(varied, _LETTERS, strict=False))
    common: frozenset[str] | None = None
    for row, (candidates, _) in zip(numbers, members.values(), strict=True):
        own = {letters[place]: row[place] for place in varied}
        mine = frozenset(text for name in candidates for text in _lettered(name, own))
        common = mine if common is None else common & mine
    if not common:
        return None
    places = iter(range(len(numbers[0])))
    new = _NUMBER.sub(lambda found: _braced(letters.get(next(places)), found[0]), next(iter(members)))
    return Question(new, tuple(sorted(common)[:_MOST_CANDIDATES]), sum(count for _, count in members.values()))


def _lettered(name: str, letters: dict[str, str]) -> Iterator[str]:
    """A candidate with letters in the place of these numbers, each letter once and more; nothing where one is missing."""
    choices = [[*(letter for letter, number in letters.items() if number == own), ""] for own in _NUMBER.findall(name)]
    for chosen in islice(product(*choices), _MOST_WAYS):
        if set(letters) <= set(chosen):
            row = iter(chosen)
            yield _NUMBER.sub(lambda found, row=row: _braced(next(row), found[0]), name)  # type: ignore[misc]


def _braced(letter: str | None, number: str) -> str:
    return f"{{{letter}}}" if letter else number
