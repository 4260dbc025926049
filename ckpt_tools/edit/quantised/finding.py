"""Which tensors of a state dict are quantised, and what is left over that looks like a part of one. Reads no tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_tools.edit.quantised.bitsandbytes import match_4bit, match_bnb_int8
from ckpt_tools.edit.quantised.config import Config, read_config
from ckpt_tools.edit.quantised.fp4 import marked, match_fp4, match_mxfp4
from ckpt_tools.edit.quantised.grouped import match_grouped
from ckpt_tools.edit.quantised.mlx import match_mlx
from ckpt_tools.edit.quantised.of_torch import read_packed
from ckpt_tools.edit.quantised.packed import match_packed
from ckpt_tools.edit.quantised.parts import Part, Quantised, by_plain_name, roles_of
from ckpt_tools.edit.quantised.quanto import match_quanto
from ckpt_tools.edit.quantised.scaled import FP8, match_scaled
from ckpt_tools.edit.quantised.torchao import match_flat, read_subclass
from ckpt_tools.errors import CkptError, ConvertError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.source import is_address
from ckpt_tools.text import listed
from ckpt_tools.tree.nodes import Dict, Entry, Node, Object

# Each tells, by the parts of a weight, whether it is one of its own; a new scheme is a module and a name here.
_SCHEMES = (
    match_scaled, match_bnb_int8, match_4bit, match_packed, match_fp4, match_grouped, match_mxfp4, match_flat, match_mlx,
    match_quanto,
)  # fmt: skip
# A tensor with such a name is part of a quantised one, and of nothing else.
_TELLING = frozenset(("absmax", "quant_map", "nested_absmax", "nested_quant_map", "nf4", "fp4", "SCB", "qweight", "qzeros",
                      "quanto_packed", "quanto_shift"))  # fmt: skip
_NO_PARTS = ("weight", "bias")
_SCALE_NAMES = ("weight_scale", "_scale_inv", "scale_weight")
# What a quantised model keeps for its activations; a plain one has no place for it.
_OF_THE_CACHE = re.compile(r".*\.(?:[qkv]_scale|kv_scale|output_scale|prob_scale)", re.DOTALL)
_MARKERS = frozenset(("scaled_fp8",))


@dataclass(slots=True)
class Found:
    quantised: dict[str, Quantised] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    problems: list[ConvertError] = field(default_factory=list)


def find(state_dict: Dict) -> Found:
    found = Found()
    entries = {name: node for name, node in tensors_by_name(state_dict).items() if type(node) is Entry}
    groups = by_plain_name(entries)
    for name, roles in groups.items():
        if len(roles) > 1 or "weight" not in roles:
            _match(name, roles, found)
    for name in {part.name for tensor in found.quantised.values() for part in tensor.parts}:
        del entries[name]
    for key, node in state_dict.named.items():
        try:
            _read_object(key, node, state_dict, found)
        except ConvertError as unread:
            found.problems.append(unread)
    for name, entry in entries.items():
        if why := _why_beside(name, entry, found):
            found.beside[name] = why
        elif name not in found.beside and (error := _problem(Part(name, entry), groups, found)):
            found.problems.append(error)
    return found


def _read_object(key: str, node: Node, state_dict: Dict, found: Found) -> None:
    """Add the weight that is not in tensors of its own, but in an object of torchao, or torch itself."""
    if type(node) is Object and node.name == "torch.ScriptObject":
        why = "ckpt reads linear layers that torch has quantised, and tensors."
        raise ConvertError(f"{key!r} has packed weights of torch, which are not read.", why=why)
    if type(node) is Object and (tensor := read_subclass(key, node)) is not None:
        found.quantised[key] = tensor
    elif (packed := read_packed(key, node, state_dict)) is not None:
        found.quantised[packed.name] = packed
        path = packed.name.removesuffix(".weight")  # beside it are the dtype, and the scale of the output
        beside = (f"{path}.{ending}" for ending in ("_packed_params.dtype", "scale", "zero_point"))
        found.beside |= {name: "of quantised activations" for name in beside if name in state_dict}


def _match(name: str, roles: Mapping[str, list[Part]], found: Found) -> None:
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
        found.quantised[name] = marked(matches[0], single.get("comfy"))


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
    roles, beside = {role: plain for plain, role in roles_of(part.name)}, _beside(part, groups.get(part.name, {}))
    if part.dtype in FP8:
        fix = "Numbers that are meant as they are: `dtype='bf16'`, without `dequantize`. Else get the whole checkpoint."
        return ConvertError(f"{part.name!r} is {part.dtype} and has no scale beside it.", why=beside, fix=fix)
    if part.dtype in ("int8", "uint8", "uint32") and len(part.shape) > 1 and part.name.endswith("weight"):
        return ConvertError(f"{part}, and has no scale beside it.", why=beside, fix=_WHOLE)
    quantised = next((plain for role, plain in roles.items() if role not in _NO_PARTS and plain in found.quantised), None)
    if quantised is not None:
        why = f"It is {found.quantised[quantised].scheme} by its other parts, which have no use for it."
        return ConvertError(f"{part} is part of {quantised!r} by its name, and does not count.", why=why, fix=_WHOLE)
    if any(role.startswith("ao_") for role in roles) and any("ao_qdata" in groups.get(plain, {}) for plain in roles.values()):
        why = "ckpt reads codes of int8 and FP8 with their scales, as torchao 0.18 writes them."
        fix = "Load it with torchao, save `tensor.dequantize()`."
        return ConvertError(f"{part} is part of a weight that torchao has quantised in another way.", why=why, fix=fix)
    telling = [role for role in roles if role in _TELLING]
    if telling or part.name.endswith(_SCALE_NAMES):
        plain = roles[telling[0]] if telling else next((plain for role, plain in roles.items() if role != "weight"), part.name)
        why = _beside(part, groups.get(plain, {})) or f"{plain!r} has no codes here."
        return ConvertError(f"{part.name!r} is part of a quantised weight that is not whole.", why=why, fix=_WHOLE)
    return None


_WHOLE = "Get the whole checkpoint."


def _beside(part: Part, others: Mapping[str, list[Part]]) -> str:
    there = [str(other) for parts in others.values() for other in parts if other.name != part.name]
    return f"Beside it: {'; '.join(there[:4])}." if there else ""


# --- what `inspect` says of them: schemes, sizes, and what is not whole


_PLAIN_BYTES = 2  # of a number in bf16
_SHOWN = 20


def summary(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The schemes of the quantised weights with their sizes, and what looks quantised and is not whole; None without any."""
    found = [find(state_dict.node) for state_dict in checkpoint.state_dicts]
    tensors = [tensor for one in found for tensor in one.quantised.values()]
    if not tensors:  # a scale may be a parameter of its own
        return None
    unread = is_address(str(checkpoint.path)) or checkpoint.locator is not None
    config = None if unread else read_config(checkpoint)
    rows = dict[str, dict[str, Any]]()
    for tensor in tensors:
        scheme, elements = _told(tensor, config)
        row = rows.setdefault(scheme, {"scheme": scheme, "tensors": 0, "elements": 0, "bytes": 0, "bf16_bytes": 0})
        row["tensors"] += 1
        row["bytes"] += sum(part.entry.nbytes for part in tensor.parts)
        row["elements"] = None if elements is None or row["elements"] is None else row["elements"] + elements
        row["bf16_bytes"] = None if row["elements"] is None else row["elements"] * _PLAIN_BYTES
    return {"schemes": list(rows.values()), "problems": [problem.what for one in found for problem in one.problems][:_SHOWN]}


def _told(tensor: Quantised, config: Config | None) -> tuple[str, int | None]:
    if tensor.elements is not None or config is None:
        return tensor.scheme, tensor.elements
    try:
        plain = tensor.settle(config)
    except CkptError:
        return tensor.scheme, None
    return tensor.scheme + plain.detail, prod(plain.shape)
