"""ComfyUI's marks: a tensor `X.comfy_quant`, or `_quantization_metadata` of a safetensors file, says how a layer is quantised.

Its `nvfp4` and `mxfp8` have the names and shapes of others, but scales lie in tiles of 128 x 4, and of NVFP4 the high half of a
byte comes first; with `convrot` matrices are rotated. Sources: comfy/utils.py, `convert_old_quants`, and comfy_kitchen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.fp4 import check_one
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, mismatch, said_in
from ckpt_tools.errors import ConvertError
from ckpt_tools.values.quantised import Rows, multiplied, nibbles, tiled

_AS_OTHERS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
_METADATA = "_quantization_metadata"


def marked(tensor: Quantised, mark: Part | None) -> Quantised:
    """The same weight, refused by `settle` where a mark says another layout than its names do."""

    def settle(config: Config) -> Plain:
        if mark is not None:
            said: Any = said_in(mark.name, mark.small())
        else:
            layers: Any = said_in(_METADATA, config.metadata.get(_METADATA, "{}").encode()).get("layers")
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
