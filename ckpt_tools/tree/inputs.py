"""What a model is given when it runs, as text: `1x3x224x224` numbers, `1x16:30522` integers below 30522, `NAME=...` by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt_tools.errors import UsageError

_SPEC = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d++(?:x\d++)*+)(?::(?P<below>\d+))?")


@dataclass(frozen=True, slots=True)
class Input:
    """One input: its keyword (None for one by position), its shape, and below what its integers are (None for floats)."""

    name: str | None
    shape: tuple[int, ...]
    below: int | None

    def __str__(self) -> str:
        name = "" if self.name is None else f"{self.name}="
        return f"{name}{'x'.join(map(str, self.shape))}{'' if self.below is None else f':{self.below}'}"


def parse(spec: str) -> Input:
    """An input as text.

    >>> parse("input_ids=1x16:30522")
    Input(name='input_ids', shape=(1, 16), below=30522)

    Raises:
        UsageError: it cannot be read.
    """
    found = _SPEC.fullmatch(spec)
    if found is None or found["below"] == "0":
        fix = "1x3x224x224 for normal numbers, 1x16:30522 for integers below 30522, input_ids=1x16:30522 by name."
        raise UsageError(f"`input={spec!r}` is not an input.", fix=fix)
    shape = tuple(map(int, found["shape"].split("x")))
    return Input(found["name"], shape, None if found["below"] is None else int(found["below"]))
