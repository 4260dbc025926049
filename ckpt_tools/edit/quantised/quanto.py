"""optimum-quanto 0.2: int8 and FP8 with scales; codes of 2 and 4 bits in groups.

Sources: optimum/quanto/tensor/packed.py, qbits.py, qbytes.py. The shape of a packed weight is not in the file: it is taken for
that of a linear layer, which its bias tells.
"""

from __future__ import annotations

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.edit.quantised.scaled import FP8, SHORT, lay_out, per_box
from ckpt_tools.errors import ConvertError
from ckpt_tools.values.quantised import Rows, packed_apart, scaled


def match_quanto(name: str, roles: Roles) -> Quantised | None:
    codes, scale = roles.get("quanto"), roles.get("quanto_scale")
    if codes is None or scale is None or codes.dtype not in ("int8", *FP8) or "quanto_shift" in roles:
        return _match_packed(name, roles)

    def settle(config: Config) -> Plain:
        return Plain(codes.shape, per_box(codes, scale, None, codes.shape, lay_out(codes, codes.shape, scale, config)))

    return Quantised(name, f"quanto {SHORT.get(codes.dtype, codes.dtype)}", (codes, scale), codes.entry.numel, settle)


def _match_packed(name: str, roles: Roles) -> Quantised | None:
    packed, scale, shift = (roles.get(role) for role in ("quanto_packed", "quanto_scale", "quanto_shift"))
    if packed is None or scale is None or shift is None or packed.dtype != "uint8" or len(packed.shape) != 2:
        return None
    bits = [bits for bits in (2, 4) if packed.shape[0] == -(-scale.entry.numel * bits // 8)]
    label = f"quanto, {bits[0]} bits, as a matrix" if len(bits) == 1 else "quanto"
    count = scale.entry.numel * packed.shape[1]
    return Quantised(
        name, label, (packed, scale, shift), count, lambda _: _settle(packed, scale, shift, roles.get("bias"), bits)
    )


def _settle(packed: Part, scale: Part, shift: Part, bias: Part | None, bits: list[int]) -> Plain:
    groups, size = scale.entry.numel, packed.shape[1]
    if scale.shape != (groups, 1) or shift.shape != scale.shape or shift.entry.dtype.family != "float" or len(bits) != 1:
        raise mismatch(packed, scale, "A scale and a shift for each group of 2 or 4 bits are wanted, as in quanto 0.2.")
    rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else 0
    if not rows or groups % rows:
        raise ConvertError(
            f"{packed.name!r} has {groups} groups of {size} codes, and how many are a row is not in the file.",
            why="quanto leaves that to the model; the bias of a linear layer would tell.",
            fix="Load it with optimum-quanto, save `weight.dequantize()`.",
        )

    in_row = groups // rows
    shape = rows, in_row * size

    def make() -> Rows:
        codes = packed_apart(packed.numbers(), bits[0], packed.shape[0], size)
        shifts = shift.numbers().rows(in_row)
        return scaled(
            lambda first, count: codes(first * in_row, count * in_row).view(count, -1), scale.numbers().rows(in_row), shape[1],
            size, biases=lambda first, count: -shifts(first, count),
        )  # fmt: skip

    return Plain(shape, make)
