"""Steps that differ in one number alone, as one: `layers.{i}.wq` for `i = "0-11"`. A plan of 400 tensors becomes a page.

What is folded is one sequence after another, layer by layer, so that the order of the steps comes back too. What is still
alike within a layer is folded once more: `layers.{i}.experts.{j}.w1`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from ckpt_tools.errors import MatchError
from ckpt_tools.fit.plans import PlanStep

PLACE, INNER = "{i}", "{j}"
_NUMBER = re.compile(r"[0-9]+")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")
_FEWEST_SAVED = 2
_LONGEST = 4096  # steps of one sequence, which are looked at again from each of them
_MOST_NUMBERS = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """One table of a plan: a step, whose names have `{i}` for these numbers and `{j}` for the inner ones, if there are any."""

    step: PlanStep
    numbers: str = ""
    inner: str = ""


def fold(steps: Sequence[PlanStep], place: str = PLACE) -> list[Row]:
    """The fewest rows that are these steps, in their order, with `place` for the number that they differ in."""
    places = _by_template(steps)
    rows: list[Row] = []
    at = 0
    while at < len(steps):
        best = max((_run(steps, at, other, place) for other in _repeats(steps, at, places)), key=_saved, default=None)
        if best is None or _saved(best) < _FEWEST_SAVED:
            rows.append(Row(steps[at]))
            at += 1
            continue
        templates, numbers = best
        text = _listed(numbers)
        if rows and rows[-1].numbers == text:  # a sequence of its own: numbers that are written alike are one sequence
            text = ",".join(map(str, numbers))
        inner = fold(templates, INNER) if place == PLACE else map(Row, templates)
        rows += [Row(row.step, text, row.numbers) for row in inner]
        at += len(templates) * len(numbers)
    return rows


_Run = tuple[list[PlanStep], list[int]]


def _saved(run: _Run) -> int:
    return len(run[0]) * (len(run[1]) - 1)


def _by_template(steps: Sequence[PlanStep]) -> Mapping[tuple[str, str], list[int]]:
    """What stands before and behind each number of a step's first new name -> the steps, the last first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number in range(len(steps) - 1, -1, -1):
        for key in _around(steps[number]):
            found[key].append(number)
    return found


def _around(step: PlanStep) -> Iterator[tuple[str, str]]:
    name = step.new[0]
    for found in _NUMBER.finditer(name):
        yield name[: found.start()], name[found.end() :]


def _repeats(steps: Sequence[PlanStep], at: int, places: Mapping[tuple[str, str], list[int]]) -> Iterator[int]:
    """The next step that is this one but for a number."""
    for key in _around(steps[at]):
        row = places[key]
        while row and row[-1] <= at:
            row.pop()
        if row and row[-1] - at <= _LONGEST:
            yield row[-1]


def _run(steps: Sequence[PlanStep], at: int, other: int, place: str) -> _Run:
    """The sequence that begins here, with all numbers under which it comes back."""
    length = other - at
    pair = _numbers(steps[at].new[0], steps[other].new[0])
    pairs = list(zip(steps[at:other], steps[other : other + length], strict=False))
    if pair is None or len(pairs) < length:
        return [], [0]
    found: list[PlanStep] = []
    for one, two in pairs:
        if (template := _template(one, two, pair, place)) is None:
            return [], [0]
        found.append(template)
    numbers = [int(text) for text in pair]
    while (number := _next(steps, at + len(numbers) * length, found, place)) is not None and number not in numbers:
        numbers.append(number)
    return found, numbers


def _numbers(one: str, other: str) -> tuple[str, str] | None:
    """The one number in which two names differ, as it is in both."""
    pairs = {pair for pair in zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=False) if pair[0] != pair[1]}
    plain = len(pairs) == 1 and all(text == str(int(text)) and len(text) < 9 for text in next(iter(pairs)))
    return next(iter(pairs)) if plain else None


