"""What a Python object is as plain data, one converter for each kind. Nothing that a file names is looked up or called."""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from ckpt_tools.edit.objects.known import PATHS, is_known
from ckpt_tools.errors import CkptError
from ckpt_tools.io.content import Literal
from ckpt_tools.pickling.machine import RECONSTRUCTOR
from ckpt_tools.pickling.torch_objects import unusual_tensor
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree import nodes
from ckpt_tools.tree.dtypes import BY_NUMPY, DTYPES
from ckpt_tools.tree.exchange import DROP, Drop, Swap
from ckpt_tools.tree.modules import attributes, is_module, mapping, module_state_dict
from ckpt_tools.tree.nodes import Build, Dict, Entry, Global, List, Node, Object, array_bytes, contiguous_stride

Key = Callable[[], str]
# Converters take arguments and states to be of the shape that the class gives them; `plain_object` sees to those of another.
Converter = Callable[[Any, Key], Node | Drop]
_PRIMITIVES = frozenset((type(None), bool, int, float, str, bytes))
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")


def plain_object(node: Object, key: Key) -> Node | Drop:
    """The plain form of an object, whose parts are still as they were; DROP where it has none."""
    name = node.function
    if type(name) is not Global:  # a nested class, or a partial of __new__, in protocol 2
        return plain_instance(node)
    if name == _FROM_TYPE and unusual_tensor(node) is not None:
        return plain_subclass(node)
    if name in ALLOWED and node.call == "reduce" and not node.steps:
        return node
    if unusual_tensor(node) is not None:
        return DROP
    convert = _conversion(name)
    if convert is None:
        return plain_instance(node)
    try:
        return convert(node, key)
    except (ValueError, TypeError, IndexError, AttributeError, KeyError, struct.error, OverflowError, CkptError):
        return DROP


def as_value(node: Node) -> Node:
    """The text or number that a NumPy scalar, a path or a date stands for; None for anything else."""
    if type(node) is not Object or type(node.function) is not Global or not is_known(node.function) or not _is_small(node):
        return None
    made = plain_object(node, lambda: "0")
    return made if isinstance(made, (str, int, float)) else None


def as_array(node: Node, key: Key = lambda: "0") -> Entry | None:
    """The tensor that a pickled NumPy array of numbers stands for; None for anything else."""
    if type(node) is not Object or type(node.function) is not Global or not is_array(node.function):
        return None
    made = plain_object(node, key)
    return made if type(made) is Entry else None


def _is_small(node: Object) -> bool:
    """Whether an object can be shown as a value at the cost of a value, however often it is referred to."""
    args = node.args if type(node.args) is tuple else ()
    if node.steps or type(node.args) is not tuple or len(args) > 64:
        return False
    return not any(type(arg) in (Dict, List, tuple) or (isinstance(arg, str | bytes) and len(arg) > 4096) for arg in args)


def is_array(name: Global) -> bool:
    return _conversion(name) in _ARRAYS


def is_of_numbers(name: Global) -> bool:
    """Whether this makes an array of NumPy's, or one number of it."""
    return is_array(name) or _conversion(name) is _numpy_scalar


@lru_cache(maxsize=1024)
def _conversion(name: Global) -> Converter | None:
    return _CONVERSIONS.get(str(name).replace("numpy._core.", "numpy.core.").replace("pathlib._local.", "pathlib."))


def plain_subclass(node: Object) -> Node | Drop:
    """An unusual tensor without a class that torch does not know."""
    args: Any = node.args
    function, python_type, inner, state = args
    if python_type in ALLOWED and function in ALLOWED:
        return node
    if function in ALLOWED and function != _WRAPPER:
        return Object("reduce", function, inner)
    parts = state if type(state) is tuple else (state,)
    pairs = [pair for part in parts if type(part) is Dict for pair in part.items]
    return Dict(pairs) if pairs else DROP


