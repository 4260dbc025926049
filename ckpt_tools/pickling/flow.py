"""The stream itself, the memo, and opcodes that no checkpoint has."""

from __future__ import annotations

import re
from struct import Struct
from typing import NoReturn

from ckpt_tools import limits
from ckpt_tools.pickling import fused
from ckpt_tools.pickling.state import Opcodes, State, Stop
from ckpt_tools.pickling.values import parse_decimal
from ckpt_tools.tree.nodes import Global

opcode = Opcodes()
_U32, _U64 = Struct("<I"), Struct("<Q")


# --- the stream itself


@opcode(b"\x80")
def _proto(machine: State) -> None:
    machine.protocol = machine.data[machine.position]
    machine.position += 1
    if machine.protocol > 5:
        raise machine.error(f"says protocol {machine.protocol}; 5 is the highest")


@opcode(b"\x95", unusual="FRAME")
def _frame(machine: State) -> None:
    if machine.limit != machine.end:
        raise machine.error("opens a frame inside a frame")
    length = machine.number(_U64)
    if length > machine.end - machine.position:
        left = machine.end - machine.position
        raise machine.short(f"opens a frame of {length} bytes where {left} are left", machine.position + length)
    machine.limit = machine.frame = machine.position + length


@opcode(b".")
def _stop(machine: State) -> None:
    if machine.position < machine.frame:
        raise machine.error("is a STOP before the end of its frame")
    raise Stop(machine.stack.pop())


@opcode(b"(")
def _mark(machine: State) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []
    if len(machine.marks) > machine.most_marks:
        raise limits.DEPTH.error("The pickle is nested too deep.")


@opcode(b"0", unusual="POP")
def _pop(machine: State) -> None:
    machine.spend()
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


@opcode(b"1", unusual="POP_MARK")
def _pop_mark(machine: State) -> None:
    machine.spend()
    machine.pop_mark()


@opcode(b"2", unusual="DUP")
def _dup(machine: State) -> None:
    top = machine.stack[-1]
    machine.spend()
    machine.spend_on_sharing(top)
    machine.stack.append(top)


# --- the memo


@opcode(b"q")
def _binput(machine: State) -> None:
    machine.remember(machine.data[machine.position])
    machine.position += 1


@opcode(b"r")
def _long_binput(machine: State) -> None:
    machine.remember(machine.number(_U32))


@opcode(b"p", unusual="PUT")
def _put(machine: State) -> None:
    machine.remember(_decimal(machine))


@opcode(b"\x94", unusual="MEMOIZE")
def _memoize(machine: State) -> None:
    machine.remember(len(machine.memo) + len(machine.far_memo))


_GET = ord("h")
_MANY_GETS = re.compile(rb"(?:h.){16,4096}", re.DOTALL)


@opcode(b"h")
def _binget(machine: State) -> None:
    start, data = machine.position, machine.data
    if start + 1 < machine.limit and data[start + 1] == _GET:
        row = _MANY_GETS.match(data, start - 1, machine.limit)
        if row is not None:
            machine.position = row.end()
            machine.recall_row(row[0][1::2])
            return
    machine.recall(data[start])
    machine.position += 1
    if machine.fused and machine.stack[-1] is machine.rebuild:
        fused.tensors(machine)


@opcode(b"j")
def _long_binget(machine: State) -> None:
    machine.recall(machine.number(_U32))


@opcode(b"g", unusual="GET")
def _get(machine: State) -> None:
    machine.recall(_decimal(machine))


# --- persistent ids, and what no checkpoint has


@opcode(b"Q")
def _binpersid(machine: State) -> None:
    pid = machine.stack.pop()
    machine.stack.append(machine.persistent_load(pid))
    if type(pid) is tuple and len(pid) > 1 and type(pid[1]) is Global:
        machine.give_back()


@opcode(b"P", unusual="PERSID")
def _persid(machine: State) -> None:
    machine.stack.append(machine.persistent_load(machine.text_line()))


def _refuse(code: bytes, name: str) -> None:
    def refuse(machine: State) -> NoReturn:
        raise machine.error(f"is {name}, which no checkpoint uses: it refers to something outside the file")

    opcode.handlers[code[0]] = refuse


for _code, _name in (
    (b"\x82", "EXT1"), (b"\x83", "EXT2"), (b"\x84", "EXT4"), (b"\x97", "NEXT_BUFFER"), (b"\x98", "READONLY_BUFFER"),
):  # fmt: skip
    _refuse(_code, _name)


def _decimal(machine: State) -> int:
    return parse_decimal(machine, machine.line(), base=10)
