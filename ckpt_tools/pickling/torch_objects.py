"""What the globals that `torch.save` writes stand for (torch/_utils.py, torch/_tensor.py): storages, tensors, OrderedDicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, cast

from ckpt_tools.errors import DamagedFileError, PickleError, TensorError
from ckpt_tools.io.content import Content, Literal
from ckpt_tools.pickling.machine import Maker
from ckpt_tools.pickling.weights_only import ALLOWED, NOT_CALLABLE, named
from ckpt_tools.text import shortened, some
from ckpt_tools.tree.dtypes import BY_STORAGE, DTYPES, UINT8, DType, newer_dtype
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, Dict, Entry, Extras, Global, List, Node, Object, Pair, Storage, check

LOAD_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
Locate = Callable[[str, int], Content | None]
_NOT_THERE = Literal(b"")
_TOO_MANY = 1 << 59  # elements


class Storages:
    """Turns the persistent ids of a torch pickle into storages, one for each key."""

    kinds: Mapping[str, DType] = BY_STORAGE
    on_meta = False

    def __init__(self, locate: Locate, prefix: str = "") -> None:
        self.locate, self.prefix = locate, prefix
        self.by_key: dict[str, tuple[Any, Storage]] = {}

    def storage(self, pid: Node) -> Storage:
        is_named = type(pid) is tuple and len(pid) == 5 and pid[0] == "storage"
        _, kind, key, device, numel = cast("tuple[Node, ...]", pid) if is_named else (None,) * 5
        if type(key) is not str or not key or type(device) is not str or type(numel) is not int or not 0 <= numel < _TOO_MANY:
            why = "Expected ('storage', class, key, location, size)."
            raise PickleError("The pickle refers to something outside it that is not a storage.", why=why)
        known = self.by_key.get(key)
        if known is not None:
            if known[0] != pid:
                raise TensorError(f"Storage {key!r} is used with two types, sizes or devices.")
            return known[1]
        dtype = storage_dtype(kind, self.kinds)
        nbytes = numel * (dtype or UINT8).itemsize
        if device == META and not self.on_meta:
            raise on_meta(key)
        content = self.locate(key, 0 if device == META else nbytes)
        storage = Storage(self.prefix + key, dtype, nbytes, device, _NOT_THERE if content is None else content)
        self.by_key[key] = pid, storage
        return storage

    def check_found(self) -> None:
        missing = [key for key, (_, storage) in self.by_key.items() if storage.content is _NOT_THERE]
        if missing:
            what = f"{len(missing)} of {len(self.by_key)} storages are not in the file: {some(missing)}."
            raise DamagedFileError(what, why="The pickle refers to them, and the zip has no such records.")


META = "meta"


def on_meta(key: str) -> TensorError:
    """The error for a storage that is on the meta device, and has bytes: torch.save writes none such."""
    why = "torch.load makes a tensor without values of it, and with map_location one with them."
    return TensorError(f"Storage {key!r} is said to be on the meta device, where nothing has values.", why=why)


def storage_dtype(kind: Node, kinds: Mapping[str, DType] = BY_STORAGE) -> DType | None:
    if type(kind) is Global:
        if kind.name == "UntypedStorage":
            return None
        if kind.name in kinds and kind.module in ("torch", "torch.cuda", "torch.storage"):
            return kinds[kind.name]
    raise TensorError(f"The pickle uses an unknown kind of storage, {_brief(kind)}.")


def _brief(node: Node) -> str:
    return shortened(str(node), 100) if type(node) in (Global, str) else type(node).__name__


# --- makers: arguments -> node; None or True to leave an inert Object, False for arguments that it does not take


class Untaken(Exception):  # noqa: N818  becomes a TensorError that tells what is called
    """Arguments that a maker does not take."""


def need(holds: bool) -> None:
    if not holds:
        raise Untaken


def dtype_of(node: Node) -> DType:
    name = node.name if type(node) is Global and node.module == "torch" else ""
    dtype = DTYPES.get(name) or newer_dtype(name)
    if dtype is None or not dtype.in_torch:
        raise TensorError(f"A tensor has the unknown dtype {_brief(node)}.")
    return dtype


def sizes_of(node: Node) -> tuple[int, ...] | None:
    """A size or stride: a tuple of ints, a list of them, or a torch.Size."""
    if type(node) is Object and node.function == _SIZE and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    if type(node) is List:
        node = tuple(node.items)
    return cast("tuple[int, ...]", node) if type(node) is tuple and _INTS.issuperset(map(type, node)) else None


_SIZE, _INTS = Global("torch", "Size"), frozenset((int,))


_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_text(node: Node) -> bool:
    """Whether it is text that C++ can take from Python: in UTF-8."""
    return type(node) is str and _SURROGATE.search(node) is None


def extras_of(hooks: Node, metadata: Node = None) -> Extras | None:
    """What hooks and metadata add to a tensor; None where that is nothing."""
    is_empty = hooks is None or (type(hooks) is Dict and not hooks.items and hooks.attributes is None)
    if is_empty and metadata is None:
        return None
    bits = metadata.items if type(metadata) is Dict else []
    is_lazy = all(_is_text(key) and type(value) is bool and (value or key not in ("conj", "neg")) for key, value in bits)
    need((is_empty or type(hooks) is Dict) and (metadata is None or type(metadata) is Dict) and is_lazy)
    return Extras(hooks=None if is_empty else hooks, metadata=metadata)


def _entry(
    storage: Node, offset: Node, shape: Node, stride: Node, grad: Node = False, hooks: Node = None, metadata: Node = None,
    dtype: DType | None = None,
) -> Entry | Object:  # fmt: skip
    shape, stride = sizes_of(shape), sizes_of(stride)
    if type(storage) is not Storage or type(offset) is not int or shape is None or stride is None:
        raise Untaken
    dtype, extras = dtype or storage.dtype or UINT8, extras_of(hooks, metadata)
    entry = Entry(storage, dtype, shape, stride, offset, _gradient(dtype, grad), "tensor", extras)
    if extras is not None:
        bits, is_complex = entry.lazy_bits, dtype.family == "complex"
        need(
            is_complex
            or ("conj" not in bits and ("neg" not in bits or (dtype.storage is not None and dtype.family in ("float", "int"))))
        )
    check(entry)
    if storage.device != META:
        return entry
    made = (Global("torch", dtype.name), shape, stride, grad)
    return Object("reduce", Global("torch._utils", "_rebuild_meta_tensor_no_storage"), made)


def _entry_of_dtype(
    storage: Node, offset: Node, shape: Node, stride: Node, grad: Node, hooks: Node, dtype: Node, metadata: Node = None
) -> Entry | Object:
    return _entry(storage, offset, shape, stride, grad, hooks, metadata, dtype_of(dtype))


def _gradient(dtype: DType, requires_grad: Node) -> bool:
    if type(requires_grad) is not bool or (requires_grad and dtype.family not in ("float", "complex") and dtype.name in DTYPES):
        raise Untaken
    return requires_grad


def _parameter(data: Node, requires_grad: Node, hooks: Node, state: Node = None) -> Node:
    if type(data) is Object:
        return None  # a parameter around an unusual tensor stays an inert object
    if type(data) is not Entry:
        raise Untaken
    grad, extras, inner = _gradient(data.dtype, requires_grad), extras_of(hooks) or Extras(), data.extras or Extras()
    if not (inner.hooks is None and inner.python_type is None and inner.state is None):
        return None
    extras.state, extras.metadata = state, inner.metadata
    has_extras = extras.hooks is not None or state is not None or data.extras is not None
    return replace(data, requires_grad=grad, kind="parameter", extras=extras if has_extras else None)


_PARAMETER, _TENSOR = Global("torch.nn.parameter", "Parameter"), Global("torch", "Tensor")
_DENSE = named("torch._utils:_rebuild_tensor_v2,_rebuild_tensor_v3,_rebuild_parameter")


def _from_type(function: Node, python_type: Node, inner: Node, state: Node) -> Node:
    """A tensor subclass, or a tensor with Python attributes."""
    if type(function) is not Global or type(python_type) is not Global or type(inner) is not tuple:
        raise Untaken
    need(function.name.startswith("_rebuild") or function not in ALLOWED)
    entry = MAKERS[function](inner) if function in _DENSE else None
    need(type(entry) is not Object or not entry.name.startswith("torch._utils._rebuild_meta"))  # which has no attributes
    if type(entry) is not Entry or entry.extras is not None or python_type == _PARAMETER:
        return None
    kind = "tensor" if python_type == _TENSOR else entry.kind  # as torch does: `as_subclass` takes the class off
    return replace(entry, kind=kind, extras=Extras(python_type=python_type, state=state))


def _ordered_dict(given: Node = ()) -> Node:
    """`OrderedDict()`, Python 2's `OrderedDict([[key, value], ...])`, or one made of another dict."""
    if type(given) is Dict:
        return Dict([*given.items], ordered=True)
    rows = given.items if type(given) is List else given if type(given) is tuple else [given]
    pairs = [tuple(row.items) if type(row) is List else row for row in rows]
    return all(type(pair) is tuple and len(pair) == 2 for pair in pairs) and Dict(cast("list[Pair]", pairs), ordered=True)


