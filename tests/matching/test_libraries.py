"""Two libraries' implementations of one network, by their names and shapes: right, or refused with few questions, never wrong.

A file of `pairs/` is the truth about small configurations of timm (or BERT) and of transformers (or efficientnet_pytorch):
numbers that were moved so gave equal outputs. `a = b: weight [4,3]` is a module, ` + ` joins the parts of a fused layer.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.matching import reported

PAIRS = {path.stem: path for path in sorted((Path(__file__).parent / "pairs").glob("*.txt"))}
ASKED = {"focalnet": 1, "levit": 1, "mobilenet_v2": 1}  # questions; all others need none
Truth = set[tuple[tuple[str, ...], tuple[str, ...]]]


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.strip("[]").split(",") if size)


def read(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], Truth]:
    """Both sides, and which names are partners."""
    sides: tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]] = ({}, {})
    truth = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        modules, _, leaves = line.partition(": ")
        for leaf in leaves.split(", ") if leaves else [""]:
            named = []
            for text, side in zip(modules.split(" = "), sides, strict=True):
                parts = (text if not leaf else f"{text}.{leaf}").split(" + ")
                made = {part.split()[0]: shape_of(part.split()[1]) for part in parts}
                side.update(made)
                named.append(tuple(made))
            truth.add((named[0], named[1]))
    return *sides, truth


def said(found: Any) -> Truth:
    """The partners that a matching has, offers too."""
    return {((row.old,), (row.new,)) for row in found.matched} | {(offer.old, offer.new) for offer in found.offers}


@pytest.mark.parametrize(
    ("name", "turned"), [(name, back) for name in PAIRS for back in (False, True) if not back or name not in ASKED]
)
def test_partners_are_true_and_few_answers_settle_the_rest(name: str, turned: bool) -> None:
    """Both ways: no partner is another's, and once the questions are answered nothing is left over."""
    olds, news, truth = read(PAIRS[name])
    if turned:
        olds, news, truth = news, olds, {(new, old) for old, new in truth}

    def answered(*pairs: str) -> Any:
        return reported(olds, news, allow_reshape=True, pair=pairs)

    found = answered()
    assert said(found.matching) <= truth
    assert len(found.advice.questions) == ASKED.get(name, 0)
    for question in found.advice.questions:  # at most one
        answers = (answered(question.answer(old)) for old in question.candidates)
        found = next(answer for answer in answers if said(answer.matching) <= truth)
    assert said(found.matching) == truth
