"""What `torch.load(weights_only=True)` of torch 2.13 accepts, told from the globals and opcodes alone.

Source: torch/_weights_only_unpickler.py, `_get_allowed_globals` and the opcodes of `Unpickler.load`; a test compares this
table with the torch that is installed.
"""

from __future__ import annotations

from ckpt_tools.tree.dtypes import BY_STORAGE, DTYPES, newer_dtype
from ckpt_tools.tree.nodes import Global

_DENSE = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_SPARSE = ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_CUDA_STORAGES = (*_DENSE, "ComplexDouble", "ComplexFloat")
_REBUILD = (
    "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy", "_rebuild_meta_tensor_no_storage",
    "_rebuild_nested_tensor", "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_qtensor",
    "_rebuild_sparse_tensor", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_wrapper_subclass",
)  # fmt: skip
_QSCHEMES = (
    "per_channel_affine", "per_channel_affine_float_qparams", "per_channel_symmetric", "per_tensor_affine",
    "per_tensor_symmetric",
)  # fmt: skip
# bool has a row in the dtype table, but `torch.bool` is missing from torch's own list: str(torch.bool) is in it.
_DTYPE_NAMES = [name for name, dtype in DTYPES.items() if dtype.in_torch]

NOT_CALLABLE = frozenset(Global("torch", name) for name in (*_DTYPE_NAMES, *_QSCHEMES))
ALLOWED = frozenset(
    Global(*name.rsplit(".", 1))
    for name in (
        "collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
        "torch.Size", "torch.Tensor", "torch.device", "_codecs.encode", "builtins.bytearray", "builtins.set",
        "builtins.complex", "torch._tensor._rebuild_from_type_v2", "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
        *(f"torch.{name}" for name in _DTYPE_NAMES),
        *(f"torch.{name}" for name in BY_STORAGE),
        *(f"torch.cuda.{name}Storage" for name in _CUDA_STORAGES),
        *(f"torch.{name}" for name in _QSCHEMES),
        *(f"torch._utils.{name}" for name in _REBUILD),
        *(f"torch.{device}{name}Tensor" for device in ("", "cuda.") for name in _DENSE),
        *(f"torch.{device}sparse.{name}Tensor" for device in ("", "cuda.") for name in _SPARSE),
    )
)  # fmt: skip

_CLASSES = ("OrderedDict", "Counter", "Size", "device", "bytearray", "set", "complex")
# Of them what no class is, and has no `__new__`; or is made by a function of torch's only, with its tensor.
NO_CLASSES = frozenset(name for name in ALLOWED if not name.name.endswith((*_CLASSES, "Tensor")))

# What it accepts too once `torch.nested` and `torch._dynamo` are imported: jagged nested tensors. It asks for these imports.
ALLOWED_NESTED = frozenset((
    Global("torch.nested._internal.nested_tensor", "NestedTensor"),
    Global("torch.nested._internal.nested_tensor", "_rebuild_njt"), Global("torch._dynamo.decorators", "_DimRange"),
))  # fmt: skip

# The classes of which torch lets a state be set, beside collections.OrderedDict.
BUILT = frozenset((
    Global("torch.nn.parameter", "Parameter"),
    *(Global(module, f"{name}Tensor") for module in ("torch", "torch.cuda") for name in _DENSE),
))  # fmt: skip

# What takes the items of its arguments when it is called, and does not keep the lists and dicts themselves.
READS_AT_ONCE = frozenset(
    Global(*name.rsplit(".", 1))
    for name in (
        "torch.Size", "builtins.set", "builtins.frozenset", "builtins.bytearray", "collections.Counter",
        "torch.tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type_v2",
        *(f"torch._utils.{name}" for name in (*_REBUILD, "_rebuild_sparse_csr_tensor")),
    )
)  # fmt: skip


# What came after torch 2.4: `torch.load(weights_only=True)` of 2.4 refuses these. (Source: the same function of torch 2.4.0,
# and `torch.storage._new_dtypes` there.) Data that is made plain does without them.
_SINCE_2_4 = frozenset((
    "_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor", "torch._utils._rebuild_device_tensor_from_numpy",
    "torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2", "torch.uint16", "torch.uint32", "torch.uint64",
    *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
))  # fmt: skip
ALLOWED_2_4 = frozenset(name for name in ALLOWED if str(name) not in _SINCE_2_4)


def is_newer_dtype(name: Global) -> bool:
    return name.module == "torch" and newer_dtype(name.name) is not None
