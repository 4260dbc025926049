"""The pickle machine: opcodes in, nodes out. Nothing is imported, called or looked up by a name in the file.

Source for every opcode: CPython's Lib/pickle.py and Lib/pickletools.py. The stack is split at MARK as there, so that
popping below a mark is an underflow. One dispatch table; no recursion; every length is checked against the bytes left.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, NoReturn, TypeAlias

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, PickleError
from ckpt_tools.pickling import fused
from ckpt_tools.pickling.state import COST_OF_BYTE_STRING, COST_OF_BYTES, State
from ckpt_tools.pickling.weights_only import BUILT
from ckpt_tools.tree.nodes import (
    Build,
    ByteString,
    Call,
    Dict,
    Entry,
    Global,
    List,
    Node,
    Object,
)

_U32, _U64, _I32 = Struct("<I"), Struct("<Q"), Struct("<i")


class Machine(State):
    """One reading of one pickle stream: runs its opcodes.

    Attributes:
        opcodes: what each byte does; `calls.Lister` has a table of its own.
    """

    opcodes: Sequence[Callable[[Any], None]]  # set where the table is

    def load(self) -> Node:
        """Run to STOP and return the object.

        Raises:
            PickleError: malformed, with the offset. LimitError: the node budget or the depth is used up.
        """
        if self.shared.room(limits.PICKLES) < 0:
            raise limits.PICKLES.error(
                "The file's pickles come to far more bytes than the file has, or are read again and again."
            )
        try:
            return self._run()
        except Stop as stop:
            return stop.value
        except IndexError:
            self.cut = self.position >= self.end
            raise self.error("takes a value that is not there, or the stream ends without STOP") from None
        except struct.error:
            self.cut = True
            raise self.error("is cut off: the stream ends within it") from None
        except DamagedFileError as error:
            if "offset" not in error.what:
                error.why = f"{error.why} It ends at offset {self.position} of the pickle.".strip()
            raise
        finally:  # pickles that break at their end take as long as others
            self.shared.containers = min(self.shared.containers, max(0, self.budget))
            self.shared.note(limits.PICKLES, min(self.position, self.end) - self.start)

    def _run(self) -> NoReturn:
        """The hot loop; a `Stop` ends it."""
        data, opcodes = self.data, self.opcodes
        while True:
            while self.position < self.limit:
                opcode = data[self.position]
                self.position += 1
                opcodes[opcode](self)
            if self.position > self.limit or self.limit == self.end:
                raise self.short("ends beyond its frame or the stream")
            self.limit = self.end


class Stop(Exception):  # noqa: N818  not an error: how the loop ends
    def __init__(self, value: Node) -> None:
        self.value = value


def _unsupported(machine: Machine) -> NoReturn:
    machine.position -= 1
    code = machine.data[machine.position]
    raise PickleError(f"The pickle is malformed: offset {machine.position} holds byte {code:#04x}, which is not an opcode.")


OPCODES: list[Callable[[Machine], None]] = [_unsupported] * 256
Machine.opcodes = OPCODES
_Handler: TypeAlias = Callable[[Machine], None]


def _opcode(code: bytes, *, unusual: str = "") -> Callable[[_Handler], _Handler]:
    """Enter a handler in the dispatch table; `unusual` names an opcode that weights_only refuses."""

    def enter(handler: _Handler) -> _Handler:
        def noting(machine: Machine) -> None:
            machine.unusual[f"opcode {unusual}"] = None
            handler(machine)

        OPCODES[code[0]] = noting if unusual else handler
        return handler

    return enter


# --- the stream itself


@_opcode(b"\x80")
def _proto(machine: Machine) -> None:
    machine.protocol = machine.data[machine.position]
    machine.position += 1
    if machine.protocol > 5:
        raise machine.error(f"says protocol {machine.protocol}; 5 is the highest")


@_opcode(b"\x95", unusual="FRAME")
def _frame(machine: Machine) -> None:
    if machine.limit != machine.end:
        raise machine.error("opens a frame inside a frame")
    length = machine.number(_U64)
    if length > machine.end - machine.position:
        left = machine.end - machine.position
        raise machine.short(f"opens a frame of {length} bytes where {left} are left", machine.position + length)
    machine.limit = machine.position + length


@_opcode(b".")
def _stop(machine: Machine) -> None:
    raise Stop(machine.stack.pop())


@_opcode(b"(")
def _mark(machine: Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []
    if len(machine.marks) > machine.most_marks:
        raise limits.DEPTH.error("The pickle is nested too deep.")


@_opcode(b"0", unusual="POP")
def _pop(machine: Machine) -> None:
    machine.spend()
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


@_opcode(b"1", unusual="POP_MARK")
def _pop_mark(machine: Machine) -> None:
    machine.spend()
    machine.pop_mark()


@_opcode(b"2", unusual="DUP")
def _dup(machine: Machine) -> None:
    top = machine.stack[-1]
    machine.spend()
    machine.spend_on_sharing(top)
    machine.stack.append(top)


# --- the memo


@_opcode(b"q")
def _binput(machine: Machine) -> None:
    machine.remember(machine.data[machine.position])
    machine.position += 1


@_opcode(b"r")
def _long_binput(machine: Machine) -> None:
    machine.remember(machine.number(_U32))


@_opcode(b"p", unusual="PUT")
def _put(machine: Machine) -> None:
    machine.remember(_decimal(machine))


@_opcode(b"\x94", unusual="MEMOIZE")
def _memoize(machine: Machine) -> None:
    machine.remember(len(machine.memo) + len(machine.far_memo))


@_opcode(b"h")
def _binget(machine: Machine) -> None:
    machine.recall(machine.data[machine.position])
    machine.position += 1
    if machine.fused and machine.stack[-1] is machine.rebuild:
        fused.tensors(machine)


@_opcode(b"j")
def _long_binget(machine: Machine) -> None:
    machine.recall(machine.number(_U32))


@_opcode(b"g", unusual="GET")
def _get(machine: Machine) -> None:
    machine.recall(_decimal(machine))


# --- plain values


_CONSTANTS: dict[int, Node] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_MANY_CONSTANTS = re.compile(rb"[N\x88\x89)]{16,}")


def _constant(machine: Machine) -> None:
    """None, True, False or an empty tuple; a row of them at once: a byte each, nothing is cheaper for a file."""
    start = machine.position - 1
    row = _MANY_CONSTANTS.match(machine.data, start, machine.limit)
    if row is None:
        machine.stack.append(_CONSTANTS[machine.data[start]])
    else:
        machine.stack.extend(map(_CONSTANTS.__getitem__, row[0]))
        machine.position = row.end()


for _constant_code in _CONSTANTS:
    OPCODES[_constant_code] = _constant


def _numbers(code: str, form: str) -> None:
    """An opcode with a number of a fixed width behind it; where many follow one another, all of them at once."""
    single, many = Struct(form), Struct(f"{form[0]}x{form[1]}")
    width, byte = single.size, ord(code)
    row_of_them = re.compile(rb"(?:%b.{%d}){16,4096}" % (code.encode(), width), re.DOTALL)  # more would take memory

    def push(machine: Machine) -> None:
        start = machine.position
        if machine.data[start + width : start + width + 1] == code.encode():
            row = row_of_them.match(machine.data, start - 1, machine.limit)
            if row is not None:
                machine.stack.extend([number for (number,) in many.iter_unpack(row[0])])
                machine.position = row.end()
                return
        machine.stack.append(machine.number(single))

    OPCODES[byte] = push


for _code_and_form in (("K", "<B"), ("M", "<H"), ("J", "<i"), ("G", ">d")):
    _numbers(*_code_and_form)


@_opcode(b"\x8a")
def _long1(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(_U8)), "little", signed=True))


@_opcode(b"\x8b", unusual="LONG4")
def _long4(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(_I32)), "little", signed=True))


@_opcode(b"I", unusual="INT")
def _int(machine: Machine) -> None:
    line = machine.line()
    machine.stack.append(line == b"01" if line in (b"00", b"01") else _parse_decimal(machine, line))


@_opcode(b"L", unusual="LONG")
def _long(machine: Machine) -> None:
    machine.stack.append(_parse_decimal(machine, machine.line().removesuffix(b"L")))


@_opcode(b"F", unusual="FLOAT")
def _float(machine: Machine) -> None:
    try:
        machine.stack.append(float(machine.line()))
    except ValueError:
        raise machine.error("holds a float that cannot be read") from None


@_opcode(b"X")
def _binunicode(machine: Machine) -> None:
    machine.stack.append(machine.text(machine.take(machine.number(_U32))))


@_opcode(b"\x8c", unusual="SHORT_BINUNICODE")
def _short_binunicode(machine: Machine) -> None:
    machine.stack.append(machine.text(machine.take(machine.number(_U8))))


@_opcode(b"\x8d", unusual="BINUNICODE8")
def _binunicode8(machine: Machine) -> None:
    machine.stack.append(machine.text(machine.take(machine.number(_U64))))


@_opcode(b"V", unusual="UNICODE")
def _unicode(machine: Machine) -> None:
    try:
        machine.stack.append(codecs.raw_unicode_escape_decode(machine.line())[0])  # the codec by name would be imported
    except UnicodeDecodeError:
        raise machine.error("holds text that cannot be read") from None


def _push_byte_string(machine: Machine, data: bytes) -> None:
    """Push a Python 2 str: text when it is UTF-8 (torch.load's default encoding), else its bytes."""
    try:
        machine.stack.append(data.decode("utf-8"))
    except UnicodeDecodeError:
        machine.spend(COST_OF_BYTE_STRING)
        machine.stack.append(ByteString(data))


@_opcode(b"U")
def _short_binstring(machine: Machine) -> None:
    _push_byte_string(machine, machine.take(machine.number(_U8)))


@_opcode(b"T", unusual="BINSTRING")
def _binstring(machine: Machine) -> None:
    _push_byte_string(machine, machine.take(machine.number(_I32)))


@_opcode(b"S", unusual="STRING")
def _string(machine: Machine) -> None:
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise machine.error("holds a string without its quotes")
    try:
        _push_byte_string(machine, _unescape(line[1:-1]))
    except ValueError:
        raise machine.error("holds a string with a bad escape") from None


_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(.)?)", re.DOTALL)
_UNITS = re.compile(rb"(?:[^\\]++|\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|.|\Z)){1,10000}", re.DOTALL)
_KNOWN_ESCAPES: dict[bytes, bytes] = {}  # a few hundred at most: they have four bytes at most, and most of those are alike
_ESCAPED = {b"\n": b"", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def _unescape(data: bytes) -> bytes:
    """A Python bytes literal's inside. Our own: `codecs.escape_decode` warns, and warnings can be errors."""
    # some thousand escapes at a time: `re.sub` keeps a list of all its pieces
    return b"".join([_ESCAPE.sub(_unescape_one, units[0]) for units in _UNITS.finditer(data)])


def _unescape_one(found: re.Match[bytes]) -> bytes:
    known = _KNOWN_ESCAPES.get(found[0])
    if known is None:
        known = _KNOWN_ESCAPES[found[0]] = _unescape_new(found)
    return known


def _unescape_new(found: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = found.groups()
    if octal is not None:
        return bytes((int(octal, 8) & 0xFF,))
    if hexadecimal is not None:
        return bytes.fromhex(hexadecimal.decode())
    if other is None or other == b"x":
        raise ValueError("an escape that ends early")
    return _ESCAPED.get(other, other if other in b"\\'\"" else b"\\" + other)


@_opcode(b"C", unusual="SHORT_BINBYTES")
def _short_binbytes(machine: Machine) -> None:
    machine.spend(COST_OF_BYTES)
    start = machine.position + 1
    end = start + machine.data[start - 1] if start <= machine.limit else start
    if end > machine.limit or start > machine.limit:
        machine.take(machine.number(_U8))
    machine.position = end
    machine.stack.append(machine.data[start:end])


@_opcode(b"B", unusual="BINBYTES")
def _binbytes(machine: Machine) -> None:
    _long_bytes(machine, machine.number(_U32))


@_opcode(b"\x8e", unusual="BINBYTES8")
def _binbytes8(machine: Machine) -> None:
    _long_bytes(machine, machine.number(_U64))


def _long_bytes(machine: Machine, length: int) -> None:
    machine.spend(COST_OF_BYTES)
    start, data = machine.position, machine.take(length)
    machine.places[id(data)] = (start, data)
    machine.stack.append(data)


@_opcode(b"\x96", unusual="BYTEARRAY8")
def _bytearray8(machine: Machine) -> None:
    machine.make(Global("builtins", "bytearray"), (machine.take(machine.number(_U64)),))


# --- containers


@_opcode(b"]")
def _empty_list(machine: Machine) -> None:
    machine.spend()
    machine.stack.append(List())


@_opcode(b"}")
def _empty_dict(machine: Machine) -> None:
    machine.spend()
    machine.stack.append(Dict())


_SET = Global("builtins", "set")


@_opcode(b"\x8f", unusual="EMPTY_SET")
def _empty_set(machine: Machine) -> None:
    elements = List()
    machine.make(_SET, (elements,))
    machine.sets[id(machine.stack[-1])] = machine.stack[-1], elements


@_opcode(b"\x91", unusual="FROZENSET")
def _frozenset(machine: Machine) -> None:
    machine.make(Global("builtins", "frozenset"), (List(machine.pop_mark()),))


@_opcode(b"\x90", unusual="ADDITEMS")
def _additems(machine: Machine) -> None:
    items = machine.pop_mark()
    if id(machine.stack[-1]) not in machine.sets:
        raise machine.error("adds items to something that is not a new set")
    _, elements = machine.sets[id(machine.stack[-1])]
    elements.items.extend(items)


@_opcode(b"l", unusual="LIST")
def _list(machine: Machine) -> None:
    machine.spend()
    made = List(machine.pop_mark())  # before `machine.stack` is looked up: it is another one then
    machine.stack.append(made)


@_opcode(b"d", unusual="DICT")
def _dict(machine: Machine) -> None:
    machine.spend()
    made = Dict(_pairs(machine, machine.pop_mark()))
    machine.stack.append(made)


@_opcode(b"t")
def _tuple(machine: Machine) -> None:
    machine.spend()
    items = tuple(machine.pop_mark())
    machine.stack.append(items)


@_opcode(b"\x85")
def _tuple1(machine: Machine) -> None:
    machine.spend()
    machine.stack[-1] = (machine.stack[-1],)


@_opcode(b"\x86")
def _tuple2(machine: Machine) -> None:
    machine.spend()
    stack = machine.stack
    last = stack.pop()
    stack[-1] = (stack[-1], last)


@_opcode(b"\x87")
def _tuple3(machine: Machine) -> None:
    machine.spend()
    stack = machine.stack
    third, second = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], second, third)


