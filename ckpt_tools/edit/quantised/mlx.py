"""MLX: codes of 2 to 8 bits in words of uint32, or MXFP4, NVFP4 and MXFP8 in them.

Source: mlx/backend/cpu/quantized.cpp; `quantization` in config.json as mlx-lm writes it.
"""

from __future__ import annotations

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.errors import ConvertError
from ckpt_tools.values.quantised import Rows, nibbles, packed_along, scaled

_WORD = 32  # bits
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_FIX = "config.json beside the weights says them (quantization)."
# With exponents or FP8 for scales, and no biases: bits, codes that have one scale, dtype of the scales
_MODES = {"mxfp4": (4, 32, "float8_e8m0fnu"), "nvfp4": (4, 16, "float8_e4m3fn"), "mxfp8": (8, 32, "float8_e8m0fnu")}


def match_mlx(name: str, roles: Roles) -> Quantised | None:
    """A weight of MLX; the bits of a code stand in config.json, unless the shapes leave one way only."""
    weight, scales, biases = roles.get("weight"), roles.get("scales"), roles.get("biases")
    if weight is None or scales is None or weight.dtype != "uint32" or len(weight.shape) < 2:
        return None
    if scales.dtype == "uint8" and biases is None:
        mode = next((mode for mode, (bits, group, _) in _MODES.items() if _fits(weight, scales, bits * group)), None)
        if mode is None:
            return None
        columns = weight.shape[-1] * _WORD // _MODES[mode][0]
        count = weight.entry.numel // weight.shape[-1] * columns
        return Quantised(name, f"mlx {mode}", (weight, scales), count, lambda config: _of_mode(weight, scales, mode, config))
    if biases is None or scales.entry.dtype.family != "float":
        return None
    return Quantised(name, "mlx affine", (weight, scales, biases), None, lambda config: _affine(weight, scales, biases, config))


def _fits(weight: Part, scales: Part, bits: int) -> bool:
    outer, words = weight.shape[:-1], weight.shape[-1]
    return scales.shape[:-1] == outer and len(scales.shape) == len(weight.shape) and words * _WORD == scales.shape[-1] * bits


def _affine(weight: Part, scales: Part, biases: Part, config: Config) -> Plain:
    said = config.layers.get(weight.name.rpartition(".")[0], config)
    if said.mode not in ("", "affine"):
        raise ConvertError(f"{weight.name!r} has biases, and config.json says its mode is {said.mode!r}.")
    if scales.shape != biases.shape:
        raise mismatch(scales, biases, "A bias for each scale is wanted.")
    ways = [(bits, group) for bits in _BITS for group in _GROUPS if _fits(weight, scales, bits * group)]
    found = [way for way in ways if said.bits in (None, way[0]) and said.group in (None, way[1])]
    if not ways:
        raise mismatch(weight, scales, f"A scale is for {', '.join(map(str, _GROUPS))} codes.")
    if len(found) != 1:
        fits = " or ".join(f"{bits} bits in groups of {group}" for bits, group in ways)
        why = f"These shapes fit {fits}."
        if said.bits or said.group:
            why += f" config.json says {said.bits or '?'} bits in groups of {said.group or '?'}."
        raise ConvertError(f"{weight}, and {scales}: the bits of a code are not clear.", why=why, fix=_FIX)
    bits, group = found[0]
    columns, cells = weight.shape[-1] * _WORD // bits, scales.shape[-1]

    def make() -> Rows:
        codes = packed_along(weight.numbers("int32"), bits, columns, weight.shape[-1])
        return scaled(codes, scales.numbers().rows(cells), columns, group, biases=biases.numbers().rows(cells))

    return Plain((*weight.shape[:-1], columns), make, f", {bits} bits")


def _of_mode(weight: Part, scales: Part, mode: str, config: Config) -> Plain:
    said, (bits, group, kind) = config.layers.get(weight.name.rpartition(".")[0], config), _MODES[mode]
    if said.mode not in ("", mode):
        raise ConvertError(f"{weight.name!r} is {mode} by its shapes, and {said.mode!r} by config.json.")
    columns = weight.shape[-1] * _WORD // bits

    def make() -> Rows:
        found = scales.numbers(kind)
        if bits == 4:
            return nibbles(weight.numbers("uint8"), found.floats, group, columns, low_first=True)
        codes = weight.numbers("float8_e4m3fn").rows(columns)
        return scaled(codes, found.rows(scales.shape[-1]), columns, group)

    return Plain((*weight.shape[:-1], columns), make)
