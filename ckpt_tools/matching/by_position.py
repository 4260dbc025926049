"""The positional stage: the two lists zipped in order. Shapes must agree; the first that does not is named.

The last module alone may have another number of outputs on each side: the head of a network for other classes. What becomes
of it is the user's choice, as of every mismatch.
"""

from __future__ import annotations

from itertools import zip_longest

from ckpt_tools.errors import MatchError
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.params import Param

CONFIDENCE = 0.5  # equal shapes say little where many tensors have the same


def match_position(pairing: Pairing) -> None:
    """Pair what names have left, in order.

    Raises:
        MatchError: the lists differ in length, or a pair in shape that is not the head's.
    """
    olds, news = pairing.sources_left(), pairing.targets_left()
    rows = list(enumerate(zip_longest(olds, news)))
    body = len(rows) - _head_size(olds, news)
    for number, (old, new) in rows[:body]:
        if old is None or new is None or not pairing.fits(old.name, new.name):
            raise MatchError(
                f"By position, tensor {number + 1} of {len(rows)} disagrees.",
                why=f"The checkpoint has {_text(old)}, the target {_text(new)}.",
                fix="`match='structure'` looks for partners in any order.",
            )
    for _, (old, new) in rows:
        pairing.pair(old.name, new.name, "position", CONFIDENCE)


def _head_size(olds: list[Param], news: list[Param]) -> int:
    """How many tensors the last module has, where it is the same but for its outputs: the first size of all of its tensors."""
    count = _last_module(olds)
    if not count or count != _last_module(news) or len(olds) != len(news) or count == len(olds):
        return 0
    rows = [(old.shape, new.shape) for old, new in zip(olds[-count:], news[-count:], strict=True)]
    outputs = {(old[:1], new[:1]) for old, new in rows}
    return count if len(outputs) == 1 and all(old and new and old[1:] == new[1:] for old, new in rows) else 0


def _last_module(params: list[Param]) -> int:
    """How many tensors at the end are of one module."""
    paths = [param.name.rpartition(".")[0] for param in params]
    count = 0
    while count < len(paths) and paths[-1 - count] == paths[-1]:
        count += 1
    return count


def _text(param: Param | None) -> str:
    return "none left" if param is None else f"{param.name!r} {list(param.shape)}"
