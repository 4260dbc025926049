"""Packed weights of compressed-tensors: whole numbers of 1 to 8 bits, MXFP4 and NVFP4; NVFP4 of ModelOpt.

    X.weight_packed        int32: codes along the rows, 2^(bits-1) added; or uint8: two of 4 bits, the low half first
    X.weight_scale         for the tensor, each row, or each group of columns; of MXFP4 exponents of 2 in uint8, 32 columns each
    X.weight_shape         int32: the plain shape
    X.weight_zero_point    int32: packed along the columns; or int8
    X.weight_g_idx         int32: for every column its group
    X.weight_global_scale  NVFP4: what the scales are divided by (ModelOpt: X.weight in uint8, and X.weight_scale_2 times them)

Source: compressed_tensors/compressors/ (pack_quantized, mxfp4, nvfp4).
"""

from __future__ import annotations

import struct

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.grid import lay_out
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.errors import ConvertError
from ckpt_tools.tree.nodes import MAX_ELEMENTS
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.quantised_kernels import E2M1, Kernel, Multiplied, Nibbles, Scaled
from ckpt_tools.values.quantised_plain import as_matrix
from ckpt_tools.values.quantised_rows import Matrix, Packed, PackedDown, Repeated, Rows

_MX, _NV = 32, 16  # columns with one scale
_WORD = 32  # bits


def match_packed(name: str, roles: Roles) -> Quantised | None:
    """A weight of whole numbers in 32-bit words."""
    packed, scale = roles.get("packed"), roles.get("scale")
    if packed is None or scale is None or packed.dtype != "int32" or "global_scale" in roles:
        return None
    found = {role: roles[role] for role in ("packed", "scale", "shape", "zero_point", "column_groups") if role in roles}
    return Quantised(name, "compressed-tensors packed", tuple(found.values()), None, lambda config: _settle(found, config))


def match_fp4(name: str, roles: Roles) -> Quantised | None:
    """A weight of MXFP4 or NVFP4: two values of 4 bits to a byte."""
    codes, scale = roles.get("packed") or roles.get("weight"), roles.get("scale")
    if codes is None or scale is None or codes.dtype != "uint8":
        return None
    divided, times = roles.get("global_scale"), roles.get("scale_2")
    if scale.dtype in ("uint8", "float8_e8m0fnu") and codes is roles.get("packed"):
        return Quantised(name, "mxfp4", (codes, scale), 2 * codes.entry.numel, lambda _: _fp4(codes, scale, None, _MX))
    whole = divided or times
    if scale.dtype != "float8_e4m3fn" or whole is None or (divided and times):
        return None
    return Quantised(
        name, "nvfp4", (codes, scale, whole), 2 * codes.entry.numel,
        lambda _: _fp4(codes, scale, whole, _NV, divided=whole is divided),
    )  # fmt: skip


def _fp4(codes: Part, scale: Part, whole: Part | None, block: int, *, divided: bool = False) -> Plain:
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else (0,)
    if scale.shape != (*shape[:-1], shape[-1] // block) or shape[-1] % block:
        raise mismatch(codes, scale, f"{block} columns have one scale.")
    if whole is not None and (whole.entry.numel != 1 or whole.dtype != "float32"):
        raise mismatch(scale, whole, "One number for all scales is wanted.")

    def make() -> Kernel:
        scales = scale.numbers(exponents=whole is None)
        found = scales if whole is None else Multiplied(scales, whole.numbers(), divided=divided)
        return Nibbles(row_major(codes.entry), E2M1, found, block, shape[-1], low_first=True)

    return Plain(shape, make)


def _settle(parts: dict[str, Part], config: Config) -> Plain:
    packed, scale, zero, groups = parts["packed"], parts["scale"], parts.get("zero_point"), parts.get("column_groups")
    shape = _shape(packed, parts.get("shape"))
    columns, words = shape[-1], packed.shape[-1]
    bits, loose = _bits(packed, columns, words, config)
    grid, boxes = lay_out(packed, shape, scale, config)
    offset = 1 << (bits - 1)
    if groups is not None and (groups.shape != (columns,) or groups.dtype != "int32"):
        raise mismatch(packed, groups, "The group of every column is wanted.")
    if zero is not None:
        _check_zero(zero, grid, bits, loose)

    def spread(rows: Rows) -> Repeated:
        return Repeated(rows, shape[:-1], grid[:-1], boxes[:-1])

    def make() -> Kernel:
        zeros: Rows | None = None
        if zero is not None:
            height = grid[-2] if len(grid) > 1 else 1
            whole = zero.dtype == "int8"
            inner = (
                Matrix(zero.numbers(), grid[-1])
                if whole
                else PackedDown(row_major(zero.entry), bits, height, grid[-1], offset, loose=loose)
            )
            zeros = spread(inner)
        codes = Packed(row_major(packed.entry), bits, columns, words, offset, loose=loose)
        order = None if groups is None else groups.numbers()
        return Scaled(codes, spread(Matrix(scale.numbers(), grid[-1])), columns, boxes[-1], zeros, order, grid[-1])

    return Plain(shape, make)


def _shape(packed: Part, shape: Part | None) -> tuple[int, ...]:
    """What the tensor of the shape says."""
    if shape is None:
        raise ConvertError(f"{packed.name!r} is packed, and its shape (weight_shape) is missing beside it.")
    kind = {"int64": "q", "int32": "i"}.get(shape.dtype)
    if kind is None or shape.shape != (len(packed.shape),) or not packed.shape:
        raise mismatch(packed, shape, "A size for each dimension is wanted.")
    sizes = struct.unpack(f"<{len(packed.shape)}{kind}", shape.small())
    if sizes[:-1] != packed.shape[:-1] or not 0 < sizes[-1] < MAX_ELEMENTS:
        raise mismatch(packed, shape, f"It says {list(sizes)}; only columns are packed.")
    return sizes


def _bits(packed: Part, columns: int, words: int, config: Config) -> tuple[int, bool]:
    """Bits of a code, and whether words hold whole codes only, as versions before 0.16 wrote 3, 5 and 6 bits."""
    dense = [(bits, False) for bits in range(1, 9) if -(-columns * bits // _WORD) == words]
    loose = [(bits, True) for bits in (3, 5, 6) if -(-columns // (_WORD // bits)) == words]
    found = [row for row in dense + loose if config.bits in (None, row[0])]
    if config.bits is None and len(dense) == 1:
        found = dense
    if len(found) != 1:
        raise ConvertError(
            f"{packed} is packed, and the bits of a code are not known.",
            why=f"{columns} codes in {words} words fit {', '.join(str(bits) for bits, _ in found) or 'no number of'} bits.",
            fix="config.json beside the weights says them (num_bits).",
        )
    return found[0]


def _check_zero(zero: Part, grid: tuple[int, ...], bits: int, loose: bool) -> None:
    """Zero points are there for every scale: packed along the rows of scales, or as they are."""
    rows, columns = as_matrix(grid)
    height = grid[-2] if len(grid) > 1 else 1
    words = -(-height // (_WORD // bits)) if loose else -(-height * bits // _WORD)
    packed = (*grid[:-2], words, columns)
    if (zero.dtype, zero.shape) not in (("int32", packed), ("int8", grid)):
        raise ConvertError(f"{zero}: the zero points of {rows} x {columns} scales are wanted.")
