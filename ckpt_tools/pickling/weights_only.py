"""What `torch.load(weights_only=True)` of torch 2.13 accepts, told from the globals alone.

Source: torch/_weights_only_unpickler.py, `_get_allowed_globals`; a test compares this table with the torch that is installed.
"""

from __future__ import annotations

from ckpt_tools.tree.dtypes import BY_STORAGE, DTYPES, newer_dtype
from ckpt_tools.tree.nodes import Global


def named(text: str) -> frozenset[Global]:
    """Globals, written as `module:name,name`, with spaces between modules."""
    blocks = (block.partition(":") for block in text.split())
    return frozenset(Global(module, name) for module, _, names in blocks for name in names.split(","))


_SPARSE = ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_DENSE = (*_SPARSE, "Bool")
_FROM_TYPE = named("torch._tensor:_rebuild_from_type_v2")
_REBUILD = named(
    "torch._utils:_rebuild_device_tensor_from_cpu_tensor,_rebuild_device_tensor_from_numpy,_rebuild_meta_tensor_no_storage,"
    "_rebuild_nested_tensor,_rebuild_parameter,_rebuild_parameter_with_state,_rebuild_qtensor,_rebuild_sparse_tensor,"
    "_rebuild_tensor,_rebuild_tensor_v2,_rebuild_tensor_v3,_rebuild_wrapper_subclass"
)
# bool has a row in the dtype table, but `torch.bool` is missing from torch's own list: str(torch.bool) is in it.
NOT_CALLABLE = frozenset(Global("torch", name) for name, dtype in DTYPES.items() if dtype.in_torch) | named(
    "torch:per_channel_affine,per_channel_affine_float_qparams,per_channel_symmetric,per_tensor_affine,per_tensor_symmetric"
)
_TENSORS = {Global(module, f"{name}Tensor") for module in ("torch", "torch.cuda") for name in _DENSE}
_CLASSES = _TENSORS | {Global(module, f"{name}Tensor") for module in ("torch.sparse", "torch.cuda.sparse") for name in _SPARSE}
_CLASSES |= named(
    "collections:OrderedDict,Counter torch:Size,Tensor,device builtins:bytearray,set,complex torch.nn.parameter:Parameter"
)
# Of them what no class is, and has no `__new__`; or is made by a function of torch's only, with its tensor.
NO_CLASSES = NOT_CALLABLE | _REBUILD | _FROM_TYPE | named(
    "torch.nn.parameter:Parameter torch.serialization:_get_layout _codecs:encode torch.storage:TypedStorage,UntypedStorage"
) | {
    *(Global("torch", name) for name in BY_STORAGE),
    *(Global("torch.cuda", f"{name}Storage") for name in (*_DENSE, "ComplexDouble", "ComplexFloat")),
}  # fmt: skip
ALLOWED = NO_CLASSES | _CLASSES
# What it accepts too once `torch.nested` and `torch._dynamo` are imported: jagged nested tensors. It asks for these imports.
ALLOWED_NESTED = named(
    "torch.nested._internal.nested_tensor:NestedTensor,_rebuild_njt torch._dynamo.decorators:_DimRange"
)  # fmt: skip
# The classes of which torch lets a state be set, beside collections.OrderedDict.
BUILT = named("torch.nn.parameter:Parameter") | _TENSORS
# What takes the items of its arguments when it is called, and does not keep the lists and dicts themselves.
READS_AT_ONCE = _REBUILD | _FROM_TYPE | named(
    "torch:Size builtins:set,frozenset,bytearray collections:Counter torch.tensor:_rebuild_from_type_v2 "
    "torch._utils:_rebuild_sparse_csr_tensor"
)  # fmt: skip
# What came after torch 2.4: `torch.load(weights_only=True)` of 2.4 refuses these. (Source: the same function of torch 2.4.0,
# and `torch.storage._new_dtypes` there.) Data that is made plain does without them.
ALLOWED_2_4 = ALLOWED - named(
    "_codecs:encode builtins:bytearray,set,complex torch._utils:_rebuild_device_tensor_from_cpu_tensor,"
    "_rebuild_device_tensor_from_numpy torch:float8_e8m0fnu,float4_e2m1fn_x2,uint16,uint32,uint64,"
    "int1,int2,int3,int4,int5,int6,int7,uint1,uint2,uint3,uint4,uint5,uint6,uint7"
)


def is_newer_dtype(name: Global) -> bool:
    return name.module == "torch" and newer_dtype(name.name) is not None
