"""Globals and what is made of them: calls, instances, states."""

from __future__ import annotations

from ckpt_tools.pickling.state import ORDERED_DICT, Opcodes, State
from ckpt_tools.pickling.weights_only import BUILT, NO_CLASSES, READS_AT_ONCE
from ckpt_tools.tree.nodes import Build, Call, Dict, Entry, Global, List, Node, Object

_COST_OF_STATE = 8  # in containers: whoever asks whether an object is a module looks at its state, again and again

opcode = Opcodes()


@opcode(b"c")
def _global(machine: State) -> None:
    module = machine.text_line()
    machine.name_global(module, machine.text_line())


@opcode(b"\x93", unusual="STACK_GLOBAL")
def _stack_global(machine: State) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise machine.error("names a global by something that is not text")
    machine.name_global(module, name)


@opcode(b"R")
def _reduce(machine: State) -> None:
    args = machine.stack.pop()
    if type(args) is not tuple:
        raise machine.error("calls with arguments that are not a tuple")
    machine.make(machine.stack.pop(), args)


@opcode(b"\x81")
def _newobj(machine: State) -> None:
    _new(machine, "new", machine.stack.pop(), None)


@opcode(b"\x92", unusual="NEWOBJ_EX")
def _newobj_ex(machine: State) -> None:
    kwargs = machine.stack.pop()
    if type(kwargs) is not Dict:
        raise machine.error("calls with keyword arguments that are not a dict")
    _new(machine, "new_ex", machine.stack.pop(), kwargs)


def _new(machine: State, call: Call, args: Node, kwargs: Dict | None) -> None:
    if type(args) is not tuple:
        raise machine.error("makes an object with arguments that are not a tuple")
    _push(machine, call, machine.stack.pop(), args, kwargs)


def _push(machine: State, call: Call, cls: Node, args: tuple[Node, ...], kwargs: Dict | None = None) -> None:
    """An instance made by `cls.__new__`, which makes an OrderedDict empty whatever it is given."""
    machine.spend()
    if type(cls) is not Global or cls in NO_CLASSES:
        machine.unusual["an instance of something that is not a class"] = None
    machine.stack.append(Dict(ordered=True) if cls == ORDERED_DICT else Object(call, cls, args, kwargs))
    if type(cls) is Global and cls in READS_AT_ONCE:
        machine.note_given(args)


@opcode(b"i", unusual="INST")
def _inst(machine: State) -> None:
    module = machine.text_line()
    machine.name_global(module, machine.text_line())
    _instantiate(machine, machine.stack.pop(), machine.pop_mark())


@opcode(b"o", unusual="OBJ")
def _obj(machine: State) -> None:
    items = machine.pop_mark()
    _instantiate(machine, items.pop(0), items)


def _instantiate(machine: State, cls: Node, args: list[Node]) -> None:
    """INST and OBJ: without arguments Python 3 calls `cls.__new__(cls)`, with some it calls `cls(*args)`."""
    if args:
        machine.make(cls, tuple(args))
    else:
        _push(machine, "new", cls, ())


@opcode(b"b")
def _build(machine: State) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    machine.spend(_COST_OF_STATE)
    if type(target) is Object:
        if type(target.function) is Global and target.function.module != "collections" and target.function not in BUILT:
            machine.unusual[f"BUILD of {target.function}"] = None
        machine.build(target, state)
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
