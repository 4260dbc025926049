"""torchao 0.18: Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor; pickled as subclasses of tensors, or flat in safetensors.

(code - zero point) * scale. Sources: torchao/quantization/quantize_/workflows, torchao/prototype/safetensors.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised, Roles, mismatch
from ckpt_tools.edit.quantised.scaled import FP8, SHORT, per_box
from ckpt_tools.errors import ConvertError
from ckpt_tools.io.parsers import load_json
from ckpt_tools.pickling.torch_objects import FROM_TYPE, unusual_tensor, unwrapped
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Object
from ckpt_tools.values.quantised import rounded

_CODES = {"Int8Tensor": ("int8",), "IntxUnpackedToInt8Tensor": ("int8",), "Float8Tensor": tuple(FP8)}
_ROUNDED = (DTYPES["bfloat16"], DTYPES["float16"])
_USED = ("qdata", "scale", "zero_point")
_OF_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point")


def match_flat(name: str, roles: Roles) -> Quantised | None:
    """A weight as `flatten_tensor_state_dict` names its parts; what the metadata says of it is looked at later."""
    found = {role.removeprefix("ao_"): part for role, part in roles.items() if role.startswith("ao_")}
    if not {"qdata", "scale"} <= found.keys() or found["qdata"].dtype not in ("int8", *FP8):
        return None

    def settle(config: Config) -> Plain:
        text = config.metadata.get(name)
        try:
            said: Any = None if text is None else load_json(text.encode())
        except ValueError:
            said = {}
        if said is None:
            return _plain(found, None, None)
        _check(name, str(said.get("_type")) if isinstance(said, dict) else "", found)
        data = said.get("_data")
        data = data if isinstance(data, dict) else {}
        own = data.get("dtype")
        return _plain(found, data.get("block_size"), DTYPES.get(str(own.get("_data") if isinstance(own, dict) else "")))

    return Quantised(name, _label(found["qdata"].dtype), tuple(found.values()), found["qdata"].entry.numel, settle)


def read_subclass(name: str, node: Object) -> Quantised | None:
    """A weight that is pickled as one of torchao's classes; None for any other object."""
    inner: Any = unwrapped(node)
    if inner.name not in FROM_TYPE or not inner.args[1].module.startswith("torchao."):
        return None
    kind, state, unusual = inner.args[1].name, inner.args[3], unusual_tensor(node)
    if type(state) is not Dict or unusual is None:
        raise ConvertError(f"{name!r} is torchao's {kind}, and has no parts.", why=_KNOWN)
    said = state.named
    found = {key: Part(name, value, key) for key, value in said.items() if type(value) is Entry}
    _check(name, kind, found)
    bits, sizes = said.get("target_dtype"), said.get("block_size")
    if found["qdata"].shape != unusual.shape:
        raise ConvertError(f"{found['qdata']}, and the weight is {list(unusual.shape or ())}.", why=_KNOWN)
    block = list(sizes.items if type(sizes) is List else sizes if type(sizes) is tuple else ())
    parts = tuple(found[key] for key in (*_USED, *_OF_ACTIVATIONS) if key in found)
    label = _label(bits.name if type(bits) is Global else found["qdata"].dtype)
    return Quantised(name, label, parts, found["qdata"].entry.numel, lambda _: _plain(found, block, unusual.dtype))


_KNOWN = f"ckpt reads {', '.join(_CODES)}, as torchao 0.18 writes them."


def _check(name: str, kind: str, found: Roles) -> None:
    """Refuse classes and parts of other versions, and a weight that is not whole."""
    missing = [key for key in ("qdata", "scale") if key not in found]
    other = [key for key in found if key not in (*_USED, *_OF_ACTIVATIONS)]
    if kind not in _CODES:
        what = f"quantised as torchao's {kind or 'unknown class'}, which is not read"
    elif missing:
        raise ConvertError(f"{name!r} is torchao's {kind}, and its {missing[0]} is missing.", why=_KNOWN)
    elif found["qdata"].dtype not in _CODES[kind]:
        what = f"torchao's {kind} with codes of {found['qdata'].dtype}"
    elif other:
        what = f"torchao's {kind} with {other[0]!r}, which changes what it means"
    else:
        return
    raise ConvertError(f"{name!r} is {what}.", why=_KNOWN, fix="Load it with torchao and save `tensor.dequantize()`.")


def _label(dtype: str) -> str:
    return f"torchao {SHORT.get(dtype, dtype)}"


def _plain(found: Roles, block: Any, own: DType | None) -> Plain:
    """The plain weight, rounded to its own dtype; `block` is said, or follows from the shapes, which torchao divides."""
    codes, scale, zero = found["qdata"], found["scale"], found.get("zero_point")
    shape = codes.shape
    if not block and len(scale.shape) == len(shape) and all(scale.shape):
        block = [-(-size // cells) for size, cells in zip(shape, scale.shape, strict=True)]
    fits = (
        isinstance(block, list) and len(block) == len(shape) > 0 and all(type(size) is int and size > 0 for size in block)
        and not any(size % step for size, step in zip(shape, block, strict=True))
    )  # fmt: skip
    grid = tuple(size // step for size, step in zip(shape, block, strict=True)) if fits else ()
    for part in (scale, *([zero] if zero else [])):
        if not fits or part.entry.numel != prod(grid):
            raise mismatch(codes, part, f"One for each block of {block} is wanted.")
    make = per_box(codes, scale, zero, shape, tuple(block))
    return Plain(shape, (lambda: rounded(make(), own)) if own in _ROUNDED else make)
