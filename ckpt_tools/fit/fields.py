"""The fields of a plan's tables, read one by one: what they may be, and the error that says which is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from ckpt_tools.errors import MatchError
from ckpt_tools.io.parsers import brief
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS

_NEEDED: Any = object()


class Fields:
    """One table. A field that is not there is an error, or its default; `label` begins the errors."""

    def __init__(self, row: Any, label: str, known: Sequence[str]) -> None:
        if unknown := [key for key in read_table(row, label) if key not in known]:
            raise MatchError(f"{label}: {unknown[0]!r} is not a field.", why=f"Known are {', '.join(known)}.")
        self.row, self.label = row, label

    def __contains__(self, key: str) -> bool:
        return key in self.row

    def read(self, key: str, read: Reader, default: Any = _NEEDED) -> Any:
        if key not in self.row and default is not _NEEDED:
            return default
        return read(self.row.get(key), f"{self.label}: {key}")

    def several(self, key: str, read: Reader, default: Any = _NEEDED) -> tuple[Any, ...]:
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


Reader: TypeAlias = Callable[[Any, str], Any]


def _reader(words: str, is_good: Callable[[Any], bool], make: Callable[[Any], Any] = lambda value: value) -> Reader:
    """What reads a field that must be what the words say, and makes something of it; the second argument begins the error."""

    def read(value: Any, label: str) -> Any:
        if not is_good(value):
            raise MatchError(f"{label} must be {words}, not {brief(value)}.")
        return make(value)

    return read


def _list_of(read: Reader, words: str, is_good: Callable[[list[Any]], bool] = lambda _: True) -> Reader:
    is_list = _reader(words, lambda value: isinstance(value, list) and is_good(value))
    return lambda value, label: tuple(read(item, label) for item in is_list(value, label))


def read_names(value: Any, label: str) -> tuple[str, ...]:
    """A list of names, each once."""
    names: tuple[str, ...] = _list_of(read_name, "a list of names")(value, label)
    if len(set(names)) < len(names):
        raise MatchError(f"{label} has a name twice.")
    return names


def read_size(value: Any, label: str) -> str:
    """A whole number, or a size by name, as text."""
    return str(value) if type(value) is int and -1 <= value <= MAX_ELEMENTS else str(read_name(value, label))


read_name = _reader("text", lambda value: isinstance(value, str) and value != "")
read_text = _reader("text", lambda value: isinstance(value, str))
read_flag = _reader("true or false", lambda value: isinstance(value, bool))
# a number of a size that is said somewhere
read_number = _reader("a number", lambda value: type(value) in (int, float) and abs(value) < 1e300, float)
read_dim = _reader("the number of a dimension", lambda value: type(value) is int and -MAX_DIMENSIONS <= value < MAX_DIMENSIONS)
read_dims = _list_of(read_dim, "the first and the last dimension", lambda value: len(value) == 2)
read_sizes = _list_of(read_size, "a list of sizes", lambda value: 0 < len(value) <= MAX_DIMENSIONS)
read_table = _reader("a table", lambda value: isinstance(value, dict))
read_shape = _reader(
    "a list of sizes",
    lambda value: isinstance(value, list) and len(value) <= MAX_DIMENSIONS
    and all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in value),
    tuple,
)  # fmt: skip
check_value = _reader("a whole number from 1 up", lambda value: type(value) is int and 0 < value < 1 << 40)
