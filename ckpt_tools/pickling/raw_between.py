"""The raw bytes that torch reads between pickles: storages and the shapes of tensors. The next pickle stands behind them.

Source: torch/serialization.py (`_legacy_load`), torch/csrc/serialization.cpp (`readFileRaw`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ckpt_tools.errors import PickleError
from ckpt_tools.pickling.stream import WINDOW, Pickles
from ckpt_tools.pickling.torch_objects import storage_dtype
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import List, Node, Object

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_OBJECT, _KEYS = 3, 4  # which pickles of a torch-legacy stream those are, behind magic number, protocol, sys_info
_COMPUTED = "a storage or tensor is described by something that is computed"
Pid = tuple[Node, ...]


class LegacyStorages:
    """Those behind the list of keys in torch-legacy: a magic number starts a stream, or a call that may give it."""

    window = WINDOW

    def __init__(self) -> None:
        self.number, self.computed, self.pids = -1, False, dict[Node, Pid]()

    def pass_over(self, pickles: Pickles, value: Node, pids: Mapping[Node, Pid]) -> str | None:
        """Go on to the next pickle, behind one that held `value` and named storages by their keys; else why that cannot be."""
        if (type(value) is int and value == MAGIC_NUMBER) or (self.number < 0 and type(value) is Object):
            self.number, self.computed = 0, type(value) is Object
            return None
        self.number += self.number >= 0
        if self.number == _OBJECT:
            self.pids = dict(pids)
        if self.number < _KEYS:
            return None
        self.number = -1
        keys = value.items if type(value) is List else [None]
        for key in keys:
            pid = self.pids.get(key) if type(key) is str else None
            if pid is None:
                return None if self.computed else _COMPUTED
            _pass_storage(pickles, pid[1])
        return None


class TarStorages(LegacyStorages):
    """The member `storages` of a torch-tar: a count, a pickle (key, location, class) and a storage each, a list of views."""

    window = 4096

    def pass_over(self, pickles: Pickles, value: Node, pids: Mapping[Node, Pid]) -> str | None:
        """Behind a pickle of three parts a storage."""
        self.number += 1
        if self.number == 0 or (type(value) is List and all(type(part) is tuple for part in value.items)):
            return None
        record = _record(value)
        if record is None:
            return _COMPUTED
        _pass_storage(pickles, record[2])
        return None


class TarTensors(LegacyStorages):
    """The member `tensors` of a torch-tar: a count, a pickle (key, storage, class), sizes, strides and an offset each."""

    def pass_over(self, pickles: Pickles, value: Node, pids: Mapping[Node, Pid]) -> str | None:
        """Behind a pickle of three parts the sizes, the strides and the offset."""
        self.number += 1
        if self.number == 0:
            return None
        if _record(value) is None:
            return _COMPUTED
        ndim = struct.unpack("<i", pickles.take(8)[:4])[0]
        _skip(pickles, 8 * (2 * ndim + 1))
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
