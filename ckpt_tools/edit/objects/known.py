"""What is plain data, by the names of its classes; every command asks this, and imports what makes data of others for those."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.pickling.weights_only import ALLOWED, is_newer_dtype
from ckpt_tools.tree.nodes import Dict, Entry, Global, Node, Where

PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
WITH_OUTER = "part of the object around it"  # what became of an object inside another
# Modules, and what of them is kept as it is by default, beside what weights_only allows
_ROWS = (
    ("argparse", "Namespace"), ("types", "SimpleNamespace"), ("collections", "defaultdict deque"),
    ("builtins", "set frozenset list dict tuple int float str bool bytes bytearray complex range slice object"),
    ("numpy.core.multiarray numpy._core.multiarray", "scalar _reconstruct"),
    ("numpy.core.numeric numpy._core.numeric", "_frombuffer"), ("datetime", "datetime date time timedelta timezone"),
    ("decimal", "Decimal"), ("fractions", "Fraction"), ("uuid", "UUID"), ("pathlib pathlib._local", " ".join(PATHS)),
    ("numpy", "dtype ndarray generic bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"),
    ("numpy", "complex64 complex128 str_ bytes_ void object_ longlong ulonglong intc uintc longdouble clongdouble"),
    ("numpy", "datetime64 timedelta64"),
)  # fmt: skip
_KNOWN = frozenset(f"{module}.{name}" for modules, names in _ROWS for module in modules.split() for name in names.split())


@dataclass(slots=True, unsafe_hash=True)
class ObjectFate:
    """What became of one object: `where` it is, the `name` of its class or function, and what it `became`."""

    where: list[str | int]
    name: str
    became: str


@lru_cache(maxsize=1024)
def is_known(name: Global) -> bool:
    """Whether a global stands for plain data: what weights_only allows, NumPy scalars and arrays, Namespace, paths, dates."""
    is_dtype = name.module == "numpy.dtypes" and name.name.endswith("DType")
    return name in ALLOWED or str(name) in _KNOWN or is_dtype or is_newer_dtype(name)


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
