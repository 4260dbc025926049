"""What to do about what a matching leaves over: options that go further, what may be left out, questions that settle it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.matching import Matching, Stages
from ckpt_tools.matching.extras import Extra, extras
from ckpt_tools.matching.questions import Question, every_question, questions
from ckpt_tools.matching.records import Param

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
    shapes = {param.name: param.shape for param in target}
    wanted = {name: shapes[name] for name in missing}
    spare = extras(unexpected, {param.name: param.shape for param in source}, wanted)
    if further is not None:
        return Advice(further, tuple(spare))
    asked = fewest_questions(found, lambda pairs: again(stages, allow_reshape, pairs))
    return Advice(None, tuple(spare), tuple(asked))


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
        best = _best(rows, given, answered) if tries >= 0 else None
        if best is None:
            return asked
        question, given, found = best
        chosen.append(question)
    return chosen if not found.ambiguous and len(chosen) < len(asked) else asked


def _best(
    rows: Sequence[tuple[Question, str]], given: list[str], answered: Answered
) -> tuple[Question, list[str], Matching] | None:  # fmt: skip
    """The answer that leaves least open, with what is said then; None where none can be tried."""
    best: tuple[Question, list[str], Matching] | None = None
    for question, old in rows:
        pairs = [*given, question.answer(old)]
        try:
            found = answered(pairs)
        except CkptError:  # it says what another answer says
            continue
        if best is None or len(found.ambiguous) < len(best[2].ambiguous):
            best = (question, pairs, found)
        if not found.ambiguous:
            break
    return best
