"""MXFP4 and NVFP4: two values of 4 bits to a byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_tools.edit.quantised.config import COMFY_LAYERS, Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch, said_in
from ckpt_tools.errors import ConvertError
from ckpt_tools.values.quantised import Rows, multiplied, nibbles, nibbles_turned, tiled

_MX, _NV = 32, 16  # columns with one scale


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
    if whole.entry.numel != 1 or whole.dtype != "float32":
        raise mismatch(scale, whole, "One number for all scales is wanted.")


def match_mxfp4(name: str, roles: Roles) -> Quantised | None:
    blocks, scales = roles.get("blocks"), roles.get("block_scales")
    if blocks is None or scales is None or (blocks.dtype, scales.dtype) != ("uint8", "uint8"):
        return None
    turned = blocks.name.endswith("_blocks") and len(blocks.shape) == 4  # expert, row, group, byte
    label = "mxfp4, rows and columns exchanged" if turned else "mxfp4"
    return Quantised(name, label, (blocks, scales), 2 * blocks.entry.numel, lambda _: _settle(blocks, scales, turned=turned))


def _settle(blocks: Part, scales: Part, *, turned: bool) -> Plain:
    if len(blocks.shape) < 3 or 2 * blocks.shape[-1] != _MX or blocks.shape[:-1] != scales.shape:
        raise mismatch(blocks, scales, f"{_MX // 2} bytes have one scale.")
    *outer, rows, groups, _ = blocks.shape
    columns = groups * _MX

    def make() -> Rows:
        exponents = scales.numbers(exponents=True)
        if turned:
            return nibbles_turned(blocks.numbers(), exponents, _MX, rows, columns)
        return nibbles(blocks.numbers(), exponents.floats, _MX, columns, low_first=True)

    return Plain((*outer, columns, rows) if turned else (*outer, rows, columns), make)


# --- ComfyUI's marks: `X.comfy_quant`, or `_quantization_metadata` of a safetensors file, says how a layer is quantised.
# Its `nvfp4` and `mxfp8` have the names and shapes of others, but scales lie in tiles of 128 x 4, and of NVFP4 the high half of
# a byte comes first; with `convrot` matrices are rotated. Sources: comfy/utils.py, `convert_old_quants`, and comfy_kitchen.

_AS_OTHERS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")


def marked(tensor: Quantised, mark: Part | None) -> Quantised:
    """The same weight, refused by `settle` where a mark says another layout than its names do."""

    def settle(config: Config) -> Plain:
        if mark is not None:
            said: Any = said_in(mark.name, mark.small())
        else:
            layers: Any = said_in(COMFY_LAYERS, config.metadata.get(COMFY_LAYERS, "{}").encode()).get("layers")
            said = layers.get(tensor.name.removesuffix(".weight")) if isinstance(layers, dict) else None
        if not isinstance(said, dict):
            return tensor.settle(config)
        if said.get("format") == tensor.scheme == "nvfp4" and not said.get("convrot"):
            return _tiled(*tensor.parts)
        if said.get("format") not in _AS_OTHERS or said.get("convrot"):
            turned = ", rotated" if said.get("convrot") else ""
            raise ConvertError(
                f"{tensor.name!r} is in ComfyUI's layout {said.get('format')!r}{turned}, which is not read.",
                why=f"ckpt reads {', '.join(_AS_OTHERS)} and nvfp4, not rotated.",
            )
        return tensor.settle(config)

    return replace(tensor, settle=settle, parts=(*tensor.parts, *([mark] if mark else [])))


def _tiled(codes: Part, scale: Part, whole: Part) -> Plain:
    """NVFP4 as comfy_kitchen has it."""
    rows, columns = (*codes.shape[:-1], 2 * codes.shape[-1]) if len(codes.shape) == 2 else (0, 0)
    cells = columns // 16
    if not rows or columns % 16 or scale.entry.numel != -(-rows // 128) * 128 * (-(-cells // 4) * 4):
        raise mismatch(codes, scale, "A scale for 16 columns, in tiles of 128 x 4, is wanted.")
    check_one(scale, whole)

    def make() -> Rows:
        scales = multiplied(tiled(scale.numbers(), cells), whole.numbers(), divided=False)
        return nibbles(codes.numbers(), scales, 16, columns, low_first=False)

    return Plain((rows, columns), make)
