"""A whole tensor of torch's in one step: what `torch.save` writes behind its rebuild function.

It takes the place of forty opcodes: a file of 20,000 tensors opens in half the time. Anything else is left to the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import Dict, Entry, Global, Node, Storage, check

REBUILD, ORDERED_DICT = Global("torch._utils", "_rebuild_tensor_v2"), Global("collections", "OrderedDict")
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


NODES = 9  # that the opcodes of a tensor would make


def tensor(data: bytes, at: int, memo: list[Any], persistent_load: Callable[[Node], Node]) -> tuple[int, Node] | None:
    """The tensor whose arguments begin here, and where it ends; None where something else stands here."""
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