def plain_instance(node: Object) -> Node | Drop:
    """An instance of a class that we do not know: its contents, its module's state dict, its attributes, its arguments."""
    state = attributes(node)
    if is_module(node):
        return module_state_dict(node)
    if pairs := node.pairs:
        names = {name for name, _ in pairs if type(name) is str}
        return Dict(pairs + [pair for pair in (state.items if state else ()) if pair[0] not in names])
    if items := node.appended:
        return _with_attributes("<items>", List(items), state)
    if state is not None:
        made = DROP if node.function == RECONSTRUCTOR else _made_from(node.args)
        return Dict(list(state.items)) if isinstance(made, Drop) else _with_attributes("<arguments>", made, state)
    if node.state is not None:
        return _made_from(node.state if type(node.state) is tuple else (node.state,))
    return _made_from(node.args)


def _with_attributes(name: str, made: Node, state: Dict | None) -> Node:
    return Dict([(name, made), *state.items]) if state is not None and state.items else made


def _made_from(args: Node) -> Node | Drop:
    """What an enum member, a named tuple, a subclass of str or int is made from: its arguments are all it is."""
    if type(args) is not tuple or not args:
        return DROP
    if not _PRIMITIVES.issuperset(map(type, args)):
        return args[0] if len(args) == 1 and type(args[0]) in (Dict, List) else List(list(args))
    return args[0] if len(args) == 1 else args


# --- what weights_only has taken since torch 2.5 only


def plain_for_2_4(node: Node | Drop, key: Key) -> Node | Drop:
    """A plain node as torch 2.4 takes it: a set as a list, bytes as a uint8 tensor, a complex number as a 0-d tensor."""
    if type(node) is bytes:
        return _tensor("uint8", (len(node),), node, key)
    if type(node) is not Object or node.call != "reduce" or node.steps or type(node.args) is not tuple:
        return node
    name, args = node.name, node.args
    if name == "builtins.set":
        return List(list(args[0].items)) if args and type(args[0]) is List else List()
    if name == "builtins.complex":
        number = _complex(args)
        packed = b"" if number is None else struct.pack("<2d", number.real, number.imag)
        return _tensor("complex128", (), packed, key) if packed else DROP
    if name == "builtins.bytearray":
        given = args[0] if args else b""  # nothing, bytes, or text in latin1
        data = given.encode("latin1", "replace") if type(given) is str and len(args) == 2 else given
        return _tensor("uint8", (len(data),), data, key) if type(data) is bytes else DROP
    return node


def key_for_2_4(plain: Swap) -> Swap:
    """What keys become: bytes and complex numbers text, since they are neither a plain value nor a name."""

    def convert(node: Node) -> Node | Drop:
        new = node.decode("latin1") if type(node) is bytes else plain(node)
        if type(new) is Object and new.name == "builtins.complex":
            number = _complex(new.args)
            return DROP if number is None else str(number)
        return new

    return convert


def _complex(args: Node) -> complex | None:
    """The number that two parts make; None for anything else, and for whole numbers that no float holds."""
    if type(args) is not tuple or len(args) != 2:
        return None
    parts = [part for part in args if type(part) is float or type(part) is int]
    try:
        return complex(*parts) if len(parts) == 2 else None
    except OverflowError:
        return None


def _tensor(name: str, shape: tuple[int, ...], data: bytes, key: Key) -> Entry:
    return nodes.stored(key(), DTYPES[name], shape, Literal(data))


# --- known objects, one converter each


def _path(node: Any, key: Key) -> Node:
    parts = [part for part in node.args if type(part) is str]
    windows = "Windows" in node.name
    separator = "\\" if windows else "/"
    head, *tail = parts or ["."]
    return head + (separator if tail and not head.endswith(separator) else "") + separator.join(tail)


def _timestamp(node: Any, key: Key) -> Node:
    # A known class of the standard library with checked bytes: nothing that the file names is looked up or called.
    kind: Any = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}[node.name.rpartition(".")[2]]
    data, *zone = node.args
    made = kind(data)
    return str((made.replace(tzinfo=_zone(*zone)) if zone else made).isoformat())


