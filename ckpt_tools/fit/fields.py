"""The fields of a plan's tables, read one by one: what they may be, and the error that says which is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt_tools.errors import MatchError
from ckpt_tools.io.parsers import brief
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS

_NEEDED: Any = object()


class Fields:
    """One table. A field that is not there is an error, or its default; `label` begins the errors."""

    def __init__(self, row: Any, label: str, known: Sequence[str]) -> None:
        if not isinstance(row, dict):
            raise MatchError(f"{label} must be a table.", why=f"Its fields are {', '.join(known)}.")
        if unknown := [key for key in row if key not in known]:
            raise MatchError(f"{label}: {unknown[0]!r} is not a field.", why=f"Known are {', '.join(known)}.")
        self.row, self.label = row, label

    def __contains__(self, key: str) -> bool:
        return key in self.row

    def read(self, key: str, read: Callable[[Any, str], Any], default: Any = _NEEDED) -> Any:
        """A field as `read` has it."""
        if key not in self.row and default is not _NEEDED:
            return default
        return read(self.row.get(key), f"{self.label}: {key}")

    def several(self, key: str, read: Callable[[Any, str], Any], default: Any = _NEEDED) -> tuple[Any, ...]:
        """One, or a list of several where a step has several."""
        value = self.row.get(key)
        if isinstance(value, list) and value and (isinstance(value[0], list) or read is read_name):
            return tuple(read(item, f"{self.label}: {key}") for item in value)
        found = self.read(key, read, default)
        return found if key not in self.row and default is not _NEEDED else (found,)

    def tables(self, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tables of a name, with a label for each."""
        rows = self.row.get(key, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise MatchError(f"{key!r} must be tables: [[{key}]].")
        yield from ((f"{key} {number}", row) for number, row in enumerate(rows, 1))


def read_name(value: Any, label: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise MatchError(f"{label} must be text, not {brief(value)}.")
    return value


def read_text(value: Any, label: str) -> str:
    """Any text."""
    return value if value == "" else read_name(value, label)


def read_names(value: Any, label: str) -> tuple[str, ...]:
    """A list of names, each once."""
    if not isinstance(value, list):
        raise MatchError(f"{label} must be a list of names.")
    names = tuple(read_name(name, label) for name in value)
    if len(set(names)) < len(names):
        raise MatchError(f"{label} has a name twice.")
    return names


def read_flag(value: Any, label: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise MatchError(f"{label} must be true or false, not {brief(value)}.")
    return value


def read_number(value: Any, label: str) -> float:
    """A number of a size that is said somewhere."""
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise MatchError(f"{label} must be a number, not {brief(value)}.")
    return float(value)


def read_shape(value: Any, label: str) -> Shape:
    """A list of sizes."""
    good = isinstance(value, list) and len(value) <= MAX_DIMENSIONS and all(type(size) is int for size in value)
    if not good or not all(0 <= size <= MAX_ELEMENTS for size in value):
        raise MatchError(f"{label} must be a list of sizes, not {brief(value)}.")
    return tuple(value)


def read_size(value: Any, label: str) -> str:
    """A whole number, or a size by name, as text."""
    return str(value) if type(value) is int and -1 <= value <= MAX_ELEMENTS else read_name(value, label)


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
