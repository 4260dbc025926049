"""GPTQ and AWQ: matrices with rows and columns exchanged, in groups of columns with a scale and a zero."""

from __future__ import annotations

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.errors import ConvertError
from ckpt_tools.values.quantised import Rows, held, scaled, unpacked

_WORD = 32
_BITS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a word of numbers that are each 1: zero points are stored less one
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each number of AWQ is
_VARIANTS = ("", "gptq", "gptq_v2", "gemm")  # what a config may call these layouts


def match_grouped(name: str, roles: Roles) -> Quantised | None:
    """A weight of GPTQ or AWQ: the one has as many columns of words as scales, the other as zero points."""
    needed = ("qweight", "qzeros", "scales")
    if not all(role in roles and len(roles[role].shape) == 2 for role in needed):
        return None
    weight, zeros, scales = (roles[role] for role in needed)
    if weight.dtype != "int32" or zeros.dtype != "int32" or scales.entry.dtype.family != "float":
        return None
    groups, words, out = roles.get("g_idx"), zeros.shape[1], scales.shape[1]
    parts = (weight, zeros, scales, *([groups] if groups else []))
    bits = words * _WORD // out if out and words * _WORD % out == 0 else 0
    if weight.shape[1] == out and bits in _BITS:
        count = weight.shape[0] * _WORD // bits * out
        return Quantised(name, f"gptq, {bits} bits", parts, count, lambda config: _gptq(parts, bits, config))
    if weight.shape[1] == words and bits == _AWQ_BITS and groups is None:
        return Quantised(name, "awq, 4 bits", parts, weight.shape[0] * out, lambda config: _awq(parts, config))
    return None


def _gptq(parts: tuple[Part, ...], bits: int, config: Config) -> Plain:
    weight, zeros, scales, *rest = parts
    order = rest[0] if rest else None
    cells, out = _groups_in(parts, bits, config)
    columns, run = weight.shape[0] * _WORD // bits, 0
    if order is not None and (order.shape != (columns,) or order.dtype != "int32"):
        raise mismatch(weight, order, f"{columns} columns are packed, and each has a group.")
    if order is None:
        run = _run(weight, scales, columns, cells, config)

    def make() -> Rows:
        words, less = zeros.numbers().whole(zeros.shape[1]), not config.zeros_as_they_are
        if less and bits in _ONES:
            words = words + _ONES[bits]
        zero = unpacked(words, bits)
        if less and bits not in _ONES:
            zero = zero + 1 & (1 << bits) - 1
        turned, groups = weight.numbers().whole(out).t().contiguous(), None if order is None else order.numbers()
        return scaled(
            lambda first, count: unpacked(turned[first : first + count], bits).float(), held(scales.numbers().whole(out).t()),
            columns, run, held(zero[:, :out].t()), groups, cells,
        )  # fmt: skip

    return Plain((out, columns), make)


def _awq(parts: tuple[Part, ...], config: Config) -> Plain:
    weight, zeros, scales = parts
    columns, (cells, out) = weight.shape[0], _groups_in(parts, _AWQ_BITS, config)
    run = _run(weight, scales, columns, cells, config)

    def turned(part: Part) -> Rows:
        found = unpacked(part.numbers().whole(part.shape[1]), _AWQ_BITS).view(part.shape[0], -1, len(_AWQ_ORDER))
        return held(found[:, :, list(_AWQ_ORDER)].flatten(1)[:, :out].t().contiguous())

    return Plain(
        (out, columns), lambda: scaled(turned(weight), held(scales.numbers().whole(out).t()), columns, run, turned(zeros))
    )


def _groups_in(parts: tuple[Part, ...], bits: int, config: Config) -> tuple[int, int]:
    """Groups and outputs; layouts that have these names too are refused, and other bits than those that the shapes have."""
    weight, zeros, scales = parts[:3]
    if config.variant not in _VARIANTS:
        what = f"{weight.name!r} is in the layout {config.variant!r} by config.json."
        raise ConvertError(what, why="ckpt reads gptq, gptq_v2 and AWQ's gemm.")
    if config.bits not in (None, bits):
        raise ConvertError(f"{weight.name!r} has {bits} bits by the shapes, and {config.bits} by config.json.")
    if zeros.shape[0] != scales.shape[0] or not scales.shape[0]:
        raise mismatch(zeros, scales, "A scale and a zero point for each group are wanted.")
    return scales.shape[0], scales.shape[1]


def _run(weight: Part, scales: Part, columns: int, cells: int, config: Config) -> int:
    if config.group and -(-columns // config.group) == cells:
        return config.group
    if columns % cells:
        raise mismatch(weight, scales, f"{columns} columns are not {cells} groups of one size.")
    if config.group:
        raise mismatch(weight, scales, f"{columns} columns in {cells} groups; config.json says {config.group} a group.")
    return columns // cells
