"""Objects made plain: data that `torch.load(weights_only=True)` accepts, without their classes and without running them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools import tree
from ckpt_tools.dtypes import DTYPES, DType
from ckpt_tools.errors import CkptError
from ckpt_tools.pickling.torch_objects import unusual_tensor
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.plan import Literal
from ckpt_tools.tree import DROP, ByteString, Dict, Entry, Extras, Global, List, Node, Object, Storage, Where, contiguous_stride

# Kept as they are by default, beside what weights_only allows.
_NAMES = frozenset(
    [
        "argparse.Namespace",
        "types.SimpleNamespace",
        "collections.defaultdict",
        "collections.deque",
        "builtins.set",
        "builtins.frozenset",
        "builtins.list",
        "builtins.dict",
        "builtins.tuple",
        "builtins.int",
        "builtins.float",
        "builtins.str",
        "builtins.bool",
        "builtins.bytes",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.range",
        "builtins.slice",
        "builtins.object",
        "numpy.core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.numeric._frombuffer",
        "numpy._core.multiarray.scalar",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.numeric._frombuffer",
    ]
)
_NUMPY_TYPES = frozenset(
    [
        "dtype",
        "ndarray",
        "generic",
        "bool",
        "bool_",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "str_",
        "bytes_",
        "void",
        "object_",
        "longlong",
        "ulonglong",
        "intc",
        "uintc",
        "longdouble",
        "clongdouble",
        "datetime64",
        "timedelta64",
    ]
)


def is_known(name: Global) -> bool:
    """Whether a global stands for plain data: what weights_only allows, NumPy scalars and arrays, Namespace, paths, dates."""
    if name in ALLOWED or str(name) in _NAMES:
        return True
    if name.module == "numpy":
        return name.name in _NUMPY_TYPES
    if name.module == "numpy.dtypes":
        return name.name.endswith("DType")
    if name.module in ("pathlib", "pathlib._local"):
        return name.name in _PATHS
    return str(name) in _SIMPLE


_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_SIMPLE = frozenset(
    [
        "datetime.datetime",
        "datetime.date",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "fractions.Fraction",
        "uuid.UUID",
    ]
)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one object: `became` is the kind of plain data, or "dropped"."""

    where: Where
    name: str
    became: str


def find_unknown(root: Node) -> list[tuple[Where, str]]:
    """Every object and global below `root` that is not known plain data, with its path and its global's name."""
    places = _places(root)
    found = []
    for node in tree.reachable(root):
        name = _unknown_name(node)
        if name is not None:
            found.append((places.get(id(node), ("<inside an object>",)), name))
    return sorted(set(found), key=lambda item: (tuple(map(str, item[0])), item[1]))


def _unknown_name(node: Node) -> str | None:
    if type(node) is Object:
        if type(node.function) is not Global:
            return "<a computed function>"
        return None if is_known(node.function) else str(node.function)
    return str(node) if type(node) is Global and not is_known(node) else None


def _places(root: Node) -> dict[int, Where]:
    places: dict[int, Where] = {}
    for where, node in tree.walk(root):
        places.setdefault(id(node), where)
    return places


def drop_unknown(root: Node) -> tuple[Node, list[Fate]]:
    """Leave out every object and global that is not known plain data; a tensor of such a class becomes a plain tensor."""

    def swap(node: Node) -> Node:
        if type(node) is Entry:
            python_type = node.extras.python_type if node.extras is not None else None
            return _plain_tensor(node) if python_type is not None and not is_known(python_type) else node
        return DROP if _unknown_name(node) is not None else node

    return _exchange(root, swap)


def make_plain(root: Node) -> tuple[Node, list[Fate]]:
    """Exchange every object for plain data; what has no plain form is dropped. Returns the root and every object's fate."""
    numbers = iter(range(1 << 62))
    return _exchange(root, lambda node: _plain(node, lambda: f"plain{next(numbers)}"))


def _exchange(root: Node, swap: Callable[[Node], Node]) -> tuple[Node, list[Fate]]:
    places = _places(root)
    fates: list[Fate] = []

    def noting(node: Node) -> Node:
        new = swap(node)
        if new is not node and type(node) is not Entry:
            name = str(node.function) if type(node) is Object else str(node)
            fates.append(Fate(places.get(id(node), ("<inside an object>",)), name, _kind(new)))
        return new

    return tree.replace(root, noting), fates


_KINDS: dict[type, str] = {
    Dict: "dict", List: "list", Entry: "tensor", Object: "set", bool: "number", int: "number", float: "number", str: "text",
    bytes: "bytes", tuple: "tuple",
}  # fmt: skip


