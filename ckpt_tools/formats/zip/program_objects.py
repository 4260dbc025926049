"""What a TorchScript program's pickle says otherwise than `torch.save`: its own classes of storages, sparse tensors, tensors
on the meta device, and dicts with a tag of their type.

Source: torch/csrc/jit/serialization/pickler.cpp (`pushLiteralTensor`, `pushLiteralSparseTensor`) and unpickler.cpp.
"""

from __future__ import annotations

from ckpt_tools.errors import TensorError
from ckpt_tools.pickling.state import Maker
from ckpt_tools.pickling.torch_objects import MAKERS, Storages, rebuild_tensor_v2
from ckpt_tools.tree.dtypes import BY_STORAGE, DTYPES
from ckpt_tools.tree.nodes import Entry, Global, Node, Object

_SPARSE = Global("torch._utils", "_rebuild_sparse_tensor")
_GET_LAYOUT = Global("torch.serialization", "_get_layout")
_TAG = Global("torch.jit._pickle", "restore_type_tag")


def _class(name: str) -> str:
    """The class of storages that C++ names after a dtype, and Python does not have."""
    kind = "ComplexHalf" if name == "complex32" else name.capitalize().replace("Uint", "UInt")
    return f"{kind}Storage"


class ProgramStorages(Storages):
    """The storages of a program: each dtype has a class of its own, and those on the meta device an empty record."""

    kinds = BY_STORAGE | {_class(name): dtype for name, dtype in DTYPES.items() if not dtype.storage and dtype.in_torch}
    on_meta = True


def _rebuild(args: tuple[Node, ...]) -> Node:
    """`_rebuild_tensor_v2`, whose dict of bits has a tag."""
    tag = args[6] if len(args) == 7 else None
    if type(tag) is Object and tag.function == _TAG and tag.call == "reduce" and type(tag.args) is tuple and tag.args:
        args = (*args[:6], tag.args[0])
    return rebuild_tensor_v2(args)


def _sparse(args: tuple[Node, ...]) -> Node:
    """`_rebuild_sparse_tensor(layout, size, requires_grad, *parts, hooks)` as Python has it: the layout and a tuple."""
    layout, size, requires_grad, *parts, _ = args if len(args) >= 4 else (None,) * 4
    name, count = _LAYOUTS.get(layout if type(layout) is int else 0, ("", 0))
    if len(parts) != count or not parts or any(type(part) is not Entry for part in parts):
        raise TensorError("A sparse tensor of the program is malformed, or of a layout that torch does not write.")
    if requires_grad is not False:
        raise TensorError("A sparse tensor of the program requires a gradient, which Python's form of it cannot say.")
    data = (*parts, size, False) if count == 2 else (*parts, size)
    return Object("reduce", _SPARSE, (Object("reduce", _GET_LAYOUT, (name,)), data))


_LAYOUTS = {1: ("torch.sparse_coo", 2), 2: ("torch.sparse_csr", 3)}
PROGRAM_MAKERS: dict[Global, Maker] = {
    **MAKERS,
    Global("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    _SPARSE: _sparse,
}
