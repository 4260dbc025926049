"""Which tensors of a state dict are quantised, and what is left over that looks like a part of one. Reads no tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_tools.edit.quantised.bitsandbytes import match_4bit
from ckpt_tools.edit.quantised.compressed import match_fp4, match_packed
from ckpt_tools.edit.quantised.config import Config, read_config
from ckpt_tools.edit.quantised.grid import granularity, lay_out
from ckpt_tools.edit.quantised.grouped import match_grouped
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, by_plain_name, mismatch, roles_of
from ckpt_tools.errors import CkptError, ConvertError
from ckpt_tools.formats.open import Checkpoint, tensors_by_name
from ckpt_tools.io.output import is_address
from ckpt_tools.text import listed
from ckpt_tools.tree.nodes import Dict, Entry
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.quantised_kernels import E2M1, Kernel, Nibbles, Scaled, TurnedNibbles
from ckpt_tools.values.quantised_plain import as_matrix
from ckpt_tools.values.quantised_rows import Matrix, Repeated

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