@_opcode(b"a")
def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    machine.spend()
    _extend(machine, [item])


@_opcode(b"e")
def _appends(machine: Machine) -> None:
    machine.spend()
    _extend(machine, machine.pop_mark())


@_opcode(b"s")
def _setitem(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.spend()
    _set(machine, [(key, value)])


@_opcode(b"u")
def _setitems(machine: Machine) -> None:
    machine.spend()
    _set(machine, _pairs(machine, machine.pop_mark()))


_TEXT = frozenset((str,))


def _pairs(machine: Machine, items: list[Node]) -> list[tuple[Node, Node]]:
    if len(items) % 2:
        raise machine.error("takes pairs, and finds an odd number of values")
    # A pair takes less than a container; one whose key is not text takes more, until all keys have been compared.
    machine.spend(len(items) // 4 if _TEXT.issuperset(map(type, items[::2])) else len(items) * 3 // 8)
    values = iter(items)
    return list(zip(values, values, strict=True))


def _extend(machine: Machine, items: list[Node]) -> None:
    target = machine.stack[-1]
    if type(target) is List:
        target.items.extend(items)
    elif type(target) is Object:
        machine.unusual["APPEND to something that is not a list"] = None
        target.append(items)
    else:
        raise machine.error("appends to something that is not a list")


def _set(machine: Machine, pairs: list[tuple[Node, Node]]) -> None:
    target = machine.stack[-1]
    if type(target) is Dict:
        target.items.extend(pairs)
    elif type(target) is Object:
        if target.function != Global("collections", "Counter"):
            machine.unusual["SETITEM on something that is not a dict"] = None
        target.set(pairs)
    else:
        raise machine.error("sets items of something that is not a dict")


# --- globals and objects


@_opcode(b"c")
def _global(machine: Machine) -> None:
    module = machine.text_line()
    machine.name_global(module, machine.text_line())


@_opcode(b"\x93", unusual="STACK_GLOBAL")
def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise machine.error("names a global by something that is not text")
    machine.name_global(module, name)


@_opcode(b"R")
def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    if type(args) is not tuple:
        raise machine.error("calls with arguments that are not a tuple")
    machine.make(machine.stack.pop(), args)


@_opcode(b"\x81")
def _newobj(machine: Machine) -> None:
    _new(machine, "new", machine.stack.pop(), None)


@_opcode(b"\x92", unusual="NEWOBJ_EX")
def _newobj_ex(machine: Machine) -> None:
    kwargs = machine.stack.pop()
    if type(kwargs) is not Dict:
        raise machine.error("calls with keyword arguments that are not a dict")
    _new(machine, "new_ex", machine.stack.pop(), kwargs)


def _new(machine: Machine, call: Call, args: Node, kwargs: Dict | None) -> None:
    if type(args) is not tuple:
        raise machine.error("makes an object with arguments that are not a tuple")
    machine.spend()
    machine.stack.append(Object(call, machine.stack.pop(), args, kwargs))


@_opcode(b"i", unusual="INST")
def _inst(machine: Machine) -> None:
    module = machine.text_line()
    machine.name_global(module, machine.text_line())
    _instantiate(machine, machine.stack.pop(), machine.pop_mark())


@_opcode(b"o", unusual="OBJ")
def _obj(machine: Machine) -> None:
    items = machine.pop_mark()
    _instantiate(machine, items.pop(0), items)


def _instantiate(machine: Machine, cls: Node, args: list[Node]) -> None:
    """INST and OBJ: without arguments Python 3 calls `cls.__new__(cls)`, with some it calls `cls(*args)`."""
    if args:
        machine.make(cls, tuple(args))
    else:
        machine.spend()
        machine.stack.append(Object("new", cls, ()))


@_opcode(b"b")
def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    machine.spend()
    if type(target) is Object:
        if type(target.function) is Global and target.function.module != "collections" and target.function not in BUILT:
            machine.unusual[f"BUILD of {target.function}"] = None
        target.steps.append(Build(state))
    elif type(target) is Dict and target.ordered and type(state) is Dict:
        if target.attributes is None:
            target.attributes = Dict()
        machine.spend(len(state.items))  # one state can be set again and again
        target.attributes.items.extend(state.items)
    elif type(target) is Global:
        machine.unusual["BUILD of a global"] = None
        machine.spend()
        machine.stack[-1] = built = Object("none", target, None)
        built.steps.append(Build(state))
    else:
        raise machine.error(f"sets the state of a {_kind(target)}, which has none")


def _kind(node: Node) -> str:
    return {Dict: "dict", List: "list", Entry: "tensor"}.get(type(node), type(node).__name__)


# --- persistent ids, and what no checkpoint has


@_opcode(b"Q")
def _binpersid(machine: Machine) -> None:
    machine.stack.append(machine.persistent_load(machine.stack.pop()))


@_opcode(b"P", unusual="PERSID")
def _persid(machine: Machine) -> None:
    machine.stack.append(machine.persistent_load(machine.text_line()))


def _refuse(code: bytes, name: str) -> None:
    def refuse(machine: Machine) -> NoReturn:
        raise machine.error(f"is {name}, which no checkpoint uses: it refers to something outside the file")

    OPCODES[code[0]] = refuse


for _code, _name in (
    (b"\x82", "EXT1"), (b"\x83", "EXT2"), (b"\x84", "EXT4"), (b"\x97", "NEXT_BUFFER"), (b"\x98", "READONLY_BUFFER"),
):  # fmt: skip
    _refuse(_code, _name)


_U8 = Struct("<B")


def _decimal(machine: Machine) -> int:
    return _parse_decimal(machine, machine.line(), base=10)


def _parse_decimal(machine: Machine, line: bytes, base: int = 0) -> int:
    """A decimal number; longer ones than Python converts by default (4300 digits) are refused: they take n² time."""
    try:
        return int(line, base)
    except ValueError:
        raise machine.error("holds a whole number that cannot be read") from None