_ENCODINGS = ("latin1", "latin-1", "utf-8", "utf8", "ascii")


def _encode(text: Node, encoding: Node = "utf-8") -> Node:
    """`_codecs.encode(text, "latin1")`: how protocol 2 carries bytes."""
    try:
        return type(text) is str and type(encoding) is str and encoding in _ENCODINGS and text.encode(encoding)
    except UnicodeEncodeError:
        return False


# --- what stays an Object, once its arguments are those that it takes


def _is_size(parts: Node = ()) -> bool:
    while type(parts) is Object and parts.name == "torch.Size" and type(parts.args) is tuple:
        parts = parts.args[0] if parts.args else ()
    parts = tuple(parts.items) if type(parts) is List else tuple(parts) if type(parts) is bytes else parts
    return type(parts) is tuple and all(
        (part.numel == 1 and part.dtype.family != "float") if type(part) is Entry else type(part) in (int, bool)
        for part in parts
    )


_DEVICE = re.compile(
    r"(cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|ort|xla|lazy|vulkan|mps|meta|hpu|mtia|privateuseone"
    r"|npu|mlu|musa|gcu|sdaa|dml)(?::(0|[1-9][0-9]{0,2}))?"
)


def is_device(text: Node, *index: Node) -> bool:
    """Whether torch makes a device of these: a kind and a number below 128, which it keeps in a byte."""
    found = _DEVICE.fullmatch(text) if type(text) is str else None
    numbers = (*([int(found[2])] if found and found[2] else []), *index)
    return found is not None and len(numbers) < 2 and all(type(number) is int and 0 <= number < 128 for number in numbers)


