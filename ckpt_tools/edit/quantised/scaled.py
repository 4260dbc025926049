"""FP8 and int8 with scales."""

from __future__ import annotations

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.grid import Sizes, granularity, lay_out
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.values.quantised_kernels import Kernel, Scaled
from ckpt_tools.values.quantised_rows import Matrix, Repeated

FP8 = frozenset(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"))
_SCALES = frozenset(("float32", "bfloat16", "float16", "float64", "float8_e8m0fnu"))
SHORT = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8 e5m2", "float8_e4m3fnuz": "fp8 fnuz", "float8_e5m2fnuz": "fp8 e5m2 fnuz"}


def match_scaled(name: str, roles: Roles) -> Quantised | None:
    """A weight of FP8 or int8 and its scale."""
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
    return Quantised(
        name, label, parts, weight.entry.numel, lambda config: _scaled_settle(weight, scale, zero, config, exponents)
    )


def _scaled_settle(weight: Part, scale: Part, zero: Part | None, config: Config, exponents: bool) -> Plain:
    shape = weight.shape or (1,)
    grid, boxes = lay_out(weight, shape, scale, config)
    if zero is not None and (zero.shape != scale.shape or zero.entry.dtype.family not in ("int", "float")):
        raise mismatch(scale, zero, "A zero point for each scale is wanted.")
    plain = scaled_plain(weight, scale, zero, shape, grid, boxes, exponents=exponents)
    return Plain(weight.shape, plain.make)


def scaled_plain(
    weight: Part, scale: Part, zero: Part | None, shape: Sizes, grid: Sizes, boxes: Sizes, *, exponents: bool = False
) -> Plain:
    """Codes with so many scales along every dimension, each for a box of elements."""

    def rows_of(part: Part) -> Repeated:
        matrix = Matrix(part.numbers(exponents=exponents and part is scale), grid[-1])
        return Repeated(matrix, shape[:-1], grid[:-1], boxes[:-1])

    def make() -> Kernel:
        zeros = None if zero is None else rows_of(zero)
        return Scaled(Matrix(weight.numbers(), shape[-1]), rows_of(scale), shape[-1], boxes[-1], zeros)

    return Plain(shape, make)
