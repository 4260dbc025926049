"""Two libraries' implementations of one network, by their names and shapes: right, or refused with few questions, never wrong.

A file of `pairs/` is the truth about small configurations of timm (or BERT) and of transformers (or efficientnet_pytorch):
numbers that were moved so gave equal outputs. `a = b: weight [4,3]` is a module, ` + ` joins the parts of a fused layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt_tools.matching import Matching, match
from ckpt_tools.matching.left_over.fewest import fewest_questions
from ckpt_tools.matching.params import Param

PAIRS = {path.stem: path for path in sorted((Path(__file__).parent / "pairs").glob("*.txt"))}
ASKED = {"focalnet": 1, "levit": 1, "mobilenet_v2": 1}  # questions; all others need none
Truth = set[tuple[tuple[str, ...], tuple[str, ...]]]


def shape_of(text: str) -> tuple[int, ...]:
    """`[4,3]` as sizes."""
    return tuple(int(size) for size in text.strip("[]").split(",") if size)


def read(path: Path) -> tuple[list[Param], list[Param], Truth]:
    """Both sides, and which names are partners."""
    olds, news, truth = [], [], set()
    for line in path.read_text(encoding="utf-8").splitlines():
        modules, _, leaves = line.partition(": ")
        sides = modules.split(" = ")
        for leaf in leaves.split(", ") if leaves else [""]:
            texts = [side if not leaf else f"{side}.{leaf}" for side in sides]
            old, new = ([Param(each.split()[0], shape_of(each.split()[1])) for each in text.split(" + ")] for text in texts)
            olds += old
            news += new
            truth.add((tuple(param.name for param in old), tuple(param.name for param in new)))
    return olds, news, truth


def said(found: Matching) -> Truth:
    """The partners that a matching has, offers too."""
    return {((row.old,), (row.new,)) for row in found.matched} | {(offer.old, offer.new) for offer in found.offers}


def is_true(found: Matching, truth: Truth) -> bool:
    """Whether the pairs that the user named are true."""
    return {((row.old,), (row.new,)) for row in found.matched if row.reason == "pair"} <= truth


@pytest.mark.parametrize("turned", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("name", PAIRS)
def test_partners_are_true_and_few_answers_settle_the_rest(name: str, turned: bool) -> None:
    """Both ways: no partner is another's, and once the questions are answered nothing is left over."""
    olds, news, truth = read(PAIRS[name])
    if turned:
        olds, news, truth = news, olds, {(new, old) for old, new in truth}
    pairs: list[str] = []

    def answered(more: Sequence[str]) -> Matching:
        return match(olds, news, stages="structure", allow_reshape=True, pairs=[*pairs, *more])

    asked = fewest_questions(answered([]), answered)
    assert len(asked) == ASKED.get(name, 0), asked
    for question in asked:
        assert said(answered([])) <= truth
        pairs.append(next(answer for answer in map(question.answer, question.candidates) if is_true(answered([answer]), truth)))
    assert said(answered([])) == truth
