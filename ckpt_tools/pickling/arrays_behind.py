"""Arrays that joblib writes into the stream right behind the object that describes them, where no opcode is.

What is read is the array as NumPy pickles it; to any other loader opcodes stand there. Source: joblib/numpy_pickle.py.
"""

from __future__ import annotations

import re
from math import prod
from typing import cast

from ckpt_tools.pickling.machine import RECONSTRUCTOR, Machine, Malformed
from ckpt_tools.tree.dtypes import BY_NUMPY
from ckpt_tools.tree.nodes import Build, Dict, Global, Node, Object

_RECONSTRUCT = Global("numpy.core.multiarray", "_reconstruct")
_NDARRAY, _MEMMAP = Global("numpy", "ndarray"), Global("numpy", "memmap")
_TEXT_OF_ANY_LENGTH = Global("numpy._core._internal", "_convert_to_stringdtype_kwargs")
_VERSION = 1  # of the state of an array
WRAPPER = "NumpyArrayWrapper"  # of joblib.numpy_pickle, which scikit-learn once had a copy of
_BESIDE = ("NDArrayWrapper", "ZNDArrayWrapper")  # of joblib before 0.10: the array is in another file
_BY_COPYREG = frozenset((RECONSTRUCTOR, Global("copyreg", "__newobj__"), Global("copyreg", "__newobj_ex__")))
_CODE = r"([USV])(\d{1,9})"
_SIZES = {code: known.itemsize for code, known in BY_NUMPY.items()} | {"M8": 8, "m8": 8, "f16": 16, "c32": 32}
_SUBARRAY, _ITEMSIZE, _FLAGS, _HAS_OBJECTS = 2, 5, 7, 1  # in the state of a dtype; one of the flags
_MOST, _MOST_DIMENSIONS = 1 << 50, 64


def array_behind(machine: Machine, target: Object, frame: int) -> Node:
    """The array behind a wrapper that has just been given its state: bytes, or a pickle with a memo of its own."""
    cls = target.args[0] if target.function in _BY_COPYREG and type(target.args) is tuple and target.args else target.function
    name = cls.name.rpartition(".")[2] if type(cls) is Global else ""
    if name != WRAPPER and name not in _BESIDE:
        return target
    machine.has_arrays = True
    if name in _BESIDE:
        raise Malformed("names an array of joblib's in another file, which joblib loads whatever is in it")
    if frame > machine.position:
        raise Malformed("is followed by an array of joblib's in the middle of a frame")
    step = target.steps[0] if len(target.steps) == 1 else None
    given = step.state.named if type(step) is Build and type(step.state) is Dict else {}
    size, shape = _itemsize(given.get("dtype")), given.get("shape")
    if size is None or type(shape) is not tuple or not all(type(n) is int and 0 <= n < _MOST for n in shape):
        raise Malformed("is followed by an array of joblib's whose length cannot be told")
    if size < 0:  # in it joblib passes over none
        protocol, machine.arrays = machine.protocol, None
        made = machine.run()
        machine.protocol, machine.arrays = protocol, array_behind
        return cast("Node", made)
    alignment = given.get("numpy_array_alignment_bytes")
    if alignment is not None:  # a byte before an array tells how many more stand there
        machine.position += 1 + machine.data[machine.position]
    start = machine.position
    machine.position += size * prod(cast("tuple[int, ...]", shape[:_MOST_DIMENSIONS]))
    if machine.position > machine.end or len(shape) > _MOST_DIMENSIONS:
        raise Malformed("is followed by an array that is cut off")
    data = machine.data[start : machine.position]
    machine.places[id(data)] = (start, data)
    array = given.get("subclass", _NDARRAY)
    made = machine.call(_RECONSTRUCT, (_NDARRAY if array == _MEMMAP else array, (0,), b"b"))
    if type(made) is Object:
        made.steps.append(Build((_VERSION, shape, given["dtype"], given.get("order") == "F", data)))
    return made


def _itemsize(dtype: Node) -> int | None:
    """How many bytes an element takes; -1 where it is or holds an object, None where NumPy writes no such dtype."""
    if type(dtype) is Object and dtype.function == _TEXT_OF_ANY_LENGTH:
        return -1
    if type(dtype) is not Object or dtype.call != "reduce" or dtype.name != "numpy.dtype" or len(dtype.steps) > 1:
        return None
    code = dtype.args[0] if type(dtype.args) is tuple and dtype.args else None
    if type(code) is not str:
        return None
    text, is_object = re.fullmatch(_CODE, code), code in ("O", "O8")
    size = int(text[2]) * (4 if text[1] == "U" else 1) if text else -1 if is_object else _SIZES.get(code)
    if not dtype.steps or size is None:
        return size
    state = dtype.state
    if type(state) is not tuple or len(state) not in (8, 9) or state[_SUBARRAY] is not None:  # with units of time or without
        return None
    itemsize, flags = state[_ITEMSIZE], state[_FLAGS]
    if type(itemsize) is not int or type(flags) is not int or (text and itemsize != size):
        return None
    holds_objects = bool(flags & _HAS_OBJECTS)
    return None if holds_objects != is_object and code[0] != "V" else -1 if holds_objects else size
