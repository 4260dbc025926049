"""Frozen records: dataclasses that are quick to make, since every start of `ckpt` makes dozens of them.

`@dataclass(frozen=True, slots=True)` compiles eight functions for each class, and takes four times as long as this, which
compiles `__init__` alone. The records are frozen to a type checker, not at run time: so one is also made thrice as fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def unique(kind: type[T]) -> type[T]:
    """Frozen records, of which each is equal to itself alone: a dataclass with slots."""
    made: Any = dataclass(repr=False, eq=False, slots=True)(kind)
    if made.__repr__ is object.__repr__:
        made.__repr__ = _text
    return made  # type: ignore[no-any-return]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T]) -> type[T]:
    """Frozen records that are equal where their fields are, and hashed by them: a dataclass with slots."""
    made: Any = unique(kind)
    key = attrgetter(*made.__match_args__)

    def equal(self: object, other: object) -> bool:
        return key(self) == key(other) if type(self) is type(other) else NotImplemented

    def hashed(self: object) -> int:
        return hash(key(self))

    made.__eq__, made.__hash__ = equal, hashed
    return made  # type: ignore[no-any-return]


def _text(self: Any) -> str:
    shown = ", ".join(f"{row.name}={getattr(self, row.name)!r}" for row in fields(self))
    return f"{type(self).__qualname__}({shown})"
