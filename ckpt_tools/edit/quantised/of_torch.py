"""torch's own quantised tensors: in a state dict as they are, or in the packed parameters of a linear layer.

(code - zero point) * scale, of the tensor or of each channel. Sources: torch/_utils.py (`_rebuild_qtensor`),
torch/ao/nn/quantized/modules/linear.py (`LinearPackedParams`).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from ckpt_tools.edit.quantised.parts import Part, Plain, Quantised
from ckpt_tools.edit.quantised.scaled import per_box
from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import Literal
from ckpt_tools.pickling.torch_objects import rebuild_tensor_v2, unusual_tensor
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Object, stored

PACKED, _EMBEDDING = "._packed_params._packed_params", "._packed_params._packed_weight"
_CODES = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_FORMATS = {"int64": "q", "float64": "d"}


def read_packed(key: str, node: Node, state_dict: Dict) -> Quantised | None:
    """A quantised tensor under its name, that of an embedding; the weight and the bias of a linear layer, which are a pair."""
    if type(node) is Object:
        path = key.removesuffix(_EMBEDDING)
        name = f"{path}.weight" if path != key else key
        if path != key and name in state_dict:
            raise ConvertError(f"{key!r} would become {name!r}, which is there, too.")
        return read_qtensor(key, node, name)
    if not key.endswith(PACKED) or type(node) is not tuple or len(node) != 2 or type(node[0]) is not Object:
        return None
    path, bias = key.removesuffix(PACKED), node[1]
    found = read_qtensor(key, node[0], f"{path}.weight")
    if found is None or (bias is not None and type(bias) is not Entry):
        what = f"{key!r} has something else than a weight and a bias."
        raise ConvertError(what, why="ckpt reads those of torch 1.3 to 2.13.")
    if taken := [name for name in (f"{path}.weight", f"{path}.bias") if name in state_dict]:
        raise ConvertError(f"{key!r} would become {taken[0]!r}, which is there, too.")
    return found if bias is None else replace(found, bias=(f"{path}.bias", bias))


def read_qtensor(key: str, node: Object, name: str) -> Quantised | None:
    if node.name != "torch._utils._rebuild_qtensor" or unusual_tensor(node) is None:  # which checks what it is made of
        return None
    arguments: Any = node.args
    storage, offset, size, stride, scheme, _, hooks = arguments
    view: Any = rebuild_tensor_v2((storage, offset, size, stride, False, hooks))
    if view.dtype.name not in _CODES or scheme[0].name == "per_channel_affine_float_qparams":
        why = f"ckpt reads {', '.join(_CODES)}, per tensor or per channel."
        raise ConvertError(f"{key!r} is {view.dtype.name}, {scheme[0].name}, which is not read.", why=why)
    codes = Part(key, replace(view, dtype=DTYPES[_CODES[view.dtype.name]], extras=None))
    shape = view.shape or (1,)
    axis = scheme[3] if len(scheme) == 4 else None
    boxes = tuple(1 if place == axis else size for place, size in enumerate(shape))
    scale, zero = _part(key, "scale", scheme[1], "float64"), _part(key, "zero_point", scheme[2], "int64")

    def settle(_: object) -> Plain:
        return Plain(view.shape, per_box(codes, scale, zero, shape, boxes))

    label = f"torch {view.dtype.name}, {'a scale a tensor' if axis is None else 'a scale a channel'}"
    return Quantised(name, label, (codes, scale, zero), view.numel, settle)


def _part(key: str, attribute: str, node: Node, dtype: str) -> Part:
    """Scales or zero points: a tensor, or numbers in the pickle itself."""
    if type(node) is Entry:
        return Part(key, node, attribute)
    numbers: list[Any] = node.items if type(node) is List else [node]
    try:
        data = Literal(struct.pack(f"<{len(numbers)}{_FORMATS[dtype]}", *numbers))
    except struct.error:
        raise ConvertError(f"{key!r} has a {attribute} that is not a number of {dtype}.") from None
    return Part(key, stored(f"{key}.{attribute}", DTYPES[dtype], (len(numbers),), data), attribute)
