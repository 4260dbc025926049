"""What the bytes of parts say against their files' names, where nothing else in the files says whose they are.

Of each part the first elements are read, and more of two only where those are the same.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

from ckpt_tools.errors import PartError
from ckpt_tools.io.content import read
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.same_bytes import same_bytes

_LOOKED_AT = 1024  # elements of a part
_VARIED = 16  # different elements, which no padding has, and no norm or bias that was never trained
_NEAR = 1 / 32  # relative; a cast to bfloat16 is off by 1/256, wherever it is rounded to


def _head(entry: Entry) -> Entry:
    """The first elements of an entry that lies row-major, as a row."""
    return replace(entry, shape=(min(entry.numel, _LOOKED_AT),), stride=(1,))


def _in_rows(entries: Iterable[Entry]) -> list[Entry]:
    """Those that have elements, row-major, as their bytes say them."""
    return [entry for entry in entries if entry.numel and entry.is_contiguous and not entry.lazy_bits]


def _is_varied(data: bytes, itemsize: int) -> bool:
    return len({data[at : at + itemsize] for at in range(0, len(data), itemsize)}) >= _VARIED


def check_not_twice(parts: Mapping[int, Sequence[Entry]], shown: Callable[[int], str]) -> None:
    """No two ranks hold the very same numbers of what was cut among them."""
    known: dict[object, int] = {}
    for rank, entries in parts.items():
        plain = _in_rows(entries)
        largest = max(plain, key=lambda entry: entry.numel, default=None)
        if largest is None:
            continue
        data = read(row_major(_head(largest)))
        if not _is_varied(data, largest.dtype.itemsize):
            continue
        first = known.setdefault((data, tuple((entry.dtype.name, entry.shape) for entry in plain)), rank)
        if first != rank and all(map(same_bytes, _in_rows(parts[first]), plain)):
            raise PartError(
                f"{shown(first)} and {shown(rank)} hold the very same numbers of what was cut among them.",
                why="One file is there twice, under two names.", fix="Get the file of each of them again.",
            )  # fmt: skip


def check_casts(pairs: Iterable[tuple[str, str, Entry, Entry]]) -> None:
    """Numbers and their 16-bit cast, which another file holds, are the same but for rounding."""
    for file, name, own, cast in pairs:
        numbers, casts = (_numbers(entry) for entry in (own, cast))
        if numbers is None or casts is None:
            continue
        far = sum(map(_is_far, numbers, casts))
        if 2 * far > len(numbers):
            raise PartError(
                f"{file} does not hold the weights that the model file has: {far} of the first {len(numbers)} elements of "
                f"its part of {name!r} are others.",
                why="Either it is another rank's, or of another step or run.", fix="Get the files of one save again.",
            )  # fmt: skip


def _is_far(one: float, other: float) -> bool:
    """Whether a number and its cast cannot be one; of infinities and of what a cast makes zero nothing is said."""
    return isfinite(one) and isfinite(other) and abs(one - other) > _NEAR * max(abs(one), abs(other)) + 1e-6


def _numbers(entry: Entry) -> Sequence[float] | None:
    """The first elements; None where they do not lie in a row, or are not a model's numbers."""
    if not _in_rows([entry]) or sys.byteorder != "little":
        return None
    data = read(row_major(_head(entry)))
    if entry.dtype.name == "bfloat16":
        return array.array("f", b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)))
    code = {"float32": "f", "float16": "e"}.get(entry.dtype.name)
    return struct.unpack(f"<{len(data) // entry.dtype.itemsize}{code}", data) if code else None
