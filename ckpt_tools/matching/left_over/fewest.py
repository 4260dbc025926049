"""The fewest questions: the one whose answer settles most comes first, and what it settles is not asked.

Layers that several blocks share are often settled by one answer about one block: the matching is tried with each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_tools.errors import CkptError
from ckpt_tools.matching import Matching
from ckpt_tools.matching.left_over.questions import Question, every_question, questions

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
