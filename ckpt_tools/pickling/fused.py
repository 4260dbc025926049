"""The hot path: one regular expression for the 31 opcodes with which `torch.save` writes a tensor.

A checkpoint repeats the same opcodes for every tensor: `_rebuild_tensor_v2` from the memo, a persistent id, sizes, strides,
an empty OrderedDict, six memo entries and three calls. When the bytes match that shape exactly, with memo indices counting
up, this does what the opcodes would do, without dispatching each; and then the same for the key and tensor that follow, as
they do in a state dict. Anything else, also the first tensors of a file, whose memo indices are below 256, takes the general
path; a test compares the two.
"""

from __future__ import annotations

import re
from functools import cache

from ckpt_tools.pickling.state import State
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import (
    Dict,
    Entry,
    Storage,
    check,
)

_INT = rb"(?:K.|M..|J...[\0-\x7f])"
_SIZES = rb"(?:\)|(?:%b){1,3}[\x85-\x87]|\((?:%b){4,8}t)" % (_INT, _INT)


def _group(name: str, pattern: bytes) -> bytes:
    return b"(?P<%b>%b)" % (name.encode(), pattern)


def _get(name: str) -> bytes:
    """A value out of the memo, by an index of one byte."""
    return b"h" + _group(name, b".")


def _put(name: str) -> bytes:
    """A value into the memo, at an index of four bytes."""
    return b"r" + _group(f"put_{name}", b"....")


_ID = (
    rb"\(\(" + _get("word") + _get("kind") + rb"X" + _group("length", b".") + rb"\0\0\0" + _group("key", b"[0-9]{1,18}")
    + _put("key") + _get("device") + _group("numel", _INT) + rb"t" + _put("id") + rb"Q"
)  # fmt: skip
_VIEW = _group("offset", _INT) + b"".join(
    _group(name, _SIZES) + rb"(?:" + _put(name) + rb")?" for name in ("size", "stride")
)  # fmt: skip
_CALL = _group("grad", rb"[\x88\x89]") + _get("hooks") + rb"\)R" + _put("hooks") + rb"t" + _put("args") + rb"R" + _put("tensor")
_FIRST = _group("put_name", b"") + _group("rebuild", b"") + _ID + _VIEW + _CALL
_AFTER_KEY = _put("name") + _get("rebuild") + _ID + _VIEW + _CALL
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