def _template(one: PlanStep, other: PlanStep, pair: tuple[str, str], place: str) -> PlanStep | None:
    """A step with `place` for the number in which it differs from another; None where they differ otherwise."""
    if replace(one, old=other.old, new=other.new) != other:
        return None
    sides: list[tuple[str, ...]] = []
    for mine, theirs in ((one.old, other.old), (one.new, other.new)):
        names = [_name(*row, pair, place) for row in zip(mine, theirs, strict=False)]
        if len(mine) != len(theirs) or any(name is None or place not in name for name in names):
            return None
        sides.append(tuple(name for name in names if name is not None))
    return replace(one, old=sides[0], new=sides[1])


def _name(one: str, other: str, pair: tuple[str, str], place: str) -> str | None:
    bare = one if place == PLACE else one.replace(PLACE, "")
    if "{" in bare or "}" in bare or _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return None
    numbers = [*zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)]
    if any(mine != theirs and (mine, theirs) != pair for mine, theirs in numbers):
        return None
    texts = iter([mine if mine == theirs else place for mine, theirs in numbers])
    return _NUMBER.sub(lambda _: next(texts), one)


def _next(steps: Sequence[PlanStep], at: int, templates: Sequence[PlanStep], place: str) -> int | None:
    """The number under which the sequence comes once more, right here."""
    if at + len(templates) > len(steps):
        return None
    before, _, _ = templates[0].new[0].partition(place)
    found = _NUMBER.match(steps[at].new[0], len(before))
    if found is None or len(found[0]) > 9 or found[0] != str(int(found[0])):
        return None
    same = all(filled(template, found[0], place) == steps[at + behind] for behind, template in enumerate(templates))
    return int(found[0]) if same else None


def filled(step: PlanStep, number: str, place: str = PLACE) -> PlanStep:
    """A step with a number in its place, that of `{i}` or `{j}`."""
    old, new = (tuple(name.replace(place, number) for name in names) for names in (step.old, step.new))
    return replace(step, old=old, new=new)


def unfold(rows: Sequence[Row], most: int) -> list[PlanStep]:
    """The steps of rows; those side by side with the same numbers are done number by number."""
    found: list[PlanStep] = []
    for numbers, group in groupby(rows, key=lambda row: row.numbers):
        steps: list[PlanStep] = []
        for inner, some in groupby(group, key=lambda row: row.inner):
            steps += _counted([row.step for row in some], inner, INNER, most - len(steps))
        found += _counted(steps, numbers, PLACE, most - len(found))
    return found


def _counted(steps: list[PlanStep], numbers: str, place: str, most: int) -> list[PlanStep]:
    """The steps, once for each of the numbers; as they are without any."""
    if not numbers:
        return steps
    letter = place.strip("{}")
    if odd := next((name for step in steps for name in (*step.old, *step.new) if place not in name), None):
        raise MatchError(f"{odd!r} has no {place}, and its table has {letter} = {numbers[:40]!r}.")
    counted = _read(numbers, letter)
    if len(counted) * len(steps) > most:
        raise MatchError("The plan has more steps than any model, its numbers written out.")
    return [filled(step, str(number), place) for number in counted for step in steps]


def _listed(numbers: Sequence[int]) -> str:
    """Numbers as they are written: `0-11`, `0,2,4-6`."""
    starts = [0, *(at + 1 for at, (one, other) in enumerate(pairwise(numbers)) if other != one + 1), len(numbers)]
    runs = [numbers[start:end] for start, end in pairwise(starts)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _read(text: str, letter: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2]) if match and match[2] else first
        if match is None or last < first or len(found) + last - first >= _MOST_NUMBERS:
            raise MatchError(
                f"{letter} = {text[:40]!r} is not a list of whole numbers.", fix=f'For example: {letter} = "0-11" or "0,2,4"'
            )
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise MatchError(f"{letter} = {text[:40]!r} has a number twice.")
    return found
