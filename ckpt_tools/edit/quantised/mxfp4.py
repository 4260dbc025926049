"""MXFP4 as gpt-oss has it: two values of 4 bits to a byte, the low half first, and an exponent of 2 for 32 of them.

    X_blocks [..., rows, groups, 16], X_scales [..., rows, groups]    of Hugging Face; X.blocks, X.scales of OpenAI

The experts of transformers (`gate_up_proj`, `down_proj`: three dimensions) have rows and columns exchanged; OpenAI's have not.
Sources: transformers/integrations/mxfp4.py (`convert_moe_packed_tensors`), gpt_oss/torch/weights.py (`_get_mxfp4_tensor`).
"""

from __future__ import annotations

from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.quantised.kernels import E2M1, Kernel, Nibbles, TurnedNibbles

_BLOCK = 32
_BYTES = _BLOCK // 2
_DIMENSIONS = 4  # of the experts of one layer: expert, row, group, byte


def match_mxfp4(name: str, roles: Roles) -> Quantised | None:
    """A weight of MXFP4."""
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
    columns = groups * _BLOCK
    codes, exponents = row_major(blocks.entry), row_major(scales.entry)

    def make() -> Kernel:
        if turned:
            return TurnedNibbles(codes, E2M1, exponents, _BLOCK, rows, columns)
        return Nibbles(codes, E2M1, scales.numbers(exponents=True), _BLOCK, columns, low_first=True)

    return Plain((*outer, columns, rows) if turned else (*outer, rows, columns), make)
