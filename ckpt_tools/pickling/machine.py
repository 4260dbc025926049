"""The pickle machine: one loop over the opcodes, which makes nodes. Nothing is imported, called, or hashed as a key.

One counter: containers, objects and calls are its nodes. Numbers, texts, looks into the memo and open groups are bounded by
their own bytes, and count nothing. `strict` refuses what no checkpoint holds; a `Lister` goes on wherever Python's own would.

Source for every opcode: CPython's Lib/pickle.py, Lib/pickletools.py and Modules/_pickle.c.
"""

from __future__ import annotations

import _compat_pickle
import codecs
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, PickleError
from ckpt_tools.pickling.weights_only import ALLOWED, BUILT, NO_CLASSES, READS_AT_ONCE
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import Build, ByteString, Dict, Entry, Global, List, Node, Object, Storage, check

Maker: TypeAlias = Callable[[tuple[Node, ...]], Node]
PersistentLoad: TypeAlias = Callable[[Node], Node]
Behind: TypeAlias = "Callable[[Machine, Object, int], Node]"  # what stands behind an object in the stream

REBUILD, ORDERED_DICT = Global("torch._utils", "_rebuild_tensor_v2"), Global("collections", "OrderedDict")
RECONSTRUCTOR = Global("copyreg", "_reconstructor")
_SET, _FROZENSET, _BYTEARRAY = (Global("builtins", name) for name in ("set", "frozenset", "bytearray"))
_COUNTER = Global("collections", "Counter")
_MADE_BY_NEW = frozenset((Global("torch", "Size"), Global("torch", "device"), Global("builtins", "complex")))
_BY_TEXT = {str(name): name for name in ALLOWED}  # as torch's weights_only looks them up
_BYTE = 0xFF  # the largest place in the memo of one byte
_BYTES_MADE, _ITEMS_READ = 64, 4  # by a call, and of its arguments, that count as a node
_MOST_ARGUMENTS = 16  # more than anything takes that reads its arguments at once
_NEW_GLOBAL = 9  # nodes: each is looked up, rated and told
_MOST_FRAME = 1 << 40  # bytes; other bytes may look like a longer one

