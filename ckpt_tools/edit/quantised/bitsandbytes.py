"""bitsandbytes: nf4, fp4, int8."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from math import prod
from typing import Any

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.errors import ConvertError
from ckpt_tools.io.parsers import load_json
from ckpt_tools.tree.nodes import MAX_ELEMENTS
from ckpt_tools.values.quantised import Rows, Scales, as_matrix, nested, nibbles, repeated, scaled

# bitsandbytes multiplies by this in place of dividing by 127 (backends/default/ops.py, `int8_vectorwise_dequant`)
_PER_127 = 7.874015718698502e-3
_NESTED = ("nested_absmax", "nested_quant_map")


def match_4bit(name: str, roles: Roles) -> Quantised | None:
    kinds = [kind for kind in ("nf4", "fp4") if kind in roles]
    needed = ("weight", "absmax", "quant_map")
    if len(kinds) != 1 or not all(role in roles for role in needed):
        return None
    names = (*needed, *(role for role in _NESTED if role in roles), kinds[0])
    parts = {role: roles[role] for role in names}
    return Quantised(
        name,
        f"bnb {kinds[0]}",
        tuple(parts.values()),
        2 * roles["weight"].entry.nbytes,
        lambda _: _bitsandbytes_settle(parts, kinds[0]),
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
        value = self.content.get(key)
        if type(value) is not int or not 0 < value < MAX_ELEMENTS:
            raise self.error(key, "a whole number above 0")
        return value

    def shape(self) -> tuple[int, ...]:
        value = self.content.get("shape")
        sizes = value if isinstance(value, list) and value else [-1]
        if not all(type(size) is int and 0 <= size < MAX_ELEMENTS for size in sizes) or len(sizes) > 64:
            raise self.error("shape", "a list of sizes")
        return tuple(sizes)

    def number(self, key: str) -> float:
        value = self.content.get(key)
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.error(key, "a number")
        return float(value)  # type: ignore[arg-type]

    def error(self, key: str, wanted: str) -> ConvertError:
        return ConvertError(f"{self.part.name!r}: {key!r} is not {wanted}.")


def _bitsandbytes_settle(parts: dict[str, Part], kind: str) -> Plain:
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

    def make() -> Rows:
        return nibbles(codes.numbers("uint8"), scales_of(), block, as_matrix(shape)[1], low_first=False, table=table)

    return Plain(shape, make)


def _scales(parts: dict[str, Part], state: _State, count: int) -> Callable[[], Scales]:
    absmax = parts["absmax"]
    if not any(role in parts for role in _NESTED):
        found = _sized(absmax, count, "float32")
        return lambda: found.numbers().floats
    if not all(role in parts for role in _NESTED):
        raise ConvertError(f"{absmax.name!r} is nested, and {' or '.join(_NESTED)} is missing beside it.")
    codes, block, offset = _sized(absmax, count, "uint8"), state.whole("nested_blocksize"), state.number("nested_offset")
    outer, table = (
        _sized(parts["nested_absmax"], -(-count // block), "float32"),
        _sized(parts["nested_quant_map"], 256, "float32"),
    )
    return lambda: nested(codes.numbers(), table.numbers(), outer.numbers(), block, offset)


def _sized(part: Part, count: int, dtype: str) -> Part:
    """A part, which has so many elements of a dtype."""
    if part.entry.numel != count or part.dtype != dtype:
        raise ConvertError(f"{part}: {count} elements of {dtype} are wanted.", why="As many as the shape and its blocks need.")
    return part


def match_bnb_int8(name: str, roles: Roles) -> Quantised | None:
    weight, scale, layout = roles.get("weight"), roles.get("SCB"), roles.get("format")
    if weight is None or scale is None or weight.dtype != "int8":
        return None

    def settle(_: Config) -> Plain:
        columns = as_matrix(weight.shape)[1]
        if len(weight.shape) < 2 or scale.shape != weight.shape[:1] or scale.dtype != "float32":
            raise mismatch(weight, scale, "SCB is float32, and has one element for each row.")
        if layout is not None and any(layout.small()):
            fix = "bitsandbytes below 0.45 turns it back on the GPU that it was made for."
            raise ConvertError(f"{weight.name!r} is in a tiled layout ({layout.name}), not in rows.", fix=fix)

        def make() -> Rows:
            outer = weight.shape[:-1]
            scales = repeated(scale.numbers().rows(1), outer, outer[:1] + (1,) * (len(outer) - 1), (1, *outer[1:]))
            return scaled(weight.numbers().rows(columns), scales, columns, columns, factor=_PER_127)

        return Plain(weight.shape, make)

    parts = (weight, scale, *([layout] if layout else []))
    return Quantised(name, "bnb int8", parts, weight.entry.numel, settle)