def _are_bytes(*given: Node) -> bool:
    is_text = len(given) == 2 and type(given[0]) is str and given[1] in _ENCODINGS
    return is_text or [type(part) for part in given] in ([], [bytes])


_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
_COUNTS = {
    "qtensor": 7, "sparse_tensor": 2, "nested_tensor": 4, "meta_tensor_no_storage": 4, "wrapper_subclass": 8,
    "device_tensor_from_cpu_tensor": 4, "device_tensor_from_numpy": 4,
}  # fmt: skip
# What is called, how many arguments it takes, and what makes something of them.
_FUNCTIONS: tuple[tuple[str, int, int, Callable[..., Node]], ...] = (
    ("torch._utils._rebuild_tensor", 4, 4, _entry),
    ("torch._utils._rebuild_tensor_v2", 6, 7, _entry),
    ("torch._utils._rebuild_tensor_v3", 7, 8, _entry_of_dtype),
    ("torch._utils._rebuild_parameter", 3, 3, _parameter),
    ("torch._utils._rebuild_parameter_with_state", 4, 4, _parameter),
    ("torch._tensor._rebuild_from_type_v2", 4, 4, _from_type),
    ("torch.tensor._rebuild_from_type_v2", 4, 4, _from_type),
    *((f"torch._utils._rebuild_{name}", count, count, lambda *_: True) for name, count in _COUNTS.items()),
    ("torch.Size", 0, 1, _is_size),
    ("torch.device", 1, 2, is_device),
    ("torch.serialization._get_layout", 1, 1, lambda name: name in [f"torch.{layout}" for layout in _LAYOUTS]),
    ("collections.OrderedDict", 0, 1, _ordered_dict),
    ("_codecs.encode", 1, 2, _encode),
    *(
        (f"{module}.complex", 0, 2, lambda *parts: all(type(part) in (int, float, bool) for part in parts))
        for module in ("builtins", "__builtin__")
    ),
    ("builtins.bytearray", 0, 2, _are_bytes),
    ("builtins.bytes", 0, 3, lambda *given: bool(given) or b""),  # how protocol 2 carries empty bytes
    # dtypes, classes of storages and the like take no call
    *((str(name), 0, 0, lambda: False) for name in NOT_CALLABLE | named("torch.storage:TypedStorage,UntypedStorage")),
    *((f"{module}.{name}", 0, 0, lambda: False) for module in ("torch", "torch.cuda") for name in BY_STORAGE),
)  # fmt: skip


