"""What to do about what a matching leaves over: options that go further, what may be left out, questions that settle it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from itertools import islice, product
from typing import Any, TypeAlias

from ckpt_tools.errors import CkptError
from ckpt_tools.matching import Matching, Stages
from ckpt_tools.matching.records import Ambiguous, Param, Shape
from ckpt_tools.tree.parametrized import is_part

# The matching by these stages, with or without other shapes, and with these pairs.
Again = Callable[[Stages, bool, Sequence[str]], Matching]


@dataclass(frozen=True, slots=True)
class Further:
    """Options under which less is left over.

    Attributes:
        stages: for `match`; None where it stays as it is. allow_reshape: whether that is to be given.
        pairs: how many names of the target get a partner more.
    """

    stages: Stages | None
    allow_reshape: bool
    pairs: int

    @property
    def options(self) -> list[str]:
        """As they are typed."""
        return [f"--match {self.stages}"] * (self.stages is not None) + ["--allow-reshape"] * self.allow_reshape


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about what is left over.

    Attributes:
        further: options under which less is; None where there are none. extras: what the target lacks, as globs for `drop`.
        questions: the fewest that settle what is ambiguous, each answered by `pair`.
    """

    further: Further | None = None
    extras: tuple[Extra, ...] = ()
    questions: tuple[Question, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The advice as plain data."""
        asked = [
            {"new": each.new, "tensors": each.tensors, "pairs": [each.answer(old) for old in each.candidates]}
            for each in self.questions
        ]
        return {
            "further": [] if self.further is None else self.further.options,
            "extras": [{"glob": extra.glob, "tensors": len(extra.names)} for extra in self.extras],
            "questions": asked,
        }


def advise(
    source: Sequence[Param], target: Sequence[Param], found: Matching, again: Again, stages: Stages, allow_reshape: bool
) -> Advice:
    """Look at what is left over; other options are tried, so that what is said of them is so."""
    if found.complete_with_offers:
        return Advice()
    further = _further(found, again, stages, allow_reshape)
    missing, unexpected = found.left_over
    candidates = {name for row in found.ambiguous for name in row.candidates}
    shapes = {param.name: param.shape for param in target}
    wanted = {name: shapes[name] for name in missing}
    unexpected = tuple(name for name in unexpected if name not in candidates)
    spare = extras(unexpected, {param.name: param.shape for param in source}, wanted)
    if further is not None:
        return Advice(further, tuple(spare))

    def answered(pairs: Sequence[str]) -> Matching:
        return again(stages, allow_reshape, pairs)

    asked = fewest_questions(found, answered)
    lone = [question for question in asked if len(question.candidates) == 1][:_MOST_LONE]
    useless = [question for question in lone if not _settles(question, answered)]
    return Advice(None, tuple(spare), tuple(question for question in asked if question not in useless))


_MOST_LONE = 8  # questions of one candidate whose answers are tried


def _settles(question: Question, answered: Answered) -> bool:
    """Whether `--pair` helps: of one candidate alone the layout may be what is unknown, which only a plan says."""
    with suppress(CkptError):
        return question not in questions(answered([question.answer(*question.candidates)]).ambiguous)
    return False


def _further(found: Matching, again: Again, stages: Stages, allow_reshape: bool) -> Further | None:
    """The fewest options that leave least over."""
    best, least = None, _without_partner(found)
    structure: Stages | None = "structure" if stages in ("exact+wrappers", "names") else None
    tried: list[tuple[Stages | None, bool]] = [(structure, False), (None, True), (structure, True)]
    for other, reshape in dict.fromkeys(tried) if least else ():
        if (reshape and allow_reshape) or not (other or reshape):
            continue
        left = _without_partner(again(other or stages, allow_reshape or reshape, ()))
        if left < least:
            best, least = Further(other, reshape, _without_partner(found) - left), left
    return best


def _without_partner(found: Matching) -> int:
    return len(found.left_over[0]) + len(found.mismatched)


_MOST_TENSORS = 60_000  # that are matched in all tries together
Answered = Callable[[Sequence[str]], Matching]  # the matching when these pairs are said


def fewest_questions(found: Matching, answered: Answered) -> list[Question]:
    """The questions that settle what is ambiguous, each supposing the answer before that leaves least open."""
    asked = questions(found.ambiguous)
    tries = _MOST_TENSORS // max(1, found.source_names + found.target_names)
    chosen: list[Question] = []
    given: list[str] = []
    while len(chosen) + 1 < len(asked) and found.ambiguous:
        rows = [(question, old) for question in every_question(found.ambiguous) for old in question.candidates]
        tries -= len(rows)
        best: tuple[Question, str, Matching] | None = None
        for question, old in rows if tries >= 0 else ():
            with suppress(CkptError):  # it says what another answer says
                left = answered([*given, question.answer(old)])
                if best is None or len(left.ambiguous) < len(best[2].ambiguous):
                    best = question, old, left
                if not left.ambiguous:
                    break
        if best is None:
            return asked
        question, old, found = best
        given.append(question.answer(old))
        chosen.append(question)
    return chosen if not found.ambiguous and len(chosen) < len(asked) else asked


# --- whole parts of a checkpoint that the target lacks: an auxiliary head, tables of positions; each as one glob


@dataclass(frozen=True, slots=True)
class Extra:
    """Tensors that the target lacks.

    Attributes:
        glob: matches them, and nothing else in the checkpoint. names: they, in order.
    """

    glob: str
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it is said: 'AuxLogits.*', 14 tensors: not in the target."""
        count = len(self.names)
        return f"{self.glob!r}, {count} tensor{'s' * (count != 1)}: not in the target"


def extras(unexpected: Sequence[str], source: Mapping[str, Shape], wanted: Mapping[str, Shape] | None = None) -> list[Extra]:
    """What is left over of a checkpoint, in as few globs as say it:"""
    names = list(source)
    lone = set(unexpected)
    counts = Counter(path for name in names for path in _paths(name))
    free = Counter(path for name in lone for path in _paths(name))
    tails, free_tails = (Counter(name.rpartition(".")[2] for name in side) for side in (names, lone))
    found: dict[str, list[str]] = {}
    for name in unexpected:
        path = next((path for path in _paths(name) if counts[path] == free[path] < len(names)), None)
        tail = name.rpartition(".")[2]
        everywhere = free_tails[tail] == tails[tail] > 1 and tail != name
        pattern = f"{escape(path)}.*" if path is not None else f"*.{escape(tail)}" if everywhere else escape(name)
        found.setdefault(pattern, []).append(name)
    # what is missing may be there in another form: beside these, under these last names, in these shapes
    near = {path for name in wanted or () for path in _paths(name)}
    shapes, lasts = set((wanted or {}).values()), {f"*.{name.rpartition('.')[2]}" for name in wanted or ()}
    made = []
    for glob, rows in found.items():
        above = "" if glob.startswith("*") else glob.removesuffix(".*").rpartition(".")[0]
        if glob not in lasts and above not in near and not any(is_part(name) or source[name] in shapes for name in rows):
            made.append(Extra(glob, tuple(rows)))
    return made


def _paths(name: str) -> Iterator[str]:
    """The modules that a name is in, the highest first."""
    at = name.find(".")
    while at > 0:
        yield name[:at]
        at = name.find(".", at + 1)


# --- the fewest questions that would settle what is ambiguous. Modules that differ in their numbers alone are one question


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
    found: list[Question] = []
    for candidates, group in groups.items():  # of two modules and two candidates one answer says both
        found += group[:-1] if len(group) == len(candidates) > 1 else group
    return found


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
