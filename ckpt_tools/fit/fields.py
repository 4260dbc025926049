"""The fields of a plan's tables, read one by one: what they may be, and the error that says which is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt_tools.errors import MatchError
from ckpt_tools.io.parsers import brief
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS


def check_known(row: dict[str, Any], keys: Sequence[str], label: str) -> None:
    """Raise MatchError for a field that is not one of these."""
    if unknown := [key for key in row if key not in keys]:
        raise MatchError(f"{label}: {unknown[0]!r} is not a field.", why=f"Known are {', '.join(keys)}.")


def tables(document: dict[str, Any], key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The tables of a name, numbered from 1."""
    rows = document.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MatchError(f"{key!r} must be tables: [[{key}]].")
    yield from enumerate(rows, 1)


def read_name(value: Any, label: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise MatchError(f"{label} must be text, not {brief(value)}.")
    return value


def read_names(value: Any, label: str) -> tuple[str, ...]:
    """A list of names, each once."""
    if not isinstance(value, list):
        raise MatchError(f"{label} must be a list of names.")
    names = tuple(read_name(name, label) for name in value)
    if len(set(names)) < len(names):
        raise MatchError(f"{label} has a name twice.")
    return names


def read_shape(value: Any, label: str) -> Shape:
    """A list of sizes."""
    good = isinstance(value, list) and len(value) <= MAX_DIMENSIONS and all(type(size) is int for size in value)
    if not good or not all(0 <= size <= MAX_ELEMENTS for size in value):
        raise MatchError(f"{label} must be a list of sizes, not {brief(value)}.")
    return tuple(value)


def read_several(value: Any, read: Callable[[Any, str], Any], label: str) -> tuple[Any, ...]:
    """One, or a list of several where a step has several."""
    nested = isinstance(value, list) and value and (isinstance(value[0], list) or read is read_name)
    return tuple(read(item, label) for item in value) if nested else (read(value, label),)


def read_flag(value: Any, label: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise MatchError(f"{label} must be true or false, not {brief(value)}.")
    return value


def read_size(value: Any, label: str) -> str:
    """A whole number, or a size by name, as text."""
    if type(value) is int and -1 <= value <= MAX_ELEMENTS:
        return str(value)
    return read_name(value, label)


def read_sizes(value: Any, label: str) -> tuple[str, ...]:
    """A list of such."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_DIMENSIONS:
        raise MatchError(f"{label} must be a list of sizes, not {brief(value)}.")
    return tuple(read_size(size, label) for size in value)


def read_dim(value: Any, label: str) -> int:
    """The number of a dimension."""
    if type(value) is not int or not -MAX_DIMENSIONS <= value < MAX_DIMENSIONS:
        raise MatchError(f"{label} must be the number of a dimension, not {brief(value)}.")
    return value
