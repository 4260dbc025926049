"""Weights of bitsandbytes with 4 bits: nf4 and fp4.

    B                                       codes, the high half of a byte first; uint8, or any dtype of the same bytes
    B.quant_state.bitsandbytes__nf4 (fp4)   JSON in uint8: quant_type, blocksize, dtype, shape; nested_blocksize, nested_offset
    B.quant_map                             the sixteen values
    B.absmax                                a scale for each block; nested: codes of 8 bits, with B.nested_quant_map, and
                                            B.nested_absmax for their scales

Source: bitsandbytes/functional.py (`QuantState`, `dequantize_4bit`), backends/default/ops.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from math import prod
from typing import Any

from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles
from ckpt_tools.errors import ConvertError
from ckpt_tools.io.parsers import load_json
from ckpt_tools.tree.nodes import MAX_ELEMENTS
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.quantised_kernels import Kernel, Nested, Nibbles, Scales
from ckpt_tools.values.quantised_plain import as_matrix

_NESTED = ("nested_absmax", "nested_quant_map")


def match_4bit(name: str, roles: Roles) -> Quantised | None:
    """A weight of 4 bits."""
    kinds = [kind for kind in ("nf4", "fp4") if kind in roles]
    needed = ("weight", "absmax", "quant_map")
    if len(kinds) != 1 or not all(role in roles for role in needed):
        return None
    names = (*needed, *(role for role in _NESTED if role in roles), kinds[0])
    parts = {role: roles[role] for role in names}
    return Quantised(
        name, f"bnb {kinds[0]}", tuple(parts.values()), 2 * roles["weight"].entry.nbytes, lambda _: _settle(parts, kinds[0])
    )


class _State:
    """What the JSON says, each value checked."""

    def __init__(self, part: Part) -> None:
        self.part = part
        try:
            content = load_json(part.small()) if part.dtype == "uint8" else None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ConvertError(f"{part.name!r} says how a weight is quantised, and is not JSON.")
        self.content: dict[str, Any] = content

    def whole(self, key: str) -> int:
        """A number above 0."""
        value = self.content.get(key)
        if type(value) is not int or not 0 < value < MAX_ELEMENTS:
            raise self.error(key, "a whole number above 0")
        return value

    def shape(self) -> tuple[int, ...]:
        """The plain weight's."""
        value = self.content.get("shape")
        sizes = value if isinstance(value, list) and value else [-1]
        if not all(type(size) is int and 0 <= size < MAX_ELEMENTS for size in sizes) or len(sizes) > 64:
            raise self.error("shape", "a list of sizes")
        return tuple(sizes)

    def number(self, key: str) -> float:
        """Any number."""
        value = self.content.get(key)
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.error(key, "a number")
        return float(value)  # type: ignore[arg-type]

    def error(self, key: str, wanted: str) -> ConvertError:
        return ConvertError(f"{self.part.name!r}: {key!r} is not {wanted}.")


def _settle(parts: dict[str, Part], kind: str) -> Plain:
    state, codes = _State(parts[kind]), parts["weight"]
    if state.content.get("quant_type") != kind:
        raise state.error("quant_type", f"{kind!r}, as the name says")
    shape, block = state.shape(), state.whole("blocksize")
    count, nbytes = prod(shape), codes.entry.nbytes
    if not 0 <= 2 * nbytes - count <= 1:
        why = f"Its state says shape {list(shape)}, which takes {-(-count // 2)} bytes; there are {nbytes}."
        raise ConvertError(f"{codes.name!r} has other bytes than its shape needs.", why=why)
    table = struct.unpack("<16f", _sized(parts["quant_map"], 16, "float32").small())
    scales_of = _scales(parts, state, -(-count // block))

    def make() -> Kernel:
        return Nibbles(row_major(codes.entry), table, scales_of(), block, as_matrix(shape)[1], low_first=False)

    return Plain(shape, make)


def _scales(parts: dict[str, Part], state: _State, count: int) -> Callable[[], Scales]:
    """What gives the scales of so many blocks."""
    absmax = parts["absmax"]
    if not any(role in parts for role in _NESTED):
        found = _sized(absmax, count, "float32")
        return lambda: found.numbers()
    if not all(role in parts for role in _NESTED):
        raise ConvertError(f"{absmax.name!r} is nested, and {' or '.join(_NESTED)} is missing beside it.")
    codes, block, offset = _sized(absmax, count, "uint8"), state.whole("nested_blocksize"), state.number("nested_offset")
    outer, table = (
        _sized(parts["nested_absmax"], -(-count // block), "float32"),
        _sized(parts["nested_quant_map"], 256, "float32"),
    )
    return lambda: Nested(codes.numbers(), table.numbers(), outer.numbers(), block, offset)


def _sized(part: Part, count: int, dtype: str) -> Part:
    """A part, which has so many elements of a dtype."""
    if part.entry.numel != count or part.dtype != dtype:
        raise ConvertError(f"{part}: {count} elements of {dtype} are wanted.", why="As many as the shape and its blocks need.")
    return part
