"""MXFP4 and NVFP4: two values of 4 bits to a byte."""

from __future__ import annotations

from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.values.quantised import Rows, multiplied, nibbles, nibbles_turned

_MX, _NV = 32, 16  # columns with one scale
_BYTES = _MX // 2
_DIMENSIONS = 4  # of the experts of one layer: expert, row, group, byte


def match_fp4(name: str, roles: Roles) -> Quantised | None:
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
    if whole is not None:
        check_one(scale, whole)

    def make() -> Rows:
        scales = scale.numbers(exponents=whole is None).floats
        found = scales if whole is None else multiplied(scales, whole.numbers(), divided=divided)
        return nibbles(codes.numbers(), found, block, shape[-1], low_first=True)

    return Plain(shape, make)


def check_one(scale: Part, whole: Part) -> None:
    """Raise ConvertError where all scales do not have one number."""
    if whole.entry.numel != 1 or whole.dtype != "float32":
        raise mismatch(scale, whole, "One number for all scales is wanted.")


def match_mxfp4(name: str, roles: Roles) -> Quantised | None:
    blocks, scales = roles.get("blocks"), roles.get("block_scales")
    if blocks is None or scales is None or (blocks.dtype, scales.dtype) != ("uint8", "uint8"):
        return None
    turned = blocks.name.endswith("_blocks") and len(blocks.shape) == _DIMENSIONS
    label = "mxfp4, rows and columns exchanged" if turned else "mxfp4"
    return Quantised(name, label, (blocks, scales), 2 * blocks.entry.numel, lambda _: _settle(blocks, scales, turned=turned))


def _settle(blocks: Part, scales: Part, *, turned: bool) -> Plain:
    if len(blocks.shape) < 3 or blocks.shape[-1] != _BYTES or blocks.shape[:-1] != scales.shape:
        raise mismatch(blocks, scales, f"{_BYTES} bytes have one scale.")
    *outer, rows, groups, _ = blocks.shape
    columns = groups * _MX

    def make() -> Rows:
        exponents = scales.numbers(exponents=True)
        if turned:
            return nibbles_turned(blocks.numbers(), exponents, _MX, rows, columns)
        return nibbles(blocks.numbers(), exponents.floats, _MX, columns, low_first=True)

    return Plain((*outer, columns, rows) if turned else (*outer, rows, columns), make)
