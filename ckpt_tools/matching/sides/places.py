"""Where the numbers of a sample lie in a tensor: in rows and columns spread over all of it.

A tensor of up to 256 numbers is taken whole. Rows and columns are chosen by how many there are, so that a matrix and its
transpose have the same numbers in their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TypeVar

from ckpt_tools.matching.records import Shape

MOST = 256
_SIDE = 16
T = TypeVar("T")


def _matrix(shape: Shape) -> tuple[int, int]:
    """A shape as one of rows; of one dimension it is one row."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def _taken(rows: int, columns: int) -> tuple[int, int]:
    """How many rows and columns are looked at."""
    if rows <= _SIDE or rows * columns <= MOST:
        return rows, min(columns, MOST // max(rows, 1))
    return (MOST // columns, columns) if columns <= _SIDE else (_SIDE, _SIDE)


def _spread(size: int, count: int) -> list[int]:
    """So many of the numbers below `size`, the first and the last among them."""
    return [number * (size - 1) // max(count - 1, 1) for number in range(count)]


@lru_cache(maxsize=1024)
def places_of(shape: Shape) -> tuple[int, ...]:
    """The elements of a sample, counted row-major."""
    rows, columns = _matrix(shape)
    many = _taken(rows, columns)
    return tuple(row * columns + column for row in _spread(rows, many[0]) for column in _spread(columns, many[1]))


def turned(sample: Sequence[T], shape: Shape) -> tuple[T, ...]:
    """The sample of a matrix's transpose."""
    columns = _taken(*_matrix(shape))[1]
    return tuple(value for column in range(columns) for value in sample[column::columns])