def _zone(node: Any) -> Any:
    """The time zone of a pickled datetime.timezone; ValueError for another class's."""
    if node.name != "datetime.timezone":
        raise ValueError("not a fixed time zone")
    return datetime.timezone(datetime.timedelta(*node.args[0].args))


def _timedelta(node: Any, key: Key) -> Node:
    days, seconds, microseconds = node.args
    return float(days * 86400.0 + seconds + microseconds / 1e6)


def _uuid(node: Any, key: Key) -> Node:
    import uuid

    return str(uuid.UUID(int=node.state.get("int")))


def _numbers(args: Sequence[Node]) -> list[int | None]:
    numbers = [part for part in args if part is None or type(part) is int]
    if len(numbers) != len(args):
        raise ValueError("not plain numbers")
    return numbers


def _member(node: Any, key: Key) -> Node | Drop:
    """`getattr(class, name)`: how some Pythons pickle an enum member."""
    owner, name = node.args
    return name if type(owner) is Global and type(name) is str else DROP


def _fraction(node: Any, key: Key) -> Node | Drop:
    return "/".join(map(str, _numbers(node.args))) if len(node.args) == 2 else _text_argument(node, key)


def _text_argument(node: Any, key: Key) -> Node | Drop:
    return node.args[0] if type(node.args[0]) is str else DROP


def _numpy_scalar(node: Any, key: Key) -> Node:
    kind, given = node.args
    code, order = _numpy_type(kind)
    data = array_bytes(given, BY_NUMPY[code].itemsize if code in BY_NUMPY else -1)
    if data is None:
        raise ValueError("not the bytes of a number")
    if code == "b1":
        return bool(data != b"\0")
    if code[0] in "SU":
        return str(data, "latin1" if code[0] == "S" else f"utf-32-{'be' if order == '>' else 'le'}").rstrip("\0")
    found = struct.unpack(order + _STRUCT[code], data)
    if len(found) == 2:
        return Object("reduce", Global("builtins", "complex"), found)
    return float(found[0]) if code[0] == "f" else int(found[0])


_STRUCT = {
    "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q", "f2": "e", "f4": "f", "f8": "d",
    "c8": "2f", "c16": "2d",
}  # fmt: skip


def _numpy_type(node: Any) -> tuple[str, str]:
    """The code ("f8") and byte order ("<" or ">") of a pickled numpy.dtype."""
    args: Any = node.args if type(node) is Object and node.name == "numpy.dtype" else (None,)
    if type(code := args[0]) is not str:
        raise ValueError("not a numpy dtype")
    if len(node.steps) > 1:
        raise ValueError("a dtype that is another one later")
    order = node.state[1] if type(node.state) is tuple else "<"
    return code, ">" if order == ">" else "<"


def _numpy_array(node: Any, key: Key) -> Node:
    _, shape, kind, fortran, data = node.state
    return _array(shape, kind, fortran, data, key)


def _numpy_frombuffer(node: Any, key: Key) -> Node:
    buffer, kind, shape, order = node.args
    made_of: Any = buffer.args if type(buffer) is Object else (buffer,)
    return _array(shape, kind, order == "F", made_of[0], key)


def _masked_array(node: Any, key: Key) -> Node:
    """A masked array: its numbers, which of them are masked, and what stands for those."""
    _, shape, kind, fortran, data, mask, fill = node.state
    masked = Object("reduce", Global("numpy", "dtype"), ("b1", False, True))
    pairs = [("data", _array(shape, kind, fortran, data, key)), ("mask", _array(shape, masked, fortran, mask, key))]
    return Dict([*pairs, ("fill_value", fill)])


def _dills_array(node: Any, key: Key) -> Node:
    """An array as dill pickles it: what makes it, with what, its state, and the attributes of a subclass."""
    made, args, state, attributes_ = node.args
    array = Object("reduce", made, args)
    array.steps.append(Build(state))
    if attributes_ or type(made) is not Global or _conversion(made) is not _numpy_array:
        raise ValueError("an array with attributes")
    return _numpy_array(array, key)


