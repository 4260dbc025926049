"""Arrays that joblib writes into the stream right behind the object that describes them, where no opcode is.

Only joblib passes over them: to any other loader what stands there are opcodes. What is read is the array as NumPy pickles it.

Source: joblib/numpy_pickle.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_tools.pickling.reader import OPCODES, Machine
from ckpt_tools.tree.dtypes import BY_NUMPY
from ckpt_tools.tree.nodes import Build, Dict, Global, Node, Object

_RECONSTRUCT = Global("numpy.core.multiarray", "_reconstruct")
_NDARRAY, _MEMMAP = Global("numpy", "ndarray"), Global("numpy", "memmap")
_VERSION = 1  # of the state of an array
WRAPPER = "NumpyArrayWrapper"  # of joblib.numpy_pickle, which scikit-learn once had a copy of
_BESIDE = ("NDArrayWrapper", "ZNDArrayWrapper")  # of joblib before 0.10: the array is in another file
_BY_COPYREG = frozenset(Global("copyreg", name) for name in ("_reconstructor", "__newobj__", "__newobj_ex__"))
_DTYPE = Global("numpy", "dtype")
_TEXT, _HAS_OBJECTS = 4, 1  # bytes of a character; a flag of a dtype
_CODE = re.compile(r"[USV]\d{1,9}")
_SIZES = {code: known.itemsize for code, known in BY_NUMPY.items()} | {"M8": 8, "m8": 8, "f16": 16, "c32": 32}
_STATES = (8, 9)  # how long the state of a dtype is, without and with what it says of units of time
_SUBARRAY, _ITEMSIZE, _FLAGS = 2, 5, 7  # in it
_MOST = 1 << 50


class ArrayMachine(Machine):
    """A reading that passes over arrays of joblib's, as joblib does."""

    def __init__(self, *args: Any, arrays: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.arrays, self.has_arrays = arrays, False
        # The pickles around this one: an array of objects is a pickle with a memo of its own, in which joblib passes over none.
        self.outer: list[tuple[list[Node], list[list[Node]], list[Node], dict[int, Node], int]] = []

    def pass_array(self, target: Node) -> None:
        """Put the array in the place of a wrapper that has just been given its state, or go on in the pickle that it is."""
        name = _class_of(target) if self.arrays and not self.outer and type(target) is Object else ""
        if name in _BESIDE:
            self.has_arrays = True
            raise self.error("names an array of joblib's in another file, which joblib loads whatever is in it")
        if name != WRAPPER or type(target) is not Object:
            return
        self.has_arrays = True
        self._leave_frame()
        given = _given(target)
        length = _array_bytes(given, self)
        self.stack.pop()
        if length is None:
            self.outer.append((self.stack, self.marks, self.memo, self.far_memo, self.protocol))
            self.stack, self.marks, self.memo, self.far_memo = [], [], [], {}
            return
        self.position += _padding(given, self)
        data = self.data[self.position : self.position + length]
        self.places[id(data)] = (self.position, data)
        self.position += length
        cls = given.get("subclass", _NDARRAY)
        self.make(_RECONSTRUCT, (_NDARRAY if cls == _MEMMAP else cls, (0,), b"b"))
        made = self.stack[-1]
        if type(made) is Object:
            made.steps.append(Build((_VERSION, given["shape"], given["dtype"], given.get("order") == "F", data)))

    def end_pickle(self) -> None:
        """Go on in the pickle around this one."""
        if not self.outer:
            OPCODES[b"."[0]](self)
        made = self.stack.pop()
        self._leave_frame()
        self.stack, self.marks, self.memo, self.far_memo, self.protocol = self.outer.pop()
        self.stack.append(made)

    def _leave_frame(self) -> None:
        """joblib has read the whole frame at once: what does not belong to the pickle comes from behind that."""
        if self.frame > self.position:
            raise self.error("is followed by an array of joblib's in the middle of a frame")
        self.limit = self.end


def _build(machine: ArrayMachine) -> None:
    OPCODES[b"b"[0]](machine)
    machine.pass_array(machine.stack[-1])


_OWN: dict[int, Callable[[Any], None]] = {b"b"[0]: _build, b"."[0]: ArrayMachine.end_pickle}
ArrayMachine.opcodes = [_OWN.get(code, handler) for code, handler in enumerate(OPCODES)]


def _class_of(node: Object) -> str:
    """The last part of the name of an object's class."""
    made_of = node.function
    if type(made_of) is Global and made_of in _BY_COPYREG and type(node.args) is tuple and node.args:
        made_of = node.args[0]
    return made_of.name.rpartition(".")[2] if type(made_of) is Global else ""


def _array_bytes(given: Mapping[str, Node], machine: Machine) -> int | None:
    """How many bytes of the stream an array takes; None where it is a pickle of its own, as arrays of objects are."""
    size, count = _itemsize(given.get("dtype")), _count(given.get("shape"))
    if size is None or count is None:
        raise machine.error("is followed by an array of joblib's whose length cannot be told")
    if size < 0:
        return None
    length = count * size
    behind = machine.position + _padding(given, machine) + length
    if behind > machine.end:
        raise machine.short("is followed by an array that is cut off", behind)
    return length


def _padding(given: Mapping[str, Node], machine: Machine) -> int:
    """How many bytes stand before an array: where the wrapper has an alignment, one that tells how many more."""
    alignment = given.get("numpy_array_alignment_bytes")
    if alignment is None:
        return 0
    if type(alignment) is not int and type(alignment) is not bool:
        raise machine.error("is followed by an array of joblib's whose alignment is not a number")
    if machine.position >= machine.end:
        raise machine.short("is followed by an array that is cut off", machine.position + 1)
    return 1 + machine.data[machine.position]


def _given(node: Object) -> dict[str, Node]:
    """What the state of a wrapper gives it; nothing where it is set twice or in another way."""
    step = node.steps[0] if len(node.steps) == 1 else None
    state = step.state if type(step) is Build else None
    if type(state) is not Dict or not all(type(name) is str for name, _ in state.items):
        return {}
    return state.named


def _itemsize(dtype: Node) -> int | None:
    """How many bytes an element takes; -1 where it is or holds an object, None where that cannot be told."""
    if type(dtype) is not Object or dtype.call != "reduce" or dtype.function != _DTYPE or len(dtype.steps) > 1:
        return None
    code = dtype.args[0] if type(dtype.args) is tuple and dtype.args else None
    if type(code) is not str:
        return None
    is_object = code in ("O", "O8")
    size = -1 if is_object else _size(code)
    if not dtype.steps or size is None:
        return size
    step = dtype.steps[0]
    holds = _holds_objects(step.state, size, code) if type(step) is Build else None
    if holds is None or (holds is not is_object and code[0] != "V"):
        return None
    return -1 if holds else size


def _size(code: str) -> int | None:
    if _CODE.fullmatch(code):
        return int(code[1:]) * (_TEXT if code[0] == "U" else 1)
    return _SIZES.get(code)


def _holds_objects(state: Node, size: int, code: str) -> bool | None:
    """Whether a dtype with this state holds objects; None where it is not one that NumPy writes for such a code."""
    if type(state) is not tuple or len(state) not in _STATES or state[_SUBARRAY] is not None:
        return None
    itemsize, flags = state[_ITEMSIZE], state[_FLAGS]
    if type(itemsize) is not int or type(flags) is not int or (code[0] in "USV" and itemsize != size):
        return None
    return bool(flags & _HAS_OBJECTS)


def _count(shape: Node) -> int | None:
    count = 1
    for size in shape if type(shape) is tuple else (None,):
        if type(size) is not int or size < 0 or count > _MOST:
            return None
        count *= size
    return count