# What weights_only refuses, but for those that the loop notes itself: MEMOIZE, SHORT_BINUNICODE.
_UNUSUAL = {
    0x95: "FRAME", 0x30: "POP", 0x31: "POP_MARK", 0x32: "DUP", 0x70: "PUT", 0x67: "GET", 0x91: "FROZENSET", 0x90: "ADDITEMS",
    0x6C: "LIST", 0x64: "DICT", 0x8B: "LONG4", 0x49: "INT", 0x4C: "LONG", 0x46: "FLOAT", 0x8D: "BINUNICODE8", 0x56: "UNICODE",
    0x54: "BINSTRING", 0x53: "STRING", 0x43: "SHORT_BINBYTES", 0x42: "BINBYTES", 0x8E: "BINBYTES8", 0x96: "BYTEARRAY8",
    0x50: "PERSID", 0x93: "STACK_GLOBAL", 0x92: "NEWOBJ_EX", 0x69: "INST", 0x6F: "OBJ",
}  # fmt: skip
_OUTSIDE = {0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER"}
_U8, _U16, _U32, _I32, _U64, _F64 = (struct.Struct(code).unpack_from for code in ("<B", "<H", "<I", "<i", "<Q", ">d"))


class Malformed(Exception):  # noqa: N818  it becomes a PickleError that tells where
    """Why no reader goes on; where the position is behind the end, the pickle is cut off."""


class Machine:
    """One reading of one pickle, from `offset` in `data` on."""

    strict = True

    def __init__(
        self, data: bytes, makers: Mapping[Global, Maker], persistent_load: PersistentLoad, offset: int = 0,
        *, arrays: Behind | None = None,
    ) -> None:  # fmt: skip
        self.data, self.start, self.position, self.end = data, offset, offset, len(data)
        self.makers, self.persistent_load = makers, persistent_load
        self.arrays, self.has_arrays = arrays, False
        self.budget = limits.budget(self.end - offset)
        self.room = self.left = self.budget.room(limits.NODES)
        # lists and dicts that were read at once by a call, with their lengths then; states of objects, with what sets them
        self.given: list[tuple[List | Dict, int, Build | None]] = []
        self.protocol, self.remains = 0, False
        self.globals: dict[Global, None] = {}
        self.unusual: dict[str, None] = {}
        self.places: dict[int, tuple[int, bytes]] = {}  # of long bytes, by their ids
        self.cut, self.two_ways, self.unread = False, False, False

    def load(self) -> Node:
        if self.budget.room(limits.MEMORY) < 0:
            raise limits.MEMORY.error("The file's pickles come to far more bytes than the file has.")
        try:
            root: Node = self.run()
        except (Malformed, IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
            at, last = min(self.position, self.end), self.end - 1 if isinstance(error, IndexError) else self.end
            self.cut = self.position > last or isinstance(error, struct.error)
            told = _TOLD.get(type(error), str(error))
            raise PickleError(f"The pickle is malformed: the opcode before offset {at} {told}.") from None
        except DamagedFileError as error:
            if "offset" not in error.what:
                error.why = f"{error.why} It ends at offset {self.position} of the pickle.".strip()
            raise
        finally:  # pickles that break at their end take as long as others
            self.budget.taken[limits.MEMORY.name] += min(self.position, self.end) - self.start
            self.budget.taken[limits.NODES.name] += self.room - max(0, self.left)
        self.settle()
        return root

    # --- what opcodes share

    def _line(self, at: int) -> tuple[bytes, int]:
        stop = self.data.find(b"\n", at)
        if stop >= 0:
            return self.data[at:stop], stop + 1
        if self.strict or at >= self.end:
            raise struct.error  # it is cut off
        self.cut = True
        return self.data[at : self.end - 1], self.end  # Python's own unpickler drops the last byte, whatever it is

    def _byte_string(self, data: bytes) -> Node:
        """A Python 2 str: text when it is UTF-8 (torch.load's default encoding), else its bytes."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.left -= 1
            self.unusual["text of Python 2 that is not UTF-8"] = None
            return ByteString(data)

    def name(self, module: Node, name: Node) -> Node:
        if type(module) is not str or type(name) is not str:
            raise Malformed("names a global by something that is not text")
        taken = Global(*python3_name(module, name))
        is_renamed = self.protocol < 3 or (taken.module == "builtins" and not self.strict)
        found = taken if is_renamed else Global(module, name)
        if self.strict and _BY_TEXT.get(str(taken), found) != found:
            raise PickleError(f"The pickle names {name!r} of {module!r}: weights_only takes it for another.", why=TWO_FILES)
        self.left -= 1 if found in self.globals else _NEW_GLOBAL
        self.globals[found] = None
        return ORDERED_DICT if found == ORDERED_DICT else found  # `_tensor` compares by identity

    def note(self, does: str, what: Node, given: tuple[Node, ...]) -> Node:
        """What a reading that lists calls writes down; what a call gives where that is known."""
        return None

    def _arguments(self, function: Node, args: Node) -> tuple[Node, ...]:
        """The arguments of a call; Python's own unpickler takes a list as well, and whatever else has elements."""
        self.left -= 1
        if type(function) is not Global and type(function) is not Object:
            raise Malformed("calls a value, which cannot be called")
        if type(args) is tuple:
            return args
        if self.strict:
            raise Malformed("calls with arguments that are not a tuple")
        return tuple(args.items) if type(args) is List else (args,)

    def call(self, function: Node, args: Node) -> Node:
        """What `function(*args)` would make: by a maker where the global is known, else an inert Object."""
        given = self._arguments(function, args)
        if not self.strict and (known := self.note("runs", function, given)) is not None:
            return known
        if type(function) is Global:
            maker = self.makers.get(function)
            try:
                made = maker(given) if maker is not None else None
            except CkptError:
                if self.strict:
                    raise
                made = None  # Python may go on
            if made is not None:
                self.left -= _size(made)
                if type(made) is Entry and made.extras is not None:
                    self._note_given(given)
                return made
            if function in READS_AT_ONCE:
                self._note_given(given)
        else:
            self.unusual["call of something that is not a global"] = None
        return Object("reduce", function, given)

    def new(self, cls: Node, args: Node, kwargs: Node = None) -> Node:
        """An instance made by `cls.__new__`, which makes an OrderedDict empty whatever it is given."""
        given = self._arguments(cls, args)
        self.note("makes", cls, given if kwargs is None else (*given, kwargs))
        if type(cls) is not Global or cls in NO_CLASSES:
            self.unusual["an instance of something that is not a class"] = None
        elif cls in READS_AT_ONCE:
            self._note_given(given)
        if cls == ORDERED_DICT:
            return Dict(ordered=True)
        if self.strict and cls in _MADE_BY_NEW and type(cls) is Global and cls in self.makers:
            self.makers[cls](given)  # which refuses what `__new__` would
        return Object("new" if kwargs is None else "new_ex", cls, given, kwargs)

    def instance(self, cls: Node, *args: Node) -> Node:
        return self.call(cls, args) if args or not self.strict else self.new(cls, ())

    def build(self, target: Node, state: Node) -> Node:
        """The target, given a state, which Python reads at once."""
        self.left -= 1
        self.note("changes", target, (state,))
        if type(target) is Global:
            self.unusual["BUILD of a global"] = None
            if state is not None and (type(state) is not Dict or state.items):  # an empty one changes nothing
                target = Object("none", target, None)
                target.steps.append(Build(state))
        elif type(target) is Object:
            if type(target.function) is Global and target.function.module != "collections" and target.function not in BUILT:
                self.unusual[f"BUILD of {target.function}"] = None
            target.steps.append(step := Build(state))
            if type(state) is Dict:
                self._note_given((state,), step)
            elif type(state) is tuple and (
                (len(state) == 2 and {type(part) for part in state} <= {Dict, type(None)})  # of an object with slots
                or (type(target.function) is Global and target.function in BUILT)
            ):
                self._note_given(state)
        elif type(target) is Dict and ((target.ordered and type(state) is Dict) or not self.strict):
            if target.attributes is None:
                target.attributes = Dict()
            items = state.items if type(state) is Dict else [(None, state)]
            self.left -= len(items)  # one state can be set again and again
            target.attributes.items.extend(items)
        elif self.strict:
            raise Malformed("sets the state of something that has none")
        return target

    def change(self, opcode: str, target: Node, items: list[Node]) -> None:
        """APPEND, SETITEM or ADDITEMS on something other than a plain list or dict."""
        self.left -= 1
        self.note("changes", target, ())
        elements = target.args[0] if type(target) is Object and target.function is _SET and type(target.args) is tuple else None
        if opcode == "ADDITEMS" and type(elements) is List:
            elements.items.extend(items)
        elif self.strict and (type(target) is not Object or opcode == "ADDITEMS"):
            raise Malformed("changes the items of something that has none")
        elif type(target) is Object:
            if opcode == "APPEND" or target.function != _COUNTER:
                self.unusual[f"{opcode} on something that is not a list or dict"] = None
            target.set(pairs_of(items)) if opcode == "SETITEM" else target.append(items)

    def _note_given(self, args: tuple[Node, ...], step: Build | None = None) -> None:
        """Remember the lists and dicts in the arguments of what reads them at once: its result has nothing that comes later."""
        self.left -= len(args) // _ITEMS_READ
        for arg in args if len(args) <= _MOST_ARGUMENTS else ():
            if type(arg) is List or type(arg) is Dict:
                self.left -= 1 + len(arg.items) // _ITEMS_READ
                self.given.append((arg, len(arg.items), step))
            elif type(arg) is tuple:
                self._note_given(arg)

    def settle(self) -> None:
        """Refuse at the end what another reader takes for something else."""
        if self.two_ways or self.unread:
            self.two_ways, what = True, "holds a number that cannot be read" if self.unread else "does not keep to its frames"
            raise PickleError(f"The pickle {what}.", why=TWO_FILES)
        if not self.strict:
            return
        if self.remains:
            raise PickleError("The pickle ends with more than one value on its stack, and gives the last.")
        for node, length, step in self.given:
            if len(node.items) == length:
                continue
            if step is None or type(node) is List:
                raise PickleError("The pickle changes a list or dict after a call has read it.")
            self.left -= length
            if self.left < 0:
                raise limits.NODES.error(_TOO_MUCH)
            step.state = Dict(node.items[:length], ordered=node.ordered)  # what came later is not in a state

    # --- the loop

    def run(self) -> Any:  # noqa: C901  one loop with local variables: a function for each opcode takes twice as long
        """One pickle, from the position on; afterwards that is behind it, or where reading ended."""
        data, at, end, strict, unusual = self.data, self.position, self.end, self.strict, self.unusual
        frame, limit = 0, end + 1  # where the last frame ends, and this one
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: list[Any] = []
        far: dict[int, Any] = {}  # places beyond the next: real pickles count up
        most_marks = 2 * limits.DEPTH
        rebuild: Node = _SET  # torch's function, once it has been named: what stands behind it is read in one step
        try:
            while self.left >= 0:
                if at >= limit:
                    if at > limit:
                        if strict or at > end:
                            raise Malformed(_BEYOND)
                        self.two_ways = True
                    limit = end + 1
                op = data[at]
                at += 1
                if op == 0x71 or op == 0x72 or op == 0x94 or op == 0x70:  # BINPUT, LONG_BINPUT, MEMOIZE, PUT
                    if op == 0x71:
                        n = data[at]
                        at += 1
                    elif op == 0x72:
                        n = _U32(data, at)[0]
                        at += 4
                    elif op == 0x94:
                        unusual["opcode MEMOIZE"] = None
                        n = len(memo) + len(far)
                    else:
                        unusual["opcode PUT"] = None
                        line, at = self._line(at)
                        n = _place(line)
                    if n == len(memo):
                        memo.append(stack[-1])
                        if far:
                            far.pop(n, None)
                    elif 0 <= n < len(memo):
                        memo[n] = stack[-1]
                    elif n < 0:
                        raise Malformed("memoizes under a negative index")
                    else:
                        far[n] = stack[-1]
                        self.left -= 1
                elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                    if op == 0x68:
                        n = data[at]
                        at += 1
                    else:
                        n = _U32(data, at)[0]
                        at += 4
                    made = memo[n] if n < len(memo) else far[n]
                    stack.append(made)
                    if made is rebuild and limit > end and len(memo) > _BYTE and not far:
                        self.position = at
                        if (found := _tensor(data, at, memo, self.persistent_load)) is not None:
                            at, stack[-1] = found
                            self.left -= _NODES
                elif op == 0x4B:  # BININT1
                    stack.append(data[at])
                    at += 1
                elif op == 0x58:  # BINUNICODE
                    n = _U32(data, at)[0]
                    at += 4 + n
                    stack.append(data[at - n : at].decode("utf-8", "surrogatepass"))
                elif op == 0x28:  # MARK
                    marks.append(stack)
                    stack = []
                    if len(marks) > most_marks:
                        limits.check_depth(len(marks), "The pickle is nested too deep.", most_marks)
                elif op == 0x74:  # TUPLE
                    items, stack = stack, marks.pop()
                    stack.append(tuple(items))
                    self.left -= 1
                elif op == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                    self.left -= 1
                elif op == 0x52:  # REDUCE
                    self.position = at
                    args = stack.pop()
                    stack[-1] = self.call(stack[-1], args)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    self.left -= 1
                elif op in _CONSTANTS:  # EMPTY_TUPLE, NEWFALSE, NEWTRUE, NONE
                    stack.append(_CONSTANTS[op])
                elif op == 0x51:  # BINPERSID
                    self.position = at
                    self.left -= 1
                    stack[-1] = self.persistent_load(stack[-1])
                elif op in _NUMBERS:  # BININT2, BININT, BINFLOAT
                    read, width = _NUMBERS[op]
                    stack.append(read(data, at)[0])
                    at += width
                elif op == 0x8C:  # SHORT_BINUNICODE
                    unusual["opcode SHORT_BINUNICODE"] = None
                    n = data[at]
                    at += 1 + n
                    stack.append(data[at - n : at].decode("utf-8", "surrogatepass"))
                elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
                    self.position = at
                    if op == 0x75:
                        items, stack = stack, marks.pop()
                    else:
                        items = stack[-2:]
                        del stack[-2:]
                    target = stack[-1]
                    if type(target) is Dict:
                        target.items.extend(pairs_of(items))
                    else:
                        self.change("SETITEM", target, items)
                elif op == 0x61 or op == 0x65:  # APPEND, APPENDS
                    self.position = at
                    if op == 0x65:
                        items, stack = stack, marks.pop()
                    else:
                        items = [stack.pop()]
                    target = stack[-1]
                    if type(target) is List:
                        target.items += items
                    else:
                        self.change("APPEND", target, items)
                elif op == 0x7D:  # EMPTY_DICT
                    stack.append(Dict())
                    self.left -= 1
                elif op == 0x5D:  # EMPTY_LIST
                    stack.append(List())
                    self.left -= 1
                elif op == 0x87:  # TUPLE3
                    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
                    self.left -= 1
                elif op == 0x62:  # BUILD
                    self.position = at
                    state = stack.pop()
                    target = stack[-1] = self.build(stack[-1], state)
                    if self.arrays is not None and type(target) is Object:
                        try:
                            stack[-1] = self.arrays(self, target, frame)
                        finally:
                            if self.position != at:
                                at, limit = self.position, end + 1
                elif op == 0x81:  # NEWOBJ
                    self.position = at
                    args = stack.pop()
                    stack[-1] = self.new(stack[-1], args)
                elif op == 0x2E:  # STOP
                    if at < frame:
                        if strict:
                            raise Malformed("is a STOP before the end of its frame")
                        self.two_ways |= frame < at + _MOST_FRAME
                    root = stack.pop()
                    self.remains = bool(stack)
                    return root
                elif op == 0x80:  # PROTO
                    self.protocol = data[at]
                    at += 1
                    if strict and self.protocol > 5:
                        raise Malformed(f"says protocol {self.protocol}; 5 is the highest")
                else:
                    if op in _UNUSUAL:
                        unusual[f"opcode {_UNUSUAL[op]}"] = None
                    self.position = at
                    if op == 0x63 or op == 0x69:  # GLOBAL, INST
                        module, at = self._line(at)
                        name, at = self._line(at)
                        made = self.name(module.decode("utf-8", "surrogatepass"), name.decode("utf-8", "surrogatepass"))
                        if op == 0x69:
                            items, stack = stack, marks.pop()
                            self.position = at
                            made = self.instance(made, *items)
                        stack.append(made)
                        if made == REBUILD and strict and made in self.makers:
                            rebuild = made
                    elif op == 0x93:  # STACK_GLOBAL
                        name = stack.pop()
                        stack[-1] = self.name(stack[-1], name)
                    elif op == 0x95:  # FRAME
                        n = _U64(data, at)[0]
                        at += 8
                        if strict and limit <= end:
                            raise Malformed("opens a frame inside a frame")
                        if strict and n > end - at:
                            at += n
                            raise Malformed(_BEYOND)
                        self.two_ways |= at < frame < at + _MOST_FRAME
                        frame = at + n
                        limit = frame if frame < end else end + 1
                    elif op in _BYTES:  # LONG1, LONG4, BINBYTES, BINSTRING and those like them, of one byte, four or eight
                        read, width = _BYTES[op]
                        n = read(data, at)[0]
                        if n < 0:
                            raise Malformed(_BEYOND)
                        at += width + n
                        part = data[at - n : at]
                        if op == 0x8A or op == 0x8B:
                            stack.append(int.from_bytes(part, "little", signed=True))
                        elif op == 0x8D:  # BINUNICODE8
                            stack.append(part.decode("utf-8", "surrogatepass"))
                        elif op == 0x54 or op == 0x55:
                            stack.append(self._byte_string(part))
                        elif op == 0x96:  # BYTEARRAY8
                            stack.append(self.call(_BYTEARRAY, (part,)))
                        else:
                            if op != 0x43:
                                self.places[id(part)] = at - n, part
                            stack.append(part)
                    elif op == 0x8F:  # EMPTY_SET
                        stack.append(Object("reduce", _SET, (List(),)))
                        self.left -= 1
                    elif op in b"\x90\x91ldo":
                        items, stack = stack, marks.pop()
                        self.left -= 1
                        if op == 0x90:  # ADDITEMS
                            self.change("ADDITEMS", stack[-1], items)
                        elif op == 0x91:  # FROZENSET
                            stack.append(self.call(_FROZENSET, (List(items),)))
                        elif op == 0x6F:  # OBJ
                            stack.append(self.instance(items[0], *items[1:]))
                        else:  # LIST, DICT
                            stack.append(List(items) if op == 0x6C else Dict(pairs_of(items)))
                    elif op == 0x92:  # NEWOBJ_EX
                        kwargs, args = stack.pop(), stack.pop()
                        if strict and type(kwargs) is not Dict:
                            raise Malformed("calls with keyword arguments that are not a dict")
                        stack[-1] = self.new(stack[-1], args, kwargs)
                    elif op == 0x30 or op == 0x31:  # POP, POP_MARK
                        self.left -= 1
                        if op == 0x30 and stack:
                            stack.pop()
                        else:
                            stack = marks.pop()
                    elif op == 0x32:  # DUP
                        stack.append(stack[-1])
                        self.left -= 1
                    elif op == 0x67:  # GET
                        line, at = self._line(at)
                        n = _place(line)
                        stack.append(memo[n] if 0 <= n < len(memo) else far[n])
                    elif op == 0x50:  # PERSID
                        line, at = self._line(at)
                        self.position = at
                        self.left -= 1
                        stack.append(self.persistent_load(line.decode("utf-8", "surrogatepass")))
                    elif op in b"IFLSV":
                        line, at = self._line(at)
                        made = _value(op, line, strict=strict)
                        self.unread |= made is None
                        stack.append(self._byte_string(made) if type(made) is bytes else made)
                    elif op in _OUTSIDE:
                        if strict:
                            raise Malformed(f"is {_OUTSIDE[op]}, which no checkpoint uses: it is of something outside the file")
                        if op == 0x97:  # bytes that the program hands over
                            self.left -= 1
                            stack.append(b"")
                        elif op != 0x98:  # a global that it has given a number, by `copyreg.add_extension`
                            n = 1 << (op - 0x82)
                            at += n
                            stack.append(self.name("copyreg", f"<extension {int.from_bytes(data[at - n : at], 'little')}>"))
                    else:
                        at -= 1
                        raise PickleError(f"The pickle is malformed: offset {at} holds byte {op:#04x}, which is not an opcode.")
        finally:
            self.position = at
        raise limits.NODES.error(_TOO_MUCH)


_BYTES = {
    0x42: (_U32, 4), 0x43: (_U8, 1), 0x54: (_U32, 4), 0x55: (_U8, 1), 0x8A: (_U8, 1), 0x8B: (_I32, 4), 0x8D: (_U64, 8),
    0x8E: (_U64, 8), 0x96: (_U64, 8),
}  # fmt: skip
_NUMBERS = {0x4D: (_U16, 2), 0x4A: (_I32, 4), 0x47: (_F64, 8)}
_TOO_MUCH = "The pickle makes more objects than a checkpoint of its size can hold."
_TOLD: dict[type, str] = {
    KeyError: "reads a place in the memo that was never written",
    IndexError: "takes a value that is not there, or the stream ends without STOP",
    struct.error: "is cut off: the stream ends within it",
    UnicodeDecodeError: "holds text that is not UTF-8",
}
_CONSTANTS: dict[int, Node] = {0x29: (), 0x89: False, 0x88: True, 0x4E: None}
_BEYOND = "ends beyond its frame or the stream"


def python3_name(module: str, name: str) -> tuple[str, str]:
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def pairs_of(items: list[Node]) -> list[tuple[Node, Node]]:
    if len(items) % 2:
        raise Malformed("takes pairs, and finds an odd number of values")
    values = iter(items)
    return list(zip(values, values, strict=True))


def _place(line: bytes) -> int:
    """A place in the memo, a text that ends at a NUL."""
    try:
        return int(line.partition(b"\0")[0])
    except ValueError:
        raise Malformed("holds a whole number that cannot be read") from None


_NUMBER = re.compile(rb"\s*[+-]?\.?\d|.*\0", re.DOTALL)  # what some reader may take for one


def _value(op: int, line: bytes, *, strict: bool) -> int | float | str | bytes | None:
    """A value in a line of text, as protocol 0 writes them all; None for a number of which readers differ whether it is one."""
    try:
        if op == 0x49 or op == 0x4C:  # INT, LONG
            return line == b"01" if line in (b"00", b"01") and op == 0x49 else int(line.removesuffix(b"L"), 0)
        if op == 0x46:  # FLOAT
            return float(line)
        if op == 0x56:  # UNICODE
            return codecs.raw_unicode_escape_decode(line)[0]  # the codec by name would be imported
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise Malformed("holds a string without its quotes")
        if b"\\" not in line:
            return line[1:-1]
        with warnings.catch_warnings():  # of escapes that are none: warnings can be errors
            warnings.simplefilter("ignore")
            return codecs.escape_decode(line[1:-1])[0]
    except ValueError:
        if strict or op == 0x56 or op == 0x53 or not _NUMBER.match(line):
            raise Malformed("holds a value that cannot be read") from None
        return None


def _size(made: Node) -> int:
    if type(made) is Entry:
        return len(made.shape)
    return len(made.items) if type(made) is Dict else len(made) // _BYTES_MADE if type(made) is bytes else 0


# --- a whole tensor in one step: what `torch.save` writes behind its rebuild function

_INT = rb"(K.|M..|J...[\0-\x7f])"
_SIZES = rb"(\)|(?:%b){1,3}[\x85-\x87]|\((?:%b){4,8}t)(?:r(....))?" % ((_INT.replace(b"(", b"(?:"),) * 2)
# rebuild, then in its arguments ("storage", class, key, device, numel), offset, size, stride, False, OrderedDict()
_TENSOR = re.compile(
    rb"\(\(h(.)h(.)X(.)\0\0\0([0-9]{1,18})r(....)h(.)" + _INT + rb"tr(....)Q" + _INT + _SIZES + _SIZES
    + rb"\x89h(.)\)Rr(....)tr(....)Rr(....)", re.DOTALL,
)  # fmt: skip
# Places that count up, four bytes each and the lowest first, read as one number: the first place times ones, plus steps.
_COUNTING = [(sum(1 << 32 * i for i in range(count)), sum(i << 32 * i for i in range(count))) for count in range(8)]
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_NODES = 9  # that the opcodes of a tensor would make


def _tensor(data: bytes, at: int, memo: list[Any], persistent_load: Callable[[Node], Node]) -> tuple[int, Node] | None:
    """The tensor whose arguments begin here, and where it ends; None where something else stands here.

    It takes the place of forty opcodes: a file of 20,000 tensors opens in half the time.
    """
    found = _TENSOR.match(data, at)
    if found is None:
        return None
    (word, kind, length, key, put_key, device, numel, put_id, offset, size, put_size, stride, put_stride, ordered,
     put_hooks, put_args, put_tensor) = found.groups(b"")  # fmt: skip
    written = put_key + put_id + put_size + put_stride + put_hooks + put_args + put_tensor
    ones, steps = _COUNTING[len(written) // 4]
    shape, strides = _sizes(size), _sizes(stride)
    if length[0] != len(key) or shape is None or strides is None or memo[ordered[0]] is not ORDERED_DICT:
        return None
    if int.from_bytes(written, "little") != len(memo) * ones + steps:
        return None
    text, start = key.decode(), int.from_bytes(offset[1:], "little")
    pid = (memo[word[0]], memo[kind[0]], text, memo[device[0]], int.from_bytes(numel[1:], "little"))
    storage = persistent_load(pid)
    if type(storage) is not Storage or storage.device == "meta":
        return None
    made = Entry(storage, storage.dtype or UINT8, shape, strides, start)
    check(made)
    hooks = Dict(ordered=True)
    memo += (text, pid)
    if put_size:
        memo.append(shape)
    if put_stride:
        memo.append(strides)
    memo += (hooks, (storage, start, shape, strides, False, hooks), made)
    return found.end(), made


@lru_cache(maxsize=4096)
def _sizes(code: bytes) -> tuple[int, ...] | None:
    """The tuple that these opcodes make: models repeat few shapes."""
    items, at, end = [], int(code[0] == 0x28), len(code) - 1
    while at < end:
        width = {0x4B: 1, 0x4D: 2, 0x4A: 4}[code[at]]
        items.append(int.from_bytes(code[at + 1 : at + 1 + width], "little"))
        at += 1 + width
    return tuple(items) if len(items) == _TUPLES.get(code[-1], len(items)) else None
