"""The raw bytes that torch reads between pickles: storages and the shapes of tensors. The next pickle stands behind them.

Source: torch/serialization.py (`_legacy_load`), torch/csrc/serialization.cpp (`readFileRaw`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Protocol

from ckpt_tools.errors import PickleError
from ckpt_tools.pickling.stream import WINDOW, Pickles
from ckpt_tools.pickling.torch_objects import storage_dtype
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import List, Node, Object

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_OBJECT, _KEYS = 3, 4  # which pickles of a torch-legacy stream those are, behind magic number, protocol, sys_info
_SMALL_WINDOW = 4096
_COMPUTED = "a storage or tensor is described by something that is computed"
Pid = tuple[Node, ...]


class Between(Protocol):
    """Passes over what is not a pickle."""

    window: int

    def pass_over(self, pickles: Pickles, value: Node, pids: Mapping[Node, Pid]) -> str | None:
        """Go on to the next pickle, behind one that held `value` and named storages by their keys; else why that cannot be."""


class LegacyStorages:
    """Those behind the list of keys in torch-legacy: a magic number starts a stream, or a call that may give it."""

    window = WINDOW

    def __init__(self) -> None:
        self.number, self.computed, self.pids = -1, False, dict[Node, Pid]()

    def pass_over(self, pickles: Pickles, value: Node, pids: Mapping[Node, Pid]) -> str | None:
        """Nothing, but behind the fifth pickle of a stream the storages that it lists."""
        if (type(value) is int and value == MAGIC_NUMBER) or (self.number < 0 and type(value) is Object):
            self.number, self.computed = 0, type(value) is Object
            return None
        self.number += self.number >= 0
        if self.number == _OBJECT:
            self.pids = dict(pids)
        if self.number < _KEYS:
            return None
        self.number = -1
        if type(value) is not List:
            return None if self.computed else _COMPUTED
        for key in value.items:
            pid = self.pids.get(key) if type(key) is str else None
            if pid is None:
                return None if self.computed else _COMPUTED
            _pass_storage(pickles, pid[1])
        return None


class TarStorages:
    """The member `storages` of a torch-tar: a count, a pickle and a storage for each, a list of views."""

    window = _SMALL_WINDOW

    def __init__(self) -> None:
        self.begun = False

    def pass_over(self, pickles: Pickles, value: Node, pids: Mapping[Node, Pid]) -> str | None:
        """Behind a pickle of key, location and class a storage."""
        if not self.begun or _is_list_of_views(value):
            self.begun = True
            return None
        record = _record(value)
        if record is None:
            return _COMPUTED
        _pass_storage(pickles, record[2])
        return None


class TarTensors:
    """The member `tensors` of a torch-tar: a count, a pickle, sizes, strides and an offset for each."""

    window = WINDOW

    def __init__(self) -> None:
        self.begun = False

    def pass_over(self, pickles: Pickles, value: Node, pids: Mapping[Node, Pid]) -> str | None:
        """Behind a pickle of key, storage and class the sizes, the strides and the offset."""
        if self.begun:
            if _record(value) is None:
                return _COMPUTED
            ndim = struct.unpack("<i", pickles.take(8)[:4])[0]
            _skip(pickles, 8 * (2 * ndim + 1))
        self.begun = True
        return None


def _pass_storage(pickles: Pickles, kind: Node) -> None:
    """A count of elements, and they. Where it cannot be meant as torch reads it, an old big-endian machine wrote it."""
    data, itemsize = pickles.take(8), (storage_dtype(kind) or UINT8).itemsize
    length = struct.unpack("<q", data)[0] * itemsize
    _skip(pickles, length if 0 <= length <= pickles.left else struct.unpack(">q", data)[0] * itemsize)


def _skip(pickles: Pickles, length: int) -> None:
    """Pass over raw bytes."""
    if not 0 <= length <= pickles.left:
        raise PickleError(f"{length} bytes are missing at offset {pickles.position}.")
    pickles.skip(length)


def _record(value: Node) -> Pid | None:
    """A tuple or list of three."""
    parts = tuple(value.items) if type(value) is List else value
    return parts if type(parts) is tuple and len(parts) == 3 else None


def _is_list_of_views(value: Node) -> bool:
    return type(value) is List and all(type(part) is tuple for part in value.items)
