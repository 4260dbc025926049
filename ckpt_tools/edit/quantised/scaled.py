"""FP8 and int8 with scales; which elements one scale is for, by the two shapes, and by config.json where they leave it open."""

from __future__ import annotations

from math import prod

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.errors import ConvertError
from ckpt_tools.values.quantised import MakeRows, Rows, repeated, scaled

Sizes = tuple[int, ...]
FP8 = frozenset(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"))
_SCALES = frozenset(("float32", "bfloat16", "float16", "float64", "float8_e8m0fnu"))
SHORT = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8 e5m2", "float8_e4m3fnuz": "fp8 fnuz", "float8_e5m2fnuz": "fp8 e5m2 fnuz"}


def match_scaled(name: str, roles: Roles) -> Quantised | None:
    weight, scale = roles.get("weight"), roles.get("scale")
    if weight is None or scale is None or weight.dtype not in (*FP8, "int8"):
        return None
    exponents = scale.dtype == "uint8"  # MXFP8: exponents of 2
    if not exponents and scale.dtype not in _SCALES:
        return None
    if weight.dtype == "int8" and (exponents or scale.dtype == "float8_e8m0fnu"):  # two values of 4 bits, or one of 8
        return None
    zero = roles.get("zero_point")
    parts = (weight, scale, *([zero] if zero else []))
    label = f"{SHORT.get(weight.dtype, weight.dtype)}, {granularity(weight.shape, scale.shape)}"

    def settle(config: Config) -> Plain:
        shape = weight.shape or (1,)
        boxes = lay_out(weight, shape, scale, config)
        if zero is not None and (zero.shape != scale.shape or zero.entry.dtype.family not in ("int", "float")):
            raise mismatch(scale, zero, "A zero point for each scale is wanted.")
        return Plain(weight.shape, per_box(weight, scale, zero, shape, boxes, exponents=exponents))

    return Quantised(name, label, parts, weight.entry.numel, settle)


def per_box(
    weight: Part, scale: Part, zero: Part | None, shape: Sizes, boxes: Sizes, *, exponents: bool = False, factor: float = 1.0
) -> MakeRows:
    """Codes with a scale for each box of so many elements along every dimension."""
    cells = -(-shape[-1] // max(boxes[-1], 1))

    def rows_of(part: Part) -> Rows:
        matrix = part.numbers(exponents=exponents and part is scale).rows(cells)
        return repeated(matrix, shape[:-1], boxes[:-1])

    def make() -> Rows:
        zeros = None if zero is None else rows_of(zero)
        return scaled(weight.numbers().rows(shape[-1]), rows_of(scale), shape[-1], boxes[-1], zeros, factor=factor)

    return make


def granularity(shape: Sizes, scale: Sizes) -> str:
    """What one scale is for, in words."""
    if prod(scale) == 1:
        return "a scale a tensor"
    whole = scale + (1,) * (len(shape) - len(scale))
    if whole[: len(shape) - 1] == shape[:-1]:
        return "a scale a row" if whole[-1:] == (1,) else "a scale a group"
    return "a scale a block"


def lay_out(weight: Part, shape: Sizes, scale: Part, config: Config) -> Sizes:
    """How many elements of the plain weight a scale is for, along every dimension."""
    grid = _grid(weight, shape, scale)
    rows = grid[:-1] == shape[:-1] and prod(shape[:-1]) > 1  # groups of columns in each row
    said = (0,) * len(shape)
    if rows and config.group:
        said = (*said[1:], config.group)
    elif config.block and len(shape) > 1:
        said = (*said[2:], *config.block)
    return tuple(_box(weight, scale, size, cells, one, even=rows) for size, cells, one in zip(shape, grid, said, strict=True))


def _grid(weight: Part, shape: Sizes, scale: Part) -> Sizes:
    found = scale.shape
    if prod(found) == 1:
        return (1,) * len(shape)
    if len(found) < len(shape) and found == shape[: len(found)]:
        return found + (1,) * (len(shape) - len(found))
    if len(found) != len(shape) or any(not 0 < cells <= max(size, 1) for cells, size in zip(found, shape, strict=True)):
        raise mismatch(weight, scale, "There is one scale for the tensor, for each row, or for each block.")
    return found


def _box(weight: Part, scale: Part, size: int, cells: int, said: int, *, even: bool) -> int:
    """How many of `size` elements each of so many scales is for; `said` by config.json, 0 where it says nothing."""
    if cells in (1, size):
        return size if cells == 1 else 1
    least, most = -(-size // cells), -(-size // (cells - 1)) - 1
    if said:
        if least <= said <= most:
            return said
        why = f"config.json says {said} to a scale; {cells} scales for {size} elements are {least} to {most}."
        raise mismatch(weight, scale, why)
    if even and size % cells == 0:
        return size // cells
    power = 1 << (most.bit_length() - 1)
    if power >= least:
        return power
    if size % cells == 0:
        return size // cells
    raise ConvertError(
        f"{weight}, and {scale}: the size of a block is not known.",
        why=f"{cells} scales for {size} elements are for {least} to {most} each.",
        fix='config.json beside the weights says it: {"quantization_config": {"weight_block_size": [ROWS, COLUMNS]}}.',
    )
