"""What a model is given (`1x3x224x224`, `ids=1x16:30522`) and computes: operations on values, as seen or as read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.errors import UsageError

_SPEC = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d++(?:x\d++)*+)(?::(?P<below>\d+))?")


@dataclass(slots=True, eq=False)
class Value:
    """One tensor of a computation."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its name as torch's (`addmm`, `softmax`), values and plain constants that it is given, values it makes."""

    name: str
    given: tuple[Any, ...]
    made: tuple[Value, ...]


@dataclass(slots=True)
class Graph:
    """A computation, in an order in which every value is made before it is used."""

    weights: dict[str, Value] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def renamed(self, names: dict[str, str]) -> Graph:
        """The same with other names of weights; those without one are weights nevertheless, under names that nothing has."""
        weights = {names.get(name, f"\0{name}"): value for name, value in self.weights.items()}
        return Graph(weights, self.inputs, self.outputs, self.operations)


def values_in(given: Any) -> Iterator[Value]:
    """The values in arguments, which may be lists of values."""
    if isinstance(given, Value):
        yield given
    elif isinstance(given, Sequence) and not isinstance(given, str):
        for each in given:
            yield from values_in(each)


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
    """An input as text."""
    found = _SPEC.fullmatch(spec)
    if found is None or found["below"] == "0":
        fix = "1x3x224x224 for normal numbers, 1x16:30522 for integers below 30522, input_ids=1x16:30522 by name."
        raise UsageError(f"`input={spec!r}` is not an input.", fix=fix)
    shape = tuple(map(int, found["shape"].split("x")))
    return Input(found["name"], shape, None if found["below"] is None else int(found["below"]))