def _kind(node: Node) -> str:
    return "dropped" if node is DROP else _KINDS.get(type(node), "None")


Key = Callable[[], str]


def _plain(node: Node, key: Key) -> Node:
    if type(node) is Global:
        return node if node in ALLOWED else str(node)
    if type(node) is ByteString:
        return node.data.decode("latin1")
    if type(node) is Entry:
        return _plain_tensor(node)
    if type(node) is not Object:
        return node
    if type(node.function) is not Global:
        return DROP
    return _plain_object(node, node.function, key)


def _plain_tensor(entry: Entry) -> Entry:
    """A tensor without a class of its own and without Python attributes."""
    extras = entry.extras
    if extras is None or (extras.python_type is None and extras.state is None):
        return entry
    return replace(entry, extras=Extras(metadata=extras.metadata) if extras.metadata is not None else None)


def as_value(node: Node) -> Node:
    """The text or number that a NumPy scalar, a path or a date stands for; None for anything else."""
    if type(node) is not Object or type(node.function) is not Global or not is_known(node.function):
        return None
    made = _plain_object(node, node.function, lambda: "0")
    return made if type(made) in (str, int, float, bool) else None


def _plain_object(node: Object, name: Global, key: Key) -> Node:
    if name in ALLOWED and node.call == "reduce" and not node.steps:
        return node
    if unusual_tensor(node) is not None:
        return node if name in ALLOWED else DROP
    convert = _CONVERSIONS.get(str(name).replace("numpy._core.", "numpy.core.").replace("pathlib._local.", "pathlib."))
    if convert is not None:
        try:
            return convert(node, key)
        except (ValueError, TypeError, IndexError, AttributeError, KeyError, struct.error, OverflowError, CkptError):
            return DROP
    return _plain_instance(node)


def _plain_instance(node: Object) -> Node:
    """An instance of a class that we do not know: its contents, its module's state dict, or its attributes."""
    state = attributes(node)
    if state is not None and all(type(state.get(part)) in (Dict, Object) for part in ("_parameters", "_buffers", "_modules")):
        return module_state_dict(node)
    pairs = [pair for step, value in node.steps if step == "set" for pair in value]
    items = [item for step, value in node.steps if step == "append" for item in value]
    if pairs:
        return Dict(pairs)
    if items:
        return List(items)
    if state is not None:
        return Dict(list(state.items))
    # An enum member is pickled as Class(value): its only argument is what it stands for.
    if node.call == "reduce" and not node.steps and type(node.args) is tuple and len(node.args) == 1:
        return node.args[0] if type(node.args[0]) in (str, int, float, bool, bytes) else DROP
    return DROP


def attributes(node: Node) -> Dict | None:
    """The attributes of an instance, from the state that its pickle sets: a dict, or a pair of dict and slots."""
    state = node.state if type(node) is Object else None
    if type(state) is tuple and len(state) == 2:
        dicts = [part for part in state if type(part) is Dict]
        return Dict([pair for part in dicts for pair in part.items]) if dicts else None
    return state if type(state) is Dict else None


def _mapping(node: Node) -> list[tuple[Node, Node]]:
    if type(node) is Dict:
        return node.items
    return [pair for step, value in node.steps if step == "set" for pair in value] if type(node) is Object else []


def module_state_dict(module: Object) -> Dict:
    """What `state_dict()` of a pickled nn.Module would give: its own parameters and buffers, then its children's, in order."""
    result: list[tuple[Node, Node]] = []
    todo: list[tuple[str, Node]] = [("", module)]
    seen: set[int] = set()
    while todo:
        prefix, node = todo.pop()
        state = attributes(node)
        if state is None or id(node) in seen:
            continue
        seen.add(id(node))
        hidden = _set_items(state.get("_non_persistent_buffers_set"))
        own = _mapping(state.get("_parameters")) + [pair for pair in _mapping(state.get("_buffers")) if pair[0] not in hidden]
        result += [(f"{prefix}{name}", value) for name, value in own if value is not None]
        children = [(f"{prefix}{name}.", child) for name, child in _mapping(state.get("_modules")) if child is not None]
        todo.extend(reversed(children))
    return Dict(result, ordered=True)


def _set_items(node: Node) -> list[Node]:
    if type(node) is Object and type(node.args) is tuple and node.args and type(node.args[0]) is List:
        return [item for item in node.args[0].items if type(item) is str]
    return []


# --- known objects, one converter each


def _attributes_dict(node: Object, key: Key) -> Node:
    state = attributes(node)
    return Dict(list(state.items)) if state is not None else Dict()


