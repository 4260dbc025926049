"""Classes that tests put into checkpoints: one for every way in which pickle takes an object apart."""

import enum
from typing import Any, NamedTuple

import numpy as np
import torch


class Plain:
    """Attributes in `__dict__`."""


class Outer:
    """Holds a nested class."""

    class Inner:
        """Its name has a dot, which protocol 2 cannot say."""


class Slotted:
    """Attributes in slots: a state of two parts."""

    __slots__ = ("left", "right")


class Both(Slotted):
    """Slots and a `__dict__`."""


class Stateful:
    """A state that is not a dict."""

    data: list[Any]

    def __init__(self) -> None:
        self.data = []

    def __getstate__(self) -> tuple[str, list[Any]]:
        return "state", self.data

    def __setstate__(self, state: tuple[str, list[Any]]) -> None:
        self.data = state[1]


class Reduced:
    """Made by a call, with attributes set later."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, self.args, {key: value for key, value in vars(self).items() if key != "args"} or None


class Keyword:
    """Made by `__new__` with keyword arguments."""

    value: Any

    def __new__(cls, *, value: Any = None) -> "Keyword":
        made = super().__new__(cls)
        made.value = value
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"value": self.value}


class Mapping(dict[Any, Any]):
    """A dict with attributes."""


class Sequence(list[Any]):
    """A list with attributes."""


class Label(str):
    """A str with a class of its own."""


class Count(int):
    """An int with a class of its own."""


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


class Colour(enum.Enum):
    """An enum of numbers."""

    RED = 1
    GREEN = 2


class Mode(enum.StrEnum):
    """An enum of texts."""

    FAST = "fast"


class Bits(enum.IntFlag):
    """Flags."""

    ONE = 1
    TWO = 2


class Array(np.ndarray[Any, Any]):
    """An array that NumPy does not know."""


class OwnTensor(torch.Tensor):
    """A tensor that torch does not know."""


def function() -> None:
    """A function that a checkpoint may name."""