def _maker(name: str, least: int, most: int, make: Callable[..., Node]) -> Maker:

    def maker(args: tuple[Node, ...]) -> Node:
        try:
            made = make(*args) if least <= len(args) <= most else False
        except Untaken:
            made = False
        if made is False:
            error = TensorError if name.startswith("torch") else PickleError
            raise error(f"{name} is called with malformed arguments.")
        return None if made is True else made

    return maker


MAKERS: dict[Global, Maker] = {Global(*row[0].rsplit(".", 1)): _maker(*row) for row in _FUNCTIONS}
rebuild_tensor = MAKERS[Global("torch._utils", "_rebuild_tensor")]
rebuild_tensor_v2 = MAKERS[Global("torch._utils", "_rebuild_tensor_v2")]


# --- tensors that are no plain view on a storage


@dataclass(slots=True, eq=False, repr=False)
class UnusualTensor:
    """A sparse, quantised, nested or meta tensor: kept as an Object, listed with what its arguments tell."""

    kind: str
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


_MOST_WRAPPINGS = 8  # parameters of subclasses of tensors: torch nests two


def unusual_tensor(node: Node) -> UnusualTensor | None:
    if type(node) is not Object or node.name not in _REBUILDS or node.call != "reduce":
        return None
    if node.steps:
        raise TensorError(f"What {node.name} makes is given other contents afterwards.")
    try:
        unusual = _describe(node, _MOST_WRAPPINGS)
    except (IndexError, TypeError, ValueError, AttributeError, TensorError, Untaken):
        raise TensorError(f"{node.name} is called with malformed arguments.") from None
    for sizes in (unusual.shape, unusual.stride):  # nothing checked them against a storage
        if sizes and (len(sizes) > MAX_DIMENSIONS or min(sizes) < 0 or max(sizes).bit_length() > 63):
            raise TensorError("A tensor has impossible sizes.")
    return unusual


def _describe(node: Any, left: int) -> UnusualTensor:
    """What the rebuild function of the innermost tensor tells: parameters and subclasses are wrapped around one."""
    need(left > 0)
    if type(node) is Entry:
        return UnusualTensor("subclass", node.dtype, node.shape, node.stride)
    if node.name in _PARAMETERS:
        return _describe(node.args[0], left - 1)
    if node.name not in FROM_TYPE:
        return _UNUSUAL[node.name](node.args) if node.name in _UNUSUAL else UnusualTensor("subclass")
    function, cls, args, _ = node.args
    if cls.name in _DISTRIBUTED and cls.module.startswith("torch.distributed."):
        return replace(_UNUSUAL["torch._utils._rebuild_wrapper_subclass"](args), kind=_DISTRIBUTED[cls.name])
    return _describe(Object("reduce", function, args), left - 1)