def _path(node: Object, key: Key) -> Node:
    parts = [str(part) for part in node.args]
    windows = "Windows" in str(node.function)
    separator = "\\" if windows else "/"
    head, *tail = parts or ["."]
    return head + (separator if tail and not head.endswith(separator) else "") + separator.join(tail)


def _items_dict(node: Object, key: Key) -> Node:
    return Dict(_mapping(node))


def _items_list(node: Object, key: Key) -> Node:
    items = [item for step, value in node.steps if step == "append" for item in value]
    given = node.args[0].items if node.args and type(node.args[0]) is List else []
    return List([*given, *items])


def _as_set(node: Object, key: Key) -> Node:
    return Object("reduce", Global("builtins", "set"), (List(list(node.args[0].items)) if node.args else List(),))


def _timestamp(node: Object, key: Key) -> Node:
    import datetime

    # A known class of the standard library with checked bytes: nothing that the file names is looked up or called.
    kind = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}[str(node.function.name)]
    if not node.args or type(node.args[0]) is not bytes or len(node.args) > 1:
        return DROP
    return kind(node.args[0]).isoformat()


def _timedelta(node: Object, key: Key) -> Node:
    days, seconds, microseconds = node.args
    return days * 86400.0 + seconds + microseconds / 1e6


def _text_argument(node: Object, key: Key) -> Node:
    return node.args[0] if type(node.args[0]) is str else DROP


def _numpy_scalar(node: Object, key: Key) -> Node:
    kind, data = node.args
    code, order = _numpy_type(kind)
    if code == "b1":
        return data != b"\0"
    if code[0] in "SU":
        return data.decode("latin1" if code[0] == "S" else f"utf-32-{'be' if order == '>' else 'le'}").rstrip("\0")
    if code in ("c8", "c16"):
        return Object("reduce", Global("builtins", "complex"), struct.unpack(order + {"c8": "2f", "c16": "2d"}[code], data))
    return struct.unpack(order + _STRUCT[code], data)[0]


_STRUCT = {
    "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q", "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip
_TORCH = {
    "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8", "u2": "uint16", "u4": "uint32",
    "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


def _numpy_type(node: Node) -> tuple[str, str]:
    """The code ("f8") and byte order ("<" or ">") of a pickled numpy.dtype."""
    if type(node) is not Object or str(node.function) != "numpy.dtype" or type(node.args[0]) is not str:
        raise ValueError("not a numpy dtype")
    order = node.state[1] if type(node.state) is tuple else "<"
    return node.args[0], ">" if order == ">" else "<"


def _numpy_array(node: Object, key: Key) -> Node:
    """An array by `_reconstruct` and its state (version, shape, dtype, is_fortran, bytes)."""
    _, shape, kind, fortran, data = node.state
    return _array(shape, kind, fortran, data, key)


def _numpy_frombuffer(node: Object, key: Key) -> Node:
    buffer, kind, shape, order = node.args
    data = buffer.args[0] if type(buffer) is Object else buffer
    return _array(shape, kind, order == "F", data, key)


def _array(shape: Any, kind: Node, fortran: Any, data: Any, key: Key) -> Node:
    code, order = _numpy_type(kind)
    dtype: DType = DTYPES[_TORCH[code]]
    if type(data) is not bytes or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("not plain numbers")
    if order == ">" and dtype.swap_width > 1:
        width = dtype.swap_width
        data = b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))
    stride = tuple(reversed(contiguous_stride(shape[::-1]))) if fortran else contiguous_stride(shape)
    entry = Entry(Storage(key(), dtype if dtype.storage else None, len(data), "cpu", Literal(data)), dtype, shape, stride, 0)
    tree.check(entry)
    return entry


_CONVERSIONS: dict[str, Callable[[Object, Key], Node]] = {
    "argparse.Namespace": _attributes_dict,
    "types.SimpleNamespace": _attributes_dict,
    "collections.defaultdict": _items_dict,
    "collections.deque": _items_list,
    "builtins.frozenset": _as_set,
    "builtins.set": _as_set,
    "builtins.list": _items_list,
    "builtins.dict": _items_dict,
    "datetime.datetime": _timestamp,
    "datetime.date": _timestamp,
    "datetime.time": _timestamp,
    "datetime.timedelta": _timedelta,
    "decimal.Decimal": _text_argument,
    "fractions.Fraction": _text_argument,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _numpy_array,
    "numpy.core.numeric._frombuffer": _numpy_frombuffer,
    **{f"pathlib.{name}": _path for name in _PATHS},
}
