"""bitsandbytes: nf4, fp4, int8."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch, said_in
from ckpt_tools.edit.quantised.scaled import per_box
from ckpt_tools.errors import ConvertError
from ckpt_tools.tree.nodes import MAX_ELEMENTS
from ckpt_tools.values.quantised import Rows, nested, nibbles

# bitsandbytes multiplies by this in place of dividing by 127 (backends/default/ops.py, `int8_vectorwise_dequant`)
_PER_127 = 7.874015718698502e-3
_NESTED = ("nested_absmax", "nested_quant_map")
_WHOLE = "a whole number above 0"


def match_4bit(name: str, roles: Roles) -> Quantised | None:
    kinds = [kind for kind in ("nf4", "fp4") if kind in roles]
    needed = ("weight", "absmax", "quant_map")
    if len(kinds) != 1 or not all(role in roles for role in needed):
        return None
    names = (*needed, *(role for role in _NESTED if role in roles), kinds[0])
    parts = {role: roles[role] for role in names}
    settle = partial(_settle, parts, kinds[0])
    return Quantised(name, f"bnb {kinds[0]}", tuple(parts.values()), 2 * roles["weight"].entry.nbytes, settle)


def _settle(parts: dict[str, Part], kind: str, _: Config) -> Plain:
    codes, mark = parts["weight"], parts[kind]
    content = said_in(mark.name, mark.small() if mark.dtype == "uint8" else b"")

    def said(key: str, wanted: str, is_good: Callable[[Any], bool]) -> Any:
        if not is_good(value := content.get(key)):
            raise ConvertError(f"{mark.name!r}: {key!r} is not {wanted}.")
        return value

    said("quant_type", f"{kind!r}, as the name says", lambda value: value == kind)
    shape, block = tuple(said("shape", "a list of sizes", _is_shape)), said("blocksize", _WHOLE, _is_whole)
    count, nbytes = prod(shape), codes.entry.nbytes
    if not 0 <= 2 * nbytes - count <= 1:
        why = f"Its state says shape {list(shape)}, which takes {-(-count // 2)} bytes; there are {nbytes}."
        raise ConvertError(f"{codes.name!r} has other bytes than its shape needs.", why=why)
    table = struct.unpack("<16f", _sized(parts["quant_map"], 16, "float32").small())
    absmax, cells = parts["absmax"], -(-count // block)
    is_nested = any(role in parts for role in _NESTED)
    if is_nested:
        if not all(role in parts for role in _NESTED):
            raise ConvertError(f"{absmax.name!r} is nested, and {' or '.join(_NESTED)} is missing beside it.")
        scales, outer_block = _sized(absmax, cells, "uint8"), said("nested_blocksize", _WHOLE, _is_whole)
        offset = float(said("nested_offset", "a number", lambda value: type(value) in (int, float) and math.isfinite(value)))
        outer = _sized(parts["nested_absmax"], -(-cells // outer_block), "float32")
        outer_table = _sized(parts["nested_quant_map"], 256, "float32")
    else:
        scales = _sized(absmax, cells, "float32")

    def make() -> Rows:
        numbers = scales.numbers()
        found = nested(numbers, outer_table.numbers(), outer.numbers(), outer_block, offset) if is_nested else numbers.floats
        return nibbles(codes.numbers("uint8"), found, block, shape[-1], low_first=False, table=table)

    return Plain(shape, make)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 < value < MAX_ELEMENTS


def _is_shape(value: Any) -> bool:
    is_list = isinstance(value, list) and 0 < len(value) <= 64
    return is_list and all(type(size) is int and 0 <= size < MAX_ELEMENTS for size in value)


def _sized(part: Part, count: int, dtype: str) -> Part:
    if part.entry.numel != count or part.dtype != dtype:
        raise ConvertError(f"{part}: {count} elements of {dtype} are wanted.", why="As many as the shape and its blocks need.")
    return part


def match_bnb_int8(name: str, roles: Roles) -> Quantised | None:
    weight, scale, layout = roles.get("weight"), roles.get("SCB"), roles.get("format")
    if weight is None or scale is None or weight.dtype != "int8":
        return None

    def settle(_: Config) -> Plain:
        if len(weight.shape) < 2 or scale.shape != weight.shape[:1] or scale.dtype != "float32":
            raise mismatch(weight, scale, "SCB is float32, and has one element for each row.")
        if layout is not None and any(layout.small()):
            fix = "bitsandbytes below 0.45 turns it back on the GPU that it was made for."
            raise ConvertError(f"{weight.name!r} is in a tiled layout ({layout.name}), not in rows.", fix=fix)
        return Plain(weight.shape, per_box(weight, scale, None, weight.shape, (1, *weight.shape[1:]), factor=_PER_127))

    parts = (weight, scale, *([layout] if layout else []))
    return Quantised(name, "bnb int8", parts, weight.entry.numel, settle)