def unwrapped(node: Object) -> Object:
    for _ in range(_MOST_WRAPPINGS):
        inner = node.args[0] if node.name in _PARAMETERS and type(node.args) is tuple else None
        if type(inner) is not Object:
            break
        node = inner
    return node


def _quantized(args: Any) -> UnusualTensor:
    storage, offset, size, stride, (scheme, *numbers), grad, hooks = args
    if storage.dtype is not None and storage.dtype.name in _IN_A_BYTE:
        storage = replace(storage, nbytes=_IN_A_BYTE[storage.dtype.name] * storage.nbytes)
    view: Any = rebuild_tensor_v2((storage, offset, size, stride, grad, hooks))
    need(view.dtype.family == "quantized" and grad is False)
    if scheme == Global("torch", "per_tensor_affine"):
        scale, zero = numbers
        need(type(scale) in (float, int) and type(zero) is int)
    else:
        scales, zeros, axis = numbers
        need(scheme in _PER_CHANNEL and type(axis) is int and 0 <= axis < len(view.shape))
        need(_length(scales) == _length(zeros) == view.shape[axis])
    return UnusualTensor("quantized", view.dtype, view.shape, view.stride)


_IN_A_BYTE = {"quint4x2": 2, "quint2x4": 4}  # numbers, of which torch counts each as a byte nevertheless
_PER_CHANNEL = (Global("torch", "per_channel_affine"), Global("torch", "per_channel_affine_float_qparams"))


def _length(node: Any) -> int:
    return len(node.items) if type(node) is List else prod(node.shape)


class SparseParts(NamedTuple):
    layout: str
    indices: tuple[Entry, ...]
    values: Entry
    shape: tuple[int, ...]


def sparse_parts(args: Any) -> SparseParts:
    """The parts of `_rebuild_sparse_tensor(layout, parts)`, or of the older function for csr."""
    layout, parts = args
    name = layout.args[0].removeprefix("torch.")
    count = 1 if name == "sparse_coo" else 2
    need(name.startswith("sparse_") and len(parts) in ((3, 4) if count == 1 else (4,)) and parts[3:] != (None,))
    indices, values, shape = parts[:count], parts[count], sizes_of(parts[count + 1])
    if shape is None or not all(type(part) is Entry for part in (*indices, values)):
        raise Untaken
    if count == 1:  # a row of indices for each sparse dimension, a column for each value
        rows = indices[0].shape[:1]
        need((*rows, *values.shape) == (*indices[0].shape, *shape[sum(rows) :]) and sum(rows) <= len(shape))
    return SparseParts(name, indices, values, shape)


def _of_dtype(kind: str, dtype: Node, size: Node, stride: Node) -> UnusualTensor:
    return UnusualTensor(kind, dtype_of(dtype), sizes_of(size), sizes_of(stride))


def _meta(args: Any) -> UnusualTensor:
    made = _of_dtype("meta", *args[:3])
    need(made.shape is not None and made.stride is not None and type(args[3]) is bool)
    return made


def _from_cpu_tensor(args: Any) -> UnusualTensor:
    """`tensor.to(dtype, device)`, which may lay out anew what is not contiguous."""
    return UnusualTensor("device", dtype_of(args[1]), args[0].shape, args[0].stride if args[0].is_contiguous else None)


SPARSE = ("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_sparse_csr_tensor")
_UNUSUAL: dict[str, Callable[[Any], UnusualTensor]] = {
    "torch._utils._rebuild_qtensor": _quantized,
    **dict.fromkeys(SPARSE, lambda args: UnusualTensor("sparse", (parts := sparse_parts(args)).values.dtype, parts.shape)),
    "torch._utils._rebuild_nested_tensor": lambda args: UnusualTensor("nested", args[0].dtype),
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": lambda args: _of_dtype("subclass", *args[1:4]),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu_tensor,
}
_DISTRIBUTED = {"DTensor": "dtensor", "ShardedTensor": "sharded"}
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch.tensor._rebuild_from_type_v2")
_REBUILDS = frozenset((*_UNUSUAL, *_PARAMETERS, *FROM_TYPE))