def _array(shape: Any, kind: Node, fortran: Any, data: Any, key: Key) -> Node:
    code, order = _numpy_type(kind)
    if code[:1] in ("S", "U"):
        return _text_array(shape, code, order, fortran, data)
    if code not in BY_NUMPY:
        if not code.startswith("O") or type(data) is not List or shape != (len(data.items),):
            raise ValueError("not plain numbers")
        return List(list(data.items))  # of Python objects, with one dimension
    dtype = BY_NUMPY[code]
    data = array_bytes(data, prod(shape) * dtype.itemsize)
    if type(data) is not bytes or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("not plain numbers")
    if order == ">" and dtype.swap_width > 1:
        width = dtype.swap_width
        data = b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))
    entry = nodes.stored(key(), dtype, shape, Literal(data))
    if fortran:
        entry = replace(entry, stride=tuple(reversed(contiguous_stride(shape[::-1]))))
    if len(data) != entry.nbytes:
        raise ValueError("an array whose bytes are not its elements")
    nodes.check(entry)
    return entry


def _text_array(shape: Any, code: str, order: str, fortran: Any, data: Any) -> Node:
    wide = code[0] == "U"
    width = int(code[1:]) * (4 if wide else 1)
    data = array_bytes(data, prod(shape) * width)
    if fortran or data is None or not width or len(data) != prod(shape) * width:
        raise ValueError("an array whose bytes are not its elements")
    codec = "latin1" if not wide else f"utf-32-{'be' if order == '>' else 'le'}"
    cells: list[Node] = [data[at : at + width].decode(codec).rstrip("\0") for at in range(0, len(data), width)]
    for size in reversed(shape[1:]):
        cells = [List(cells[at : at + size]) for at in range(0, len(cells), size)] if size else []
    return List(cells) if shape else cells[0]


def _items(args: Any) -> list[Node]:
    """The items of the list that a collection is made from; of none without."""
    return list(args[0].items) if args and type(args[0]) is List else []


_ARRAYS = (_numpy_array, _numpy_frombuffer, _masked_array, _dills_array)
_CONVERSIONS: dict[str, Converter] = {
    **dict.fromkeys(
        ("argparse.Namespace", "types.SimpleNamespace"),
        lambda node, _: Dict(list(state.items) if (state := attributes(node)) is not None else []),
    ),
    **dict.fromkeys(("collections.defaultdict", "builtins.dict"), lambda node, _: Dict(mapping(node))),
    **dict.fromkeys(
        ("builtins.frozenset", "builtins.set"),
        lambda node, _: Object("reduce", Global("builtins", "set"), (List(list(node.args[0].items) if node.args else []),)),
    ),
    **dict.fromkeys(("collections.deque", "builtins.list"), lambda node, _: List([*_items(node.args), *node.appended])),
    **dict.fromkeys(("datetime.datetime", "datetime.date", "datetime.time"), _timestamp),
    "datetime.timedelta": _timedelta,
    "datetime.timezone": lambda node, _: str(_zone(node)),
    "uuid.UUID": _uuid,
    **dict.fromkeys(
        ("builtins.range", "builtins.slice"),
        lambda node, _: f"{node.name.rpartition('.')[2]}({', '.join(map(repr, _numbers(node.args)))})",
    ),
    "builtins.getattr": _member,
    "torch.nn.parameter.UninitializedParameter": lambda node, _: DROP,  # of a lazy module: it has no values yet
    "numpy.dtype": lambda node, _: BY_NUMPY[code].name if (code := _numpy_type(node)[0]) in BY_NUMPY else code,
    "decimal.Decimal": _text_argument,
    "fractions.Fraction": _fraction,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _numpy_array,
    "numpy.core.numeric._frombuffer": _numpy_frombuffer,
    "numpy.ma.core._mareconstruct": _masked_array,
    **dict.fromkeys(("dill._dill._create_array", "dill.dill._create_array"), _dills_array),
    **{f"pathlib.{name}": _path for name in PATHS},
}
