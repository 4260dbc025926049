"""Which tensors of a state dict are quantised, and what is left over that looks like a part of one. Reads no tensor."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_tools.edit.quantised.config import Config, read_config
from ckpt_tools.edit.quantised.grid import granularity, lay_out
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, by_plain_name, mismatch, roles_of
from ckpt_tools.errors import CkptError, ConvertError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.output import is_address
from ckpt_tools.io.parsers import load_json
from ckpt_tools.text import listed
from ckpt_tools.tree.nodes import MAX_ELEMENTS, Dict, Entry
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.quantised_kernels import E2M1, Kernel, Multiplied, Nested, Nibbles, Scaled, Scales, TurnedNibbles
from ckpt_tools.values.quantised_plain import as_matrix
from ckpt_tools.values.quantised_rows import Columns, ColumnsOfPacked, Matrix, Packed, PackedColumns, PackedDown, Repeated, Rows

# --- packed weights of compressed-tensors


_MX, _NV = 32, 16  # columns with one scale
_WORD_BITS = 32  # bits


def match_packed(name: str, roles: Roles) -> Quantised | None:
    """A weight of whole numbers in 32-bit words."""
    packed, scale = roles.get("packed"), roles.get("scale")
    if packed is None or scale is None or packed.dtype != "int32" or "global_scale" in roles:
        return None
    found = {role: roles[role] for role in ("packed", "scale", "shape", "zero_point", "column_groups") if role in roles}
    return Quantised(
        name, "compressed-tensors packed", tuple(found.values()), None, lambda config: _compressed_settle(found, config)
    )


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


def _compressed_settle(parts: dict[str, Part], config: Config) -> Plain:
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
    dense = [(bits, False) for bits in range(1, 9) if -(-columns * bits // _WORD_BITS) == words]
    loose = [(bits, True) for bits in (3, 5, 6) if -(-columns // (_WORD_BITS // bits)) == words]
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
    words = -(-height // (_WORD_BITS // bits)) if loose else -(-height * bits // _WORD_BITS)
    packed = (*grid[:-2], words, columns)
    if (zero.dtype, zero.shape) not in (("int32", packed), ("int8", grid)):
        raise ConvertError(f"{zero}: the zero points of {rows} x {columns} scales are wanted.")


# --- weights of bitsandbytes with 4 bits


_NESTED = ("nested_absmax", "nested_quant_map")


def match_4bit(name: str, roles: Roles) -> Quantised | None:
    """A weight of 4 bits."""
    kinds = [kind for kind in ("nf4", "fp4") if kind in roles]
    needed = ("weight", "absmax", "quant_map")
    if len(kinds) != 1 or not all(role in roles for role in needed):
        return None
    names = (*needed, *(role for role in _NESTED if role in roles), kinds[0])
    parts = {role: roles[role] for role in names}
    return Quantised(
        name,
        f"bnb {kinds[0]}",
        tuple(parts.values()),
        2 * roles["weight"].entry.nbytes,
        lambda _: _bitsandbytes_settle(parts, kinds[0]),
    )


class _State:
    """What the JSON says, each value checked."""

    def __init__(self, part: Part) -> None:
        self.part = part
        try:
            content = load_json(part.small()) if part.dtype == "uint8" else None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ConvertError(f"{part.name!r} says how a weight is quantised, and is not JSON.")
        self.content: dict[str, Any] = content

    def whole(self, key: str) -> int:
        """A number above 0."""
        value = self.content.get(key)
        if type(value) is not int or not 0 < value < MAX_ELEMENTS:
            raise self.error(key, "a whole number above 0")
        return value

    def shape(self) -> tuple[int, ...]:
        """The plain weight's."""
        value = self.content.get("shape")
        sizes = value if isinstance(value, list) and value else [-1]
        if not all(type(size) is int and 0 <= size < MAX_ELEMENTS for size in sizes) or len(sizes) > 64:
            raise self.error("shape", "a list of sizes")
        return tuple(sizes)

    def number(self, key: str) -> float:
        """Any number."""
        value = self.content.get(key)
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.error(key, "a number")
        return float(value)  # type: ignore[arg-type]

    def error(self, key: str, wanted: str) -> ConvertError:
        return ConvertError(f"{self.part.name!r}: {key!r} is not {wanted}.")


