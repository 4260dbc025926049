"""Lists, dicts, sets and tuples, and what is put into them."""

from __future__ import annotations

from ckpt_tools.pickling.state import Opcodes, State
from ckpt_tools.tree.nodes import Dict, Global, List, Node, Object

opcode = Opcodes()


@opcode(b"]")
def _empty_list(machine: State) -> None:
    machine.spend()
    machine.stack.append(List())


@opcode(b"}")
def _empty_dict(machine: State) -> None:
    machine.spend()
    machine.stack.append(Dict())


_SET = Global("builtins", "set")


@opcode(b"\x8f")
def _empty_set(machine: State) -> None:
    elements = List()
    machine.spend()
    made = Object("reduce", _SET, (elements,))
    machine.stack.append(made)
    machine.sets[id(made)] = made, elements


@opcode(b"\x91", unusual="FROZENSET")
def _frozenset(machine: State) -> None:
    machine.make(Global("builtins", "frozenset"), (List(machine.pop_mark()),))


@opcode(b"\x90", unusual="ADDITEMS")
def _additems(machine: State) -> None:
    items = machine.pop_mark()
    if id(machine.stack[-1]) not in machine.sets:
        raise machine.error("adds items to something that is not a new set")
    _, elements = machine.sets[id(machine.stack[-1])]
    elements.items.extend(items)


@opcode(b"l", unusual="LIST")
def _list(machine: State) -> None:
    machine.spend()
    made = List(machine.pop_mark())  # before `machine.stack` is looked up: it is another one then
    machine.stack.append(made)


@opcode(b"d", unusual="DICT")
def _dict(machine: State) -> None:
    machine.spend()
    made = Dict(_pairs(machine, machine.pop_mark()))
    machine.stack.append(made)


@opcode(b"t")
def _tuple(machine: State) -> None:
    machine.spend()
    items = tuple(machine.pop_mark())
    machine.stack.append(items)


@opcode(b"\x85")
def _tuple1(machine: State) -> None:
    machine.spend()
    machine.stack[-1] = (machine.stack[-1],)


@opcode(b"\x86")
def _tuple2(machine: State) -> None:
    machine.spend()
    stack = machine.stack
    last = stack.pop()
    stack[-1] = (stack[-1], last)


@opcode(b"\x87")
def _tuple3(machine: State) -> None:
    machine.spend()
    stack = machine.stack
    third, second = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], second, third)


@opcode(b"a")
def _append(machine: State) -> None:
    item = machine.stack.pop()
    machine.spend()
    _extend(machine, [item])


@opcode(b"e")
def _appends(machine: State) -> None:
    machine.spend()
    _extend(machine, machine.pop_mark())


@opcode(b"s")
def _setitem(machine: State) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.spend()
    _set(machine, [(key, value)])


@opcode(b"u")
def _setitems(machine: State) -> None:
    machine.spend()
    _set(machine, _pairs(machine, machine.pop_mark()))


_TEXT, _SIMPLE = frozenset((str,)), frozenset((str, int, bool, float, bytes, type(None)))


def _pairs(machine: State, items: list[Node]) -> list[tuple[Node, Node]]:
    if len(items) % 2:
        raise machine.error("takes pairs, and finds an odd number of values")
    # A pair takes less than a container; one whose key is not text takes more, until all keys have been compared.
    kinds = set(map(type, items[::2]))
    machine.spend(len(items) // 4 if kinds <= _TEXT else len(items) * 3 // 8 if kinds <= _SIMPLE else len(items))
    values = iter(items)
    return list(zip(values, values, strict=True))


def _extend(machine: State, items: list[Node]) -> None:
    target = machine.stack[-1]
    if type(target) is List:
        target.items.extend(items)
    elif type(target) is Object:
        machine.unusual["APPEND to something that is not a list"] = None
        target.append(items)
    else:
        raise machine.error("appends to something that is not a list")


def _set(machine: State, pairs: list[tuple[Node, Node]]) -> None:
    target = machine.stack[-1]
    if type(target) is Dict:
        target.items.extend(pairs)
    elif type(target) is Object:
        if target.function != Global("collections", "Counter"):
            machine.unusual["SETITEM on something that is not a dict"] = None
        target.set(pairs)
    else:
        raise machine.error("sets items of something that is not a dict")
