"""What quantised modules put into their state dict by code of their own, read off their records. Nothing is run.

Sources: torch/ao/nn/quantized/modules/linear.py (`LinearPackedParams`, `Linear`); bitsandbytes/nn/modules.py (`Linear4bit`,
`Linear8bitLt`) and functional.py (`QuantState.as_dict`), 0.50.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ckpt_tools.io.content import Literal, Range, read
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Dict, Entry, Global, Node, Object, Storage
from ckpt_tools.tree.visit import reachable

Pairs = Iterator[tuple[str, Node]]
_NEW = "made by code"


def saved_by_code(model: Object, name: str, state: Dict, prefix: str) -> Pairs:
    """What a module of this class, below `prefix` in a model, adds to its parameters and buffers, from its attributes."""
    made = _writer(name)
    for own, node in made(state) if made is not None else ():
        if type(node) is Entry and node.storage.key == _NEW:  # as torch makes it anew for each name
            of = next((below.key for below in reachable(model) if type(below) is Storage), "")  # no other model's
            node = replace(node, storage=replace(node.storage, key=f"{prefix}{own} of {of}"))
        yield own, node


def is_saved_by_code(module: Node) -> bool:
    """Whether what this module keeps beside its tables is known to be in its state dict."""
    return type(module) is Object and _writer(module.name) is not None


def in_text(state: Dict) -> Node:
    """The tensor of bitsandbytes that its state dict has as a number in a text."""
    return _attributes(_attribute(_weight(state), "quant_state")).get("offset")


def plain_weight(node: Node) -> Node:
    """A weight of bitsandbytes as the tensor that it is: its attributes are in the state dict under names of their own."""
    return replace(node, extras=None) if type(node) is Entry and _attribute(node, "quant_state") is not None else node


def _of_packed(state: Dict) -> Pairs:
    packed = state.get("_packed_params")
    pair = packed.state if type(packed) is Object else None
    if type(pair) is tuple and len(pair) == 2 and type(pair[0]) is tuple:
        yield "dtype", state.get("dtype")
        yield "_packed_params", pair[0]


def _of_linear(state: Dict) -> Pairs:
    scale, zero = state.get("scale"), state.get("zero_point")
    if type(scale) is float and type(zero) is int:
        try:
            numbers = struct.pack("<f", scale), struct.pack("<q", zero)
        except (struct.error, OverflowError):  # no number of these dtypes
            return
        yield "scale", _made(DTYPES["float32"], numbers[0])
        yield "zero_point", _made(DTYPES["int64"], numbers[1])


def _of_bnb_4bit(state: Dict) -> Pairs:
    found = _attributes(_attribute(_weight(state), "quant_state"))
    nested = _attributes(found.get("state2"))
    said: dict[str, Any] = {"quant_type": found.get("quant_type"), "blocksize": found.get("blocksize")}
    said |= {"dtype": _dtype(found.get("dtype")), "shape": _sizes(found.get("shape"))}
    tensors = {"absmax": found.get("absmax"), "quant_map": found.get("code")}
    if nested:
        tensors |= {"nested_absmax": nested.get("absmax"), "nested_quant_map": nested.get("code")}
        said |= {"nested_blocksize": nested.get("blocksize"), "nested_dtype": _dtype(nested.get("dtype"))}
        said |= {"nested_offset": _float32(found.get("offset"))}
    kinds = {"quant_type": str, "dtype": str, "shape": list, "nested_dtype": str, "nested_offset": float}
    are_known = all(type(value) is kinds.get(name, int) for name, value in said.items())
    if not are_known or not all(type(node) is Entry for node in tensors.values()):
        return
    yield from ((f"weight.{name}", node) for name, node in tensors.items())
    import json

    text = json.dumps(said).encode()
    yield f"weight.quant_state.bitsandbytes__{said['quant_type']}", _made(DTYPES["uint8"], text, (len(text),))


def _of_bnb_int8(state: Dict) -> Pairs:
    scale = _attribute(_weight(state), "SCB") or _attributes(state.get("state")).get("SCB")
    if type(scale) is Entry:
        yield "SCB", scale
        yield "weight_format", _made(DTYPES["uint8"], b"\0")


_CLASSES: dict[str, Callable[[Dict], Pairs]] = {
    ".quantized.modules.linear.LinearPackedParams": _of_packed,
    ".quantized.modules.linear.Linear": _of_linear,
    ".quantized.dynamic.modules.linear.Linear": _of_linear,
    **dict.fromkeys(("linear_relu.LinearReLU", "linear_relu.LinearLeakyReLU", "linear_relu.LinearTanh"), _of_linear),
    ".quantized.modules.functional_modules.QFunctional": _of_linear,
    "bitsandbytes.nn.modules.Linear4bit": _of_bnb_4bit, "bitsandbytes.nn.modules.LinearNF4": _of_bnb_4bit,
    "bitsandbytes.nn.modules.LinearFP4": _of_bnb_4bit, "bitsandbytes.nn.modules.Linear8bitLt": _of_bnb_int8,
}  # fmt: skip


def _writer(name: str) -> Callable[[Dict], Pairs] | None:
    """What a class saves; a program's state dict (`__torch__...`) has none of it."""
    return None if name.startswith("__torch__") else next((made for end, made in _CLASSES.items() if name.endswith(end)), None)


def _weight(state: Dict) -> Node:
    parameters = state.get("_parameters")
    return parameters.get("weight") if type(parameters) is Dict else None


def _attribute(node: Node, name: str) -> Node:
    extras = node.extras if type(node) is Entry else None
    return extras.state.get(name) if extras is not None and type(extras.state) is Dict else None


def _attributes(node: Node) -> dict[str, Node]:
    state = node.state if type(node) is Object else None
    return {key: value for key, value in state.items if type(key) is str} if type(state) is Dict else {}


def _dtype(node: Node) -> str | None:
    return node.name if type(node) is Global and node.module == "torch" else None


def _sizes(node: Node) -> list[int] | None:
    """The sizes of a torch.Size."""
    sizes = node.args[0] if type(node) is Object and type(node.args) is tuple and len(node.args) == 1 else None
    return [size for size in sizes if type(size) is int] if type(sizes) is tuple else None


def _float32(node: Node) -> float | None:
    """The number in a tensor of one, which is read."""
    content = node.storage.content if type(node) is Entry and node.dtype.name == "float32" and node.numel == 1 else None
    if not isinstance(content, Range) or type(node) is not Entry:
        return None
    return float(struct.unpack("<f", read(replace(content, offset=content.offset + 4 * node.offset, length=4)))[0])


def _made(dtype: DType, data: bytes, shape: tuple[int, ...] = ()) -> Entry:
    return Entry(Storage(_NEW, dtype, len(data), "cpu", Literal(data)), dtype, shape, (1,) * len(shape), 0)
