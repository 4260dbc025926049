"""compressed-tensors: whole numbers of 1 to 8 bits in 32-bit words."""

from __future__ import annotations

import struct
from math import prod

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.edit.quantised.scaled import lay_out
from ckpt_tools.errors import ConvertError
from ckpt_tools.tree.nodes import MAX_ELEMENTS
from ckpt_tools.values.quantised import Rows, packed_along, packed_down, repeated, scaled

_WORD_BITS = 32


def match_packed(name: str, roles: Roles) -> Quantised | None:
    packed, scale = roles.get("packed"), roles.get("scale")
    if packed is None or scale is None or packed.dtype != "int32" or "global_scale" in roles:
        return None
    found = {role: roles[role] for role in ("packed", "scale", "shape", "zero_point", "column_groups") if role in roles}
    return Quantised(name, "compressed-tensors packed", tuple(found.values()), None, lambda config: _settle(found, config))


def _settle(parts: dict[str, Part], config: Config) -> Plain:
    packed, scale, zero, groups = parts["packed"], parts["scale"], parts.get("zero_point"), parts.get("column_groups")
    shape = _shape(packed, parts.get("shape"))
    columns, words = shape[-1], packed.shape[-1]
    bits = _bits(packed, columns, words, config)
    boxes = lay_out(packed, shape, scale, config)
    grid = tuple(-(-max(size, 1) // max(box, 1)) for size, box in zip(shape, boxes, strict=True))
    offset = 1 << (bits - 1)
    if groups is not None and (groups.shape != (columns,) or groups.dtype != "int32"):
        raise mismatch(packed, groups, "The group of every column is wanted.")
    if zero is not None:
        height = grid[-2] if len(grid) > 1 else 1
        down = (*grid[:-2], -(-height * bits // _WORD_BITS), grid[-1])  # packed along the rows of scales
        if (zero.dtype, zero.shape) not in (("int32", down), ("int8", grid)):
            raise ConvertError(f"{zero}: the zero points of {prod(grid[:-1])} x {grid[-1]} scales are wanted.")

    def spread(rows: Rows) -> Rows:
        return repeated(rows, shape[:-1], boxes[:-1])

    def make() -> Rows:
        zeros: Rows | None = None
        if zero is not None and zero.dtype == "int8":
            zeros = spread(zero.numbers().rows(grid[-1]))
        elif zero is not None:
            zeros = spread(packed_down(zero.numbers(), bits, height, grid[-1], offset))
        codes = packed_along(packed.numbers(), bits, columns, words, offset)
        order = None if groups is None else groups.numbers()
        return scaled(codes, spread(scale.numbers().rows(grid[-1])), columns, boxes[-1], zeros, order, grid[-1])

    return Plain(shape, make)


def _shape(packed: Part, shape: Part | None) -> tuple[int, ...]:
    if shape is None:
        raise ConvertError(f"{packed.name!r} is packed, and its shape (weight_shape) is missing beside it.")
    kind = {"int64": "q", "int32": "i"}.get(shape.dtype)
    if kind is None or shape.shape != (len(packed.shape),) or not packed.shape:
        raise mismatch(packed, shape, "A size for each dimension is wanted.")
    sizes = struct.unpack(f"<{len(packed.shape)}{kind}", shape.small())
    if sizes[:-1] != packed.shape[:-1] or not 0 < sizes[-1] < MAX_ELEMENTS:
        raise mismatch(packed, shape, f"It says {list(sizes)}; only columns are packed.")
    return sizes


def _bits(packed: Part, columns: int, words: int, config: Config) -> int:
    fits = [bits for bits in range(1, 9) if -(-columns * bits // _WORD_BITS) == words and config.bits in (None, bits)]
    # Before 0.16 words held whole codes only: where those would take as many words, the file does not tell which it is.
    found = [bits for bits in fits if bits not in (3, 5, 6) or not 1 < words == -(-columns // (_WORD_BITS // bits))]
    if len(found) != 1:
        raise ConvertError(
            f"{packed} is packed, and the bits of a code are not known.",
            why=f"{columns} codes in {words} words fit {', '.join(map(str, found)) or 'no number of'} bits.",
            fix="config.json beside the weights says them (num_bits).",
        )
    return found[0]