def _bitsandbytes_settle(parts: dict[str, Part], kind: str) -> Plain:
    state, codes = _State(parts[kind]), parts["weight"]
    if state.content.get("quant_type") != kind:
        raise state.error("quant_type", f"{kind!r}, as the name says")
    shape, block = state.shape(), state.whole("blocksize")
    count, nbytes = prod(shape), codes.entry.nbytes
    if not 0 <= 2 * nbytes - count <= 1:
        why = f"Its state says shape {list(shape)}, which takes {-(-count // 2)} bytes; there are {nbytes}."
        raise ConvertError(f"{codes.name!r} has other bytes than its shape needs.", why=why)
    table = struct.unpack("<16f", _sized(parts["quant_map"], 16, "float32").small())
    scales_of = _scales(parts, state, -(-count // block))

    def make() -> Kernel:
        return Nibbles(row_major(codes.entry), table, scales_of(), block, as_matrix(shape)[1], low_first=False)

    return Plain(shape, make)


def _scales(parts: dict[str, Part], state: _State, count: int) -> Callable[[], Scales]:
    """What gives the scales of so many blocks."""
    absmax = parts["absmax"]
    if not any(role in parts for role in _NESTED):
        found = _sized(absmax, count, "float32")
        return lambda: found.numbers()
    if not all(role in parts for role in _NESTED):
        raise ConvertError(f"{absmax.name!r} is nested, and {' or '.join(_NESTED)} is missing beside it.")
    codes, block, offset = _sized(absmax, count, "uint8"), state.whole("nested_blocksize"), state.number("nested_offset")
    outer, table = (
        _sized(parts["nested_absmax"], -(-count // block), "float32"),
        _sized(parts["nested_quant_map"], 256, "float32"),
    )
    return lambda: Nested(codes.numbers(), table.numbers(), outer.numbers(), block, offset)


def _sized(part: Part, count: int, dtype: str) -> Part:
    """A part, which has so many elements of a dtype."""
    if part.entry.numel != count or part.dtype != dtype:
        raise ConvertError(f"{part}: {count} elements of {dtype} are wanted.", why="As many as the shape and its blocks need.")
    return part


# --- gPTQ and AWQ: matrices that lie with rows and columns exchanged, in groups of columns with a scale and a zero


_WORD = 32
_BITS = (2, 3, 4, 8)
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
    _check_variant(weight, bits, config)
    columns, run = weight.shape[0] * _WORD // bits, 0
    if order is not None and (order.shape != (columns,) or order.dtype != "int32"):
        raise mismatch(weight, order, f"{columns} columns are packed, and each has a group.")
    cells, out = _check_groups(zeros, scales)
    if order is None:
        run = _run(weight, scales, columns, cells, config)

    def make() -> Kernel:
        return Scaled(
            PackedColumns(row_major(weight.entry), bits, weight.shape[0], out),
            Columns(row_major(scales.entry), scales.entry.dtype, cells, out), columns, run,
            ColumnsOfPacked(row_major(zeros.entry), bits, cells, zeros.shape[1], out,
                            less_one=not config.zeros_as_they_are),
            None if order is None else order.numbers(), cells,
        )  # fmt: skip

    return Plain((out, columns), make)


def _awq(parts: tuple[Part, ...], config: Config) -> Plain:
    weight, zeros, scales = parts
    _check_variant(weight, _AWQ_BITS, config)
    cells, out = _check_groups(zeros, scales)
    columns = weight.shape[0]
    run = _run(weight, scales, columns, cells, config)

    def turned(part: Part) -> ColumnsOfPacked:
        return ColumnsOfPacked(row_major(part.entry), _AWQ_BITS, part.shape[0], part.shape[1], out, order=_AWQ_ORDER)

    def make() -> Kernel:
        found = Columns(row_major(scales.entry), scales.entry.dtype, cells, out)
        return Scaled(turned(weight), found, columns, run, turned(zeros))

    return Plain((out, columns), make)


def _check_groups(zeros: Part, scales: Part) -> tuple[int, int]:
    """How many groups and rows of the plain weight there are."""
    if zeros.shape[0] != scales.shape[0] or not scales.shape[0]:
        raise mismatch(zeros, scales, "A scale and a zero point for each group are wanted.")
    return scales.shape[0], scales.shape[1]


def _check_variant(weight: Part, bits: int, config: Config) -> None:
    """Refuse layouts that have these names too, and other bits than those that the shapes have."""
    if config.variant not in _VARIANTS:
        raise ConvertError(
            f"{weight.name!r} is in the layout {config.variant!r} by config.json.", why="Read are gptq, gptq_v2 and AWQ's gemm."
        )
    if config.bits not in (None, bits):
        raise ConvertError(f"{weight.name!r} has {bits} bits by the shapes, and {config.bits} by config.json.")


def _run(weight: Part, scales: Part, columns: int, cells: int, config: Config) -> int:
    """How many columns have one scale."""
    if config.group and -(-columns // config.group) == cells:
        return config.group
    if columns % cells:
        raise mismatch(weight, scales, f"{columns} columns are not {cells} groups of one size.")
    if config.group:
        raise mismatch(weight, scales, f"{columns} columns in {cells} groups; config.json says {config.group} a group.")
    return columns // cells


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
    return Quantised(
        name, label, parts, weight.entry.numel, lambda config: _scaled_settle(weight, scale, zero, config, exponents)
    )


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


def _scaled_settle(weight: Part, scale: Part, zero: Part | None, config: Config, exponents: bool) -> Plain:
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


_SCHEMES: tuple[Callable[[str, Roles], Quantised | None], ...] = (
    match_scaled, match_bnb_int8, match_4bit, match_packed, match_fp4, match_grouped, match_mxfp4,
)  # fmt: skip
# A tensor with such a name is part of a quantised one, and of nothing else.
_TELLING = frozenset(("absmax", "quant_map", "nested_absmax", "nested_quant_map", "nf4", "fp4", "SCB", "qweight", "qzeros"))
_SCALE_NAMES = ("weight_scale", "_scale_inv", "scale_weight")
# What a quantised model keeps for its activations; a plain one has no place for it.
_OF_THE_CACHE = re.compile(r".*\.(?:[qkv]_scale|kv_scale|output_scale|prob_scale)", re.DOTALL)
_MARKERS = frozenset(("scaled_fp8",))


@dataclass(slots=True)
class Found:
    """What is quantised in a state dict."""

    quantised: dict[str, Quantised] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    problems: list[ConvertError] = field(default_factory=list)


def find(state_dict: Dict) -> Found:
    """The quantised tensors of a state dict."""
    found = Found()
    entries = {name: node for name, node in tensors_by_name(state_dict).items() if type(node) is Entry}
    groups = by_plain_name(entries)
    for name, roles in groups.items():
        if len(roles) > 1 or "weight" not in roles:
            _match(name, roles, found)
    for name in {part.name for tensor in found.quantised.values() for part in tensor.parts}:
        del entries[name]
    for name, entry in entries.items():
        if why := _why_beside(name, entry, found):
            found.beside[name] = why
        elif error := _problem(Part(name, entry), groups, found):
            found.problems.append(error)
    return found


def _match(name: str, roles: Mapping[str, list[Part]], found: Found) -> None:
    """Add the tensor that these parts are, if they are one."""
    single = {role: parts[0] for role, parts in roles.items() if len(parts) == 1 or role == "input"}
    matches = [tensor for scheme in _SCHEMES if (tensor := scheme(name, single)) is not None]
    several = [parts for role, parts in roles.items() if len(parts) > 1 and role != "input"]
    codes = roles.get("weight", [])
    if several and (matches or any(part.dtype in FP8 for part in codes)):
        names = " and ".join(repr(part.name) for part in several[0])
        found.problems.append(_ask(name, f"Both {names} could be its scale."))
    elif len(matches) > 1:
        found.problems.append(_ask(name, f"It could be {' or '.join(tensor.scheme for tensor in matches)}."))
    elif matches and name in single and single["weight"] not in matches[0].parts:
        parts = listed([part.name for part in matches[0].parts])
        found.problems.append(_ask(name, f"It is there as it is, too, beside {parts}."))
    elif matches:
        found.quantised[name] = matches[0]


def _ask(name: str, why: str) -> ConvertError:
    return ConvertError(f"How {name!r} is quantised is not clear.", why=why, fix="Get the checkpoint as it was saved.")


def _why_beside(name: str, entry: Entry, found: Found) -> str:
    """Why a plain model has no place for a tensor; "" where it has one."""
    if name in _MARKERS:
        return "a mark of quantised weights"
    if found.quantised and entry.numel <= 1 and _OF_THE_CACHE.fullmatch(name):
        return "a scale of the cache"
    if any(role == "input" and plain in found.quantised for plain, role in roles_of(name)):
        return "a scale of activations"
    return ""


def _problem(part: Part, groups: Mapping[str, Mapping[str, list[Part]]], found: Found) -> ConvertError | None:
    """The error for a tensor that is a part of a quantised one by its name or dtype, and was not taken."""
    roles = {role: plain for plain, role in roles_of(part.name)}
    if part.dtype in FP8:
        fix = "Numbers that are meant as they are: `dtype='bf16'`, without `dequantize`. Else get the whole checkpoint."
        return ConvertError(
            f"{part.name!r} is {part.dtype} and has no scale beside it.", why=_beside_text(part, groups), fix=fix
        )
    if part.dtype in ("int8", "uint8") and len(part.shape) > 1 and part.name.endswith("weight"):
        return ConvertError(f"{part}, and has no scale beside it.", why=_beside_text(part, groups), fix=_WHOLE)
    quantised = next((plain for role, plain in roles.items() if role != "weight" and plain in found.quantised), None)
    if quantised is not None:
        why = f"It is {found.quantised[quantised].scheme} by its other parts, which have no use for it."
        return ConvertError(f"{part} is part of {quantised!r} by its name, and does not count.", why=why, fix=_WHOLE)
    if _OF_TORCHAO.search(part.name):
        return ConvertError(
            f"{part.name!r} is part of a weight that torchao has quantised, which `dequantize` does not know.",
            why="torchao's own code knows its layout.", fix="Load it with torchao, save `tensor.dequantize()`.",
        )  # fmt: skip
    telling = [role for role in roles if role in _TELLING]
    if telling or part.name.endswith(_SCALE_NAMES):
        plain = roles[telling[0]] if telling else next((plain for role, plain in roles.items() if role != "weight"), part.name)
        there = [str(other) for others in groups.get(plain, {}).values() for other in others if other.name != part.name]
        why = f"Beside it: {'; '.join(there[:4])}." if there else f"{plain!r} has no codes here."
        return ConvertError(f"{part.name!r} is part of a quantised weight that is not whole.", why=why, fix=_WHOLE)
    return None


_OF_TORCHAO = re.compile(r"(?:^|\.)_\w+_(?:qdata|scale|zero_point)$")
_WHOLE = "Get the whole checkpoint."


def _beside_text(part: Part, groups: Mapping[str, Mapping[str, list[Part]]]) -> str:
    """What is beside a weight that no scheme took."""
    others = [str(other) for others in groups.get(part.name, {}).values() for other in others if other.name != part.name]
    return f"Beside it: {'; '.join(others[:4])}." if others else ""


def by_scheme(found: Iterable[Quantised]) -> dict[str, list[Quantised]]:
    """Quantised tensors by their schemes, in order."""
    rows: dict[str, list[Quantised]] = {}
    for tensor in found:
        rows.setdefault(tensor.scheme, []).append(tensor)
    return rows


_PLAIN_BYTES = 2  # of a number in bf16
_SHOWN = 20


def summary(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The schemes of the quantised weights with their sizes, and what looks quantised and is not whole; None without any."""
    found = [find(state_dict.node) for state_dict in checkpoint.state_dicts]
    tensors = [tensor for one in found for tensor in one.quantised.values()]
    if not tensors:  # a scale may be a parameter of its own
        return None
    unread = is_address(str(checkpoint.path)) or checkpoint.decoded.locate is not None
    config = None if unread else read_config(checkpoint)
    rows = [_row(scheme, of_scheme, config) for scheme, of_scheme in by_scheme(tensors).items()]
    return {"schemes": rows, "problems": [problem.what for one in found for problem in one.problems][:_SHOWN]}


def _row(scheme: str, tensors: list[Quantised], config: Config | None) -> dict[str, Any]:
    counts = [_elements(tensor, config) for tensor in tensors]
    known = None if None in counts else sum(count or 0 for count in counts)
    plain = None if known is None else known * _PLAIN_BYTES
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return {"scheme": scheme, "tensors": len(tensors), "elements": known, "bytes": nbytes, "bf16_bytes": plain}


def _elements(tensor: Quantised, config: Config | None) -> int | None:
    if tensor.elements is not None or config is None:
        return tensor.elements
    try:
        return prod(tensor.settle(config).shape)
    except CkptError:
        return None
