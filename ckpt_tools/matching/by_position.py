"""The positional stage: the two lists zipped in order. Shapes must agree all the way; the first that does not is named."""

from __future__ import annotations

from itertools import zip_longest

from ckpt_tools.errors import MatchError
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.params import Param

CONFIDENCE = 0.5  # equal shapes say little where many tensors have the same


def match_position(pairing: Pairing) -> None:
    """Pair what names have left, in order.

    Raises:
        MatchError: the lists differ in length, or a pair in shape.
    """
    rows = list(enumerate(zip_longest(pairing.sources_left(), pairing.targets_left())))
    for number, (old, new) in rows:
        if old is None or new is None or not pairing.fits(old.name, new.name):
            raise MatchError(
                f"By position, tensor {number + 1} of {len(rows)} disagrees.",
                why=f"The checkpoint has {_text(old)}, the target {_text(new)}.",
                fix="`match='structure'` looks for partners in any order.",
            )
    for _, (old, new) in rows:
        pairing.pair(old.name, new.name, "position", CONFIDENCE)


def _text(param: Param | None) -> str:
    return "none left" if param is None else f"{param.name!r} {list(param.shape)}"
