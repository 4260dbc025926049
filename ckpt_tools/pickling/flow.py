"""The stream itself, the memo, and opcodes that no checkpoint has."""

from __future__ import annotations

import re
from functools import cache
from struct import Struct
from typing import NoReturn

from ckpt_tools import limits
from ckpt_tools.pickling.state import Opcodes, State, Stop
from ckpt_tools.pickling.values import parse_decimal
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import Dict, Entry, Global, Storage, check

# --- the hot path


_INT = rb"(?:K.|M..|J...[\0-\x7f])"
_SIZES = rb"(?:\)|(?:%b){1,3}[\x85-\x87]|\((?:%b){4,8}t)" % (_INT, _INT)


def _group(name: str, pattern: bytes) -> bytes:
    return b"(?P<%b>%b)" % (name.encode(), pattern)


def _got(name: str) -> bytes:
    """A value out of the memo, by an index of one byte."""
    return b"h" + _group(name, b".")


def _kept(name: str) -> bytes:
    """A value into the memo, at an index of four bytes."""
    return b"r" + _group(f"put_{name}", b"....")


_ID = (
    rb"\(\(" + _got("word") + _got("kind") + rb"X" + _group("length", b".") + rb"\0\0\0" + _group("key", b"[0-9]{1,18}")
    + _kept("key") + _got("device") + _group("numel", _INT) + rb"t" + _kept("id") + rb"Q"
)  # fmt: skip
_VIEW = _group("offset", _INT) + b"".join(
    _group(name, _SIZES) + rb"(?:" + _kept(name) + rb")?" for name in ("size", "stride")
)  # fmt: skip
_CALL = (
    _group("grad", rb"[\x88\x89]") + _got("hooks") + rb"\)R" + _kept("hooks") + rb"t" + _kept("args") + rb"R" + _kept("tensor")
)
_FIRST = _group("put_name", b"") + _group("rebuild", b"") + _ID + _VIEW + _CALL
_AFTER_KEY = _kept("name") + _got("rebuild") + _ID + _VIEW + _CALL
_compiled = cache(re.compile)  # when there is something to match: a file of few tensors has nothing
# Indices that count up, four bytes each and the lowest first, read as one number: the first index times ones, plus steps.
_COUNTING = [(sum(1 << 32 * i for i in range(count)), sum(i << 32 * i for i in range(count))) for count in range(9)]
_BYTE = 0xFF  # the largest index of one byte
_TUPLE_OPCODES = {0x85: 1, 0x86: 2, 0x87: 3}


def tensors(machine: State) -> None:
    """Do what is left of a tensor after its rebuild function was recalled, and all of the keys and tensors behind it."""
    data, stack, limit = machine.data, machine.stack, machine.limit
    if len(machine.memo) <= _BYTE:
        return
    found = _compiled(_FIRST, re.DOTALL).match(data, machine.position, limit)
    if found is None or machine.far_memo or not _tensor(machine, found, ""):
        return
    machine.give_back()  # for the rebuild function
    after_key = _compiled(_AFTER_KEY, re.DOTALL)
    while data[machine.position : machine.position + 1] == b"X":
        start = machine.position + 5
        end = start + int.from_bytes(data[start - 4 : start], "little")
        found = after_key.match(data, end, limit)
        if found is None or machine.memo[found["rebuild"][0]] is not machine.rebuild:
            return
        key = machine.text(data[start:end])
        stack += (key, machine.rebuild)
        if not _tensor(machine, found, key):
            del stack[-2:]
            return


def _tensor(machine: State, found: re.Match[bytes], name: str) -> bool:
    """Put the tensor that was matched in the place of its rebuild function; False when it is not as it looked."""
    # all groups at once, in their order: asking for each by its name takes longer than the rest
    (put_name, _, word, kind, length, key, put_key, device, numel, put_id, offset, size, put_size, stride, put_stride,
     grad, hooks, put_hooks, put_args, put_tensor) = found.groups(b"")  # fmt: skip
    memo, sizes = machine.memo, machine.sizes
    puts = put_name + put_key + put_id + put_size + put_stride + put_hooks + put_args + put_tensor
    ones, steps = _COUNTING[len(puts) // 4]
    if int.from_bytes(puts, "little") != len(memo) * ones + steps:
        return False
    shape = sizes[size] if size in sizes else _sizes(machine, size)
    strides = sizes[stride] if stride in sizes else _sizes(machine, stride)
    if length[0] != len(key) or memo[hooks[0]] is not machine.ordered_dict or shape is None or strides is None:
        return False
    text = key.decode()
    pid = (memo[word[0]], memo[kind[0]], text, memo[device[0]], int.from_bytes(numel[1:], "little"))
    storage = machine.persistent_load(pid)
    if type(storage) is not Storage:
        return False
    no_hooks = Dict(ordered=True)
    args = (storage, int.from_bytes(offset[1:], "little"), shape, strides, grad == b"\x88", no_hooks)
    machine.spend(5 + bool(shape) + bool(strides))  # as the opcodes would, one by one
    machine.spend_lightly(5 + bool(put_name))
    made = Entry(storage, storage.dtype or UINT8, shape, strides, args[1], args[4])
    check(made)
    if put_name:
        memo.append(name)
    memo += (text, pid)
    if put_size:
        memo.append(shape)
    if put_stride:
        memo.append(strides)
    memo += (no_hooks, args, made)
    machine.stack[-1] = made
    machine.position = found.end()
    return True


def _sizes(machine: State, code: bytes) -> tuple[int, ...] | None:
    """The tuple that these opcodes make, kept: models repeat few shapes."""
    items, at, end = [], int(code[0] == 0x28), len(code) - 1
    while at < end:
        width = {0x4B: 1, 0x4D: 2, 0x4A: 4}[code[at]]
        items.append(int.from_bytes(code[at + 1 : at + 1 + width], "little"))
        at += 1 + width
    if len(items) != _TUPLE_OPCODES.get(code[-1], len(items)):
        return None
    known = machine.sizes[code] = tuple(items)
    return known


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
    limits.check_depth(len(machine.marks), "The pickle is nested too deep.", 2 * limits.DEPTH)


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
        tensors(machine)


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
