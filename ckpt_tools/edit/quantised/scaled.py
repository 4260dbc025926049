"""Codes of one byte with a scale for the tensor, for each row, or for each block: FP8 and int8.

    X.weight       float8_* or int8, of any number of dimensions
    X.weight_scale_inv, X.weight_scale, X.scale_weight or X.scale    y = (x - zero point) * scale

The scale has one element, one for each index of the leading dimensions, or a block for each of its own along every dimension.
Sources: DeepSeek-V3's inference/kernel.py (`weight_dequant`; it multiplies, whatever `_inv` says), compressed_tensors/
compressors/naive_quantized/base.py, ComfyUI's `scaled_fp8`, bitsandbytes/nn/modules.py (`Linear8bitLt`, SCB: row / 127).
"""

from __future__ import annotations

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.grid import granularity, lay_out
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.errors import ConvertError
from ckpt_tools.values.quantised.kernels import Kernel, Scaled
from ckpt_tools.values.quantised.plain import as_matrix
from ckpt_tools.values.quantised.rows import Matrix, Repeated

FP8 = frozenset(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"))
_SCALES = frozenset(("float32", "bfloat16", "float16", "float64", "float8_e8m0fnu"))
_SHORT = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8 e5m2", "float8_e4m3fnuz": "fp8 fnuz", "float8_e5m2fnuz": "fp8 e5m2 fnuz"}
# bitsandbytes multiplies by this in place of dividing by 127 (backends/default/ops.py, `int8_vectorwise_dequant`)
_PER_127 = 7.874015718698502e-3


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
    label = f"{_SHORT.get(weight.dtype, weight.dtype)}, {granularity(weight.shape, scale.shape)}"
    return Quantised(name, label, parts, weight.entry.numel, lambda config: _settle(weight, scale, zero, config, exponents))


def match_bnb_int8(name: str, roles: Roles) -> Quantised | None:
    """A weight of bitsandbytes' LLM.int8()."""
    weight, scale, layout = roles.get("weight"), roles.get("SCB"), roles.get("format")
    if weight is None or scale is None or weight.dtype != "int8":
        return None

    def settle(_: Config) -> Plain:
        rows, columns = as_matrix(weight.shape)
        if len(weight.shape) < 2 or scale.shape != weight.shape[:1] or scale.dtype != "float32":
            raise mismatch(weight, scale, "SCB is float32, and has one element for each row.")
        if layout is not None and any(layout.small()):
            fix = "bitsandbytes below 0.45 turns it back on the GPU that it was made for."
            raise ConvertError(f"{weight.name!r} is in a tiled layout ({layout.name}), not in rows.", fix=fix)

        def make() -> Kernel:
            return Scaled(
                Matrix(weight.numbers(), columns), _rows_of(scale, weight.shape, (rows,)), columns, columns, factor=_PER_127
            )

        return Plain(weight.shape, make)

    parts = (weight, scale, *([layout] if layout else []))
    return Quantised(name, "bnb int8", parts, weight.entry.numel, settle)


def _rows_of(scale: Part, shape: tuple[int, ...], rows: tuple[int, ...]) -> Repeated | Matrix:
    """A scale for each index of the first dimension."""
    matrix = Matrix(scale.numbers(), 1)
    return matrix if len(shape) == 2 else Repeated(matrix, shape[:-1], shape[:1] + (1,) * (len(shape) - 2), (1, *shape[1:-1]))


def _settle(weight: Part, scale: Part, zero: Part | None, config: Config, exponents: bool) -> Plain:
    grid, boxes = lay_out(weight, weight.shape or (1,), scale, config)
    if zero is not None and (zero.shape != scale.shape or zero.entry.dtype.family not in ("int", "float")):
        raise mismatch(scale, zero, "A zero point for each scale is wanted.")
    shape = weight.shape or (1,)

    def rows_of(part: Part) -> Repeated:
        matrix = Matrix(part.numbers(exponents=exponents and part is scale), grid[-1])
        return Repeated(matrix, shape[:-1], grid[:-1], boxes[:-1])

    def make() -> Kernel:
        zeros = None if zero is None else rows_of(zero)
        return Scaled(Matrix(weight.numbers(), shape[-1]), rows_of(scale), shape[-1], boxes[-1], zeros)

    return Plain(weight.shape, make)
