"""Arrays that joblib writes into the stream right behind the object that describes them, where no opcode is."""

from __future__ import annotations

from ckpt_tools.pickling.reader import Machine
from ckpt_tools.tree.dtypes import BY_NUMPY
from ckpt_tools.tree.nodes import (
    Dict,
    Global,
    Node,
    Object,
)

_WRAPPER = Global("joblib.numpy_pickle", "NumpyArrayWrapper")


def array_bytes(node: Object, machine: Machine) -> int:
    """How many bytes of the stream an object's array takes, with the padding before it; 0 for any other object.

    Source: joblib/numpy_pickle.py, `NumpyArrayWrapper.read_array`: a byte with the length of the padding comes first
    where the wrapper has an alignment. An array of objects is a pickle of its own, which is read on as such.
    """
    state = node.state if type(node.function) is Global and node.function == _WRAPPER else None
    if type(state) is not Dict:
        return 0
    itemsize, count = _itemsize(state.get("dtype")), _count(state.get("shape"))
    if not itemsize or count is None:
        return 0
    padding = 0
    if type(state.get("numpy_array_alignment_bytes")) is int and machine.position < machine.end:
        padding = 1 + machine.data[machine.position]
    length = padding + count * itemsize
    if length > machine.end - machine.position:
        raise machine.short("is followed by an array that is cut off", machine.position + length)
    return length


def is_pickled_behind(node: Object) -> bool:
    """Whether a pickle of its own follows, with a memo of its own: joblib writes arrays of objects so."""
    state = node.state if type(node.function) is Global and node.function == _WRAPPER else None
    return type(state) is Dict and not _itemsize(state.get("dtype"))


def _itemsize(dtype: Node) -> int:
    code = dtype.args[0] if type(dtype) is Object and type(dtype.args) is tuple and dtype.args else None
    if type(code) is not str:
        return 0
    known = BY_NUMPY.get(code)
    return (
        known.itemsize
        if known is not None
        else int(code[1:])
        if code[:1] in "USV" and code[1:].isdecimal() and len(code) < 9
        else 0
    )


def _count(shape: Node) -> int | None:
    count = 1
    for size in shape if type(shape) is tuple else (None,):
        if type(size) is not int or size < 0 or count > 1 << 50:
            return None
        count *= size
    return count
