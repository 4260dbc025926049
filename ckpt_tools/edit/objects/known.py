"""What is plain data, by the names of its classes; every command asks this, and imports what makes data of others for those."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.pickling.weights_only import ALLOWED, is_newer_dtype
from ckpt_tools.tree.nodes import Dict, Entry, Global, Node, Where

PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
WITH_OUTER = "part of the object around it"  # what became of an object inside another
# Kept as they are by default, beside what weights_only allows.
_NAMES = frozenset((
    "argparse.Namespace", "types.SimpleNamespace", "collections.defaultdict", "collections.deque", "builtins.set",
    "builtins.frozenset", "builtins.list", "builtins.dict", "builtins.tuple", "builtins.int", "builtins.float",
    "builtins.str", "builtins.bool", "builtins.bytes", "builtins.bytearray", "builtins.complex", "builtins.range",
    "builtins.slice", "builtins.object", "numpy.core.multiarray.scalar", "numpy.core.multiarray._reconstruct",
    "numpy.core.numeric._frombuffer", "numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct",
    "numpy._core.numeric._frombuffer", "datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta",
    "datetime.timezone", "decimal.Decimal", "fractions.Fraction", "uuid.UUID",
))  # fmt: skip
_NUMPY_TYPES = frozenset((
    "dtype", "ndarray", "generic", "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "float16", "float32", "float64", "complex64", "complex128", "str_", "bytes_", "void", "object_",
    "longlong", "ulonglong", "intc", "uintc", "longdouble", "clongdouble", "datetime64", "timedelta64",
))  # fmt: skip


@dataclass(slots=True, unsafe_hash=True)
class ObjectFate:
    """What became of one object: `where` it is, the `name` of its class or function, and what it `became`."""

    where: list[str | int]
    name: str
    became: str


@lru_cache(maxsize=1024)
def is_known(name: Global) -> bool:
    """Whether a global stands for plain data: what weights_only allows, NumPy scalars and arrays, Namespace, paths, dates."""
    if name in ALLOWED or str(name) in _NAMES or is_newer_dtype(name):
        return True
    if name.module == "numpy":
        return name.name in _NUMPY_TYPES
    if name.module == "numpy.dtypes":
        return name.name.endswith("DType")
    return name.module in ("pathlib", "pathlib._local") and name.name in PATHS


def tensor_attributes(root: Node) -> dict[Where, Node]:
    """The attributes of every tensor below `root`, by the tensor's path and their names."""
    found: dict[Where, Node] = {}
    for tensor in find_tensors(root):
        if type(tensor.node) is not Entry or tensor.node.extras is None:
            continue
        state = tensor.node.extras.state
        for part in state if type(state) is tuple else (state,):  # a pair where the class has __slots__
            found.update(((*tensor.where, str(name)), value) for name, value in (part.items if type(part) is Dict else ()))
    return found
