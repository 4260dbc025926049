"""Live Python data and tensors from a tree."""

from __future__ import annotations

import collections
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt_tools.errors import CkptError, ObjectsError, TensorError, UsageError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import is_tensor
from ckpt_tools.io.content import Range, read_into
from ckpt_tools.io.source import Source
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Object, Storage
from ckpt_tools.values.numeric import torch_dtype

# What Python and torch raise where data cannot be made: of a key without a hash, an attribute that cannot be set, a dtype.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError, AssertionError)
MapLocation = str | torch.device | Mapping[str, str] | None


class Builder:
    """Live Python data from a tree, without recursion: containers are made first and filled later."""

    def __init__(self, checkpoint: Checkpoint, map_location: MapLocation, *, mapped: bool = False) -> None:
        if not isinstance(map_location, str | torch.device | Mapping | None):  # torch.load also takes a function
            raise UsageError(
                f"map_location is a {type(map_location).__name__}.",
                fix='Give a device ("cpu", "cuda:1"), a mapping from device tag to device, or None for the file\'s own tags.',
            )
        self.path = checkpoint.path
        self.map_location = map_location
        self.maps: dict[int, mmap.mmap | None] | None = {} if mapped else None
        self.devices: dict[str, torch.device] = {}
        self.made: dict[int, Any] = {}
        self.pending: list[Dict | List | Entry] = []

    def build(self, root: Node) -> Any:
        try:
            return self._build(root)
        except _REFUSALS as error:
            if isinstance(error, CkptError):
                raise
            why = str(error).strip().partition("\n")[0]
            raise TensorError(
                f"{self.path} holds something that cannot be made.", why=f"{type(error).__name__}: {why}"
            ) from None

    def _build(self, root: Node) -> Any:
        result = self.value(root)
        while self.pending:
            node = self.pending.pop()
            made = self.made[id(node)]
            if type(node) is List:
                made.extend(self.value(item) for item in node.items)
                continue
            if type(node) is Dict:
                made.update((self.value(key), self.value(value)) for key, value in node.items)
            attributes = node.attributes if type(node) is Dict else node.extras and node.extras.state
            for name, value in attributes.named.items() if type(attributes) is Dict else ():
                setattr(made, name, self.value(value))
        return result

    def value(self, node: Node) -> Any:
        if type(node) is tuple:
            return self.tuple(node)
        if type(node) not in (Dict, List, Entry, Object, Global, Storage):
            return node
        if id(node) not in self.made:
            self.made[id(node)] = self.make(node)
        return self.made[id(node)]

    def tuple(self, root: tuple[Node, ...]) -> Any:
        stack = [root]
        while stack:
            waiting = [part for part in stack[-1] if type(part) is tuple and id(part) not in self.made]
            if waiting:
                stack.extend(waiting)
                continue
            node = stack.pop()
            self.made[id(node)] = tuple(self.made[id(part)] if type(part) is tuple else self.value(part) for part in node)
        return self.made[id(root)]

    def make(self, node: Node) -> Any:
        if type(node) is Dict:
            self.pending.append(node)
            return collections.OrderedDict() if node.ordered else {}
        if type(node) is List:
            self.pending.append(node)
            return []
        if type(node) is Entry:
            if node.extras is not None and node.extras.state is not None:
                self.pending.append(node)
            return self.tensor(node)
        if type(node) is Storage:
            return self.storage(node)
        if type(node) is Global and node.module == "torch" and node.name in DTYPES:
            return torch_dtype(DTYPES[node.name])
        return self.object(node)

    def object(self, node: Node) -> Any:
        """One of the few known objects that stay objects when made plain."""
        make = _OBJECTS.get(node.name) if type(node) is Object else None
        if type(node) is not Object or make is None or type(node.args) is not tuple or node.steps:
            what = "a sparse, quantised, nested or meta tensor" if is_tensor(node) else getattr(node, "name", "a global")
            raise ObjectsError(f"{self.path} holds {what}, which cannot be made without torch.load.")
        return make(*map(self.given, node.args))

    def given(self, node: Node) -> Any:
        """An argument of a call, which has to be filled when that is made."""
        if type(node) is Dict:
            return {self.value(key): self.value(value) for key, value in node.items}
        return list(map(self.value, node.items)) if type(node) is List else self.value(node)

    def tensor(self, entry: Entry) -> torch.Tensor:
        storage = self.value(entry.storage)
        tensor = torch.empty(0, dtype=torch_dtype(entry.dtype), device=storage.device)
        tensor.set_(storage, entry.offset, entry.shape, entry.stride)
        bits = entry.lazy_bits
        tensor = tensor.conj() if "conj" in bits else tensor
        tensor = torch._neg_view(tensor) if "neg" in bits else tensor
        if entry.kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
        return tensor.requires_grad_(entry.requires_grad)

    def storage(self, storage: Storage) -> torch.UntypedStorage:
        device = self.device(storage.device or "cpu")
        if device.type == "meta":
            return torch.UntypedStorage(storage.nbytes, device="meta")
        mapped = None if self.maps is None else self.mapped(storage, self.maps)
        made = _read(storage) if mapped is None else mapped
        return made if device.type == "cpu" else made.to(device=device)

    @staticmethod
    def mapped(storage: Storage, maps: dict[int, mmap.mmap | None]) -> torch.UntypedStorage | None:
        """The mapped bytes of a storage, each file once and privately: what is written to a tensor stays in this process.

        None where they are not in the file as they are, not aligned, or cannot be mapped.
        """
        content, align = storage.content, storage.dtype.itemsize if storage.dtype is not None else _ALIGN
        if not isinstance(content, Range) or not content.length or content.offset % (align or 1):
            return None
        source = content.source
        if id(source) not in maps:
            maps[id(source)] = _map(source) if len(maps) < _MAPS else None
        file = maps[id(source)]
        if file is None or content.offset + content.length > len(file):
            return None
        return torch.frombuffer(file, dtype=torch.uint8, offset=content.offset, count=content.length).untyped_storage()

    def device(self, tag: str) -> torch.device:
        if tag not in self.devices:
            if isinstance(self.map_location, Mapping):
                wanted: str | torch.device = self.map_location.get(tag, tag)
            else:
                wanted = tag if self.map_location is None else self.map_location
            try:
                self.devices[tag] = torch.device(wanted)
                torch.empty(0, device=wanted)
            except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{self.path} has tensors tagged {tag!r}, which cannot be placed on {str(wanted)!r} here.",
                    why=str(error).splitlines()[0], fix="Choose another device with map_location.",
                ) from None  # fmt: skip
        return self.devices[tag]


def _read(storage: Storage) -> torch.UntypedStorage:
    data = bytearray(storage.nbytes)
    read_into(storage.content, memoryview(data))
    tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.untyped_storage()


_ALIGN = 16  # an untyped storage may be viewed as anything
_MAPS = 200  # each keeps a file open
_MAP_FROM = 1 << 20  # a smaller file is read: it costs nothing, and a map can be pulled away


def _map(source: Source) -> mmap.mmap | None:
    if source.size < _MAP_FROM or source.fd < 0 or os.name == "nt":  # Windows lets no process replace a file that is mapped
        return None
    try:
        return mmap.mmap(source.fd, 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # a file system that cannot, or no address space left
        return None


_OBJECTS: dict[str, Callable[..., Any]] = {
    "builtins.set": set,
    "builtins.complex": complex,
    "builtins.bytearray": bytearray,
    "collections.Counter": collections.Counter,  # the milestones of a MultiStepLR
    "torch.Size": lambda *sizes: torch.Size(*sizes),
    "torch.device": lambda *args: torch.device(*args),
    "torch.serialization._get_layout": {
        str(layout): layout
        for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    }.__getitem__,
}
