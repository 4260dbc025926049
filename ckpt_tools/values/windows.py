"""A box of one tensor: which elements an index names, reading those alone, their numbers exactly and as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from ckpt_tools.errors import UsageError
from ckpt_tools.io.content import Computed, Content, read
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import HALVES, CastCount, as_bytes, cast, exact, numbers, row_major
from ckpt_tools.values.pytorch import torch

Axis = range | int
_PART = re.compile(r"(-?\d{1,19})|(-?\d{1,19})?\s*:\s*(-?\d{1,19})?\s*(?::\s*(-?\d{1,19})?)?")


def read_index(text: str, shape: Sequence[int]) -> list[Axis]:
    """What an index such as `0:3, :5` names in each dimension: a number, or a range."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if parts.count("...") > 1:
        raise _refused(text, "it has `...` twice")
    if "..." not in parts:
        parts.append("...")
    at, rest = parts.index("..."), len(shape) - len(parts) + 1
    if rest < 0:
        raise _refused(text, f"the tensor has {len(shape)} dimensions")
    parts[at : at + 1] = [":"] * rest
    return [_axis(text, part, size) for part, size in zip(parts, shape, strict=True)]


def _axis(text: str, part: str, size: int) -> Axis:
    found = _PART.fullmatch(part)
    if found is None:
        raise _refused(text, f"{part!r} is not a number or a range")
    if found[1] is not None:
        number = int(found[1])
        if not -size <= number < size:
            raise _refused(text, f"{number} is outside a dimension of {size}")
        return number % size
    start, stop, step = (None if one is None else int(one) for one in found.groups()[1:])
    if step is not None and step < 1:
        raise _refused(text, "a step is a positive number")
    return range(size)[start:stop:step]


def _refused(text: str, why: str) -> UsageError:
    return UsageError(f"The index [{text}] cannot be read: {why}.", fix="For example: [0], [0:3, :5], [..., -1].")


def narrowed(entry: Entry, axes: Sequence[Axis]) -> Entry:
    """The view on the elements that the axes name; every dimension stays."""
    ranges = [range(axis, axis + 1) if isinstance(axis, int) else axis for axis in axes]
    offset = entry.offset + sum(one.start * step for one, step in zip(ranges, entry.stride, strict=True) if len(one))
    shape = tuple(map(len, ranges))
    stride = tuple(one.step * step for one, step in zip(ranges, entry.stride, strict=True))
    return replace(entry, shape=shape, stride=stride, offset=offset if all(shape) else 0)


def values(entry: Entry) -> torch.Tensor:
    """The numbers of a view, exactly: floats as float64, complex ones as complex128, the others in their own dtype."""
    return exact(bytearray(read(row_major(entry))), entry.dtype).reshape(_shown_shape(entry))


def _shown_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of the numbers: two float4 are one element to torch."""
    if entry.dtype.packed == 1:
        return entry.shape
    return (*entry.shape[:-1], entry.shape[-1] * entry.dtype.packed) if entry.shape else (entry.dtype.packed,)


# --- as an array of NumPy's


def as_array(entry: Entry) -> tuple[Content, DType, tuple[int, ...]]:
    """The bytes of a view as NumPy can hold them, with dtype and shape. What NumPy has no type for is exact in a wider one."""
    content = row_major(entry)
    wider = _WIDER.get(entry.dtype.name)
    if wider is None:
        return content, entry.dtype, entry.shape
    target, shape = DTYPES[wider], _shown_shape(entry)
    if entry.dtype.family == "float" and entry.dtype.packed == 1:
        return cast(content, entry.dtype, target, CastCount()), target, shape

    def work() -> Iterator[memoryview]:  # complex halves, and float4, of which torch has few kernels
        for block in numbers(content, entry.dtype):
            yield as_bytes(block, target)

    return Computed(prod(shape) * target.itemsize, work, content), target, shape


_WIDER = {row.name: "float32" for row in DTYPES.values() if row.family == "float" and row.in_torch and row.bits == 8}
_WIDER |= {"bfloat16": "float32", "complex32": "complex64"}


# --- as text


def texts(found: torch.Tensor, dtype: DType) -> list[str]:
    """Each number in the fewest digits that tell it from its neighbours in its dtype."""
    flat = found.flatten()
    if found.dtype.is_complex:
        part = DTYPES[HALVES[dtype.name]]
        halves = _shortest(torch.view_as_real(flat).flatten(), part)
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return [f"{real}{'' if imaginary[0] in '+-' else '+'}{imaginary}j" for real, imaginary in pairs]
    return _shortest(flat, dtype) if found.dtype.is_floating_point else [str(one) for one in flat.tolist()]


def _shortest(flat: torch.Tensor, dtype: DType) -> list[str]:
    known: list[float] = flat.tolist()
    made = [repr(one) for one in known]
    if dtype.name == "float64":
        return made
    own = getattr(torch, "float32" if dtype.packed > 1 else dtype.name)
    left = [index for index, one in enumerate(known) if one == one and abs(one) != float("inf")]
    for digits in range(1, 10):
        tried = [f"{known[index]:.{digits}g}" for index in left]
        near = torch.tensor([float(text) for text in tried], dtype=torch.float64).to(own).to(torch.float64).tolist()
        for index, text, value in zip(left, tried, near, strict=True):
            if value == known[index]:
                made[index] = repr(float(text))
        left = [index for index, value in zip(left, near, strict=True) if value != known[index]]
        if not left:
            break
    return made


def elided(size: int, edge: int) -> list[range]:
    """The first and the last few places of a dimension; all of one that is short."""
    return [range(size)] if size <= 2 * edge else [range(edge), range(size - edge, size)]
