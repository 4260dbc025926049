"""What a model computes: operations on values, as seen while it ran or as read in a file. Names and sizes, no numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Value:
    """One tensor of a computation; `shape` is None where it is not known. Whether it has integers counts for inputs only."""

    shape: tuple[int, ...] | None = None
    integers: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its name as torch's (`addmm`, `softmax`), values and plain constants that it is given, values it makes."""

    name: str
    given: tuple[Any, ...]
    made: tuple[Value, ...]


@dataclass(slots=True)
class Graph:
    """A computation, in an order in which every value is made before it is used.

    Attributes:
        weights: the name of a parameter or buffer -> its value. inputs, outputs: the model's. operations: what it does.
    """

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
