"""Load code: checkpoints as live tensors, names without wrappers, atomic saves. The part of ckpt_tools that imports torch.

from ckpt_tools.torch import load_state_dict, save
model.load_state_dict(load_state_dict("ddp.pth", map_location="cpu"))
"""

from __future__ import annotations

import collections
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch

from ckpt_tools import casts, names, plain, transforms
from ckpt_tools import tree as trees
from ckpt_tools.checkpoint import Checkpoint, is_tensor, open_checkpoint
from ckpt_tools.containers import safetensors
from ckpt_tools.convert import Format, output_format
from ckpt_tools.dtypes import CAST_TARGETS, DTYPES, DType
from ckpt_tools.errors import ContainerLimitError, ObjectsError, UsageError
from ckpt_tools.files import replacing
from ckpt_tools.flatten import flatten
from ckpt_tools.numeric import lazy_bits, torch_dtype
from ckpt_tools.plan import CHUNK, Computed, Content, Range, chunks
from ckpt_tools.targets import choose_state_dict
from ckpt_tools.transforms import dotted
from ckpt_tools.tree import Dict, Entry, Global, List, Node, Object, Storage, Where
from ckpt_tools.writer import write

__all__ = ["MapLocation", "add_prefix", "load", "load_state_dict", "save", "strip_prefix", "unwrap"]

MapLocation = str | torch.device | Mapping[str, str] | None
_StateDict = TypeVar("_StateDict", bound=Mapping[str, Any])


# --- names of live state dicts


def strip_prefix(state_dict: _StateDict, prefix: str = "module.") -> _StateDict:
    """A state dict of the same kind without a leading prefix (repeated ones too); order and `_metadata` are kept.

    Raises:
        CollisionError: two tensors would get one name.
    """
    return _renamed(state_dict, lambda name: names.strip_leading(name, prefix))


def add_prefix(state_dict: _StateDict, prefix: str = "module.") -> _StateDict:
    """A state dict of the same kind with a prefix before every name; order and `_metadata` are kept."""
    return _renamed(state_dict, lambda name: prefix + name)


def unwrap(state_dict: _StateDict) -> _StateDict:
    """A state dict of the same kind without the wrappers of DP, DDP, compile, FSDP1 and activation checkpointing.

    Raises:
        CollisionError: two tensors would get one name.
    """
    return _renamed(state_dict, names.unwrap)


def _renamed(state_dict: _StateDict, rename: Callable[[str], str]) -> _StateDict:
    metadata = getattr(state_dict, "_metadata", None)
    renamed = {key: rename(key) if _is_name(key, value) else key for key, value in state_dict.items()}
    names.check_unique(renamed)
    kind = type(state_dict) if isinstance(state_dict, dict) else dict
    result: Any = kind() if kind is not collections.defaultdict else {}
    result.update((renamed[key], value) for key, value in state_dict.items())
    if metadata is not None:
        result._metadata = type(metadata)(names.move_metadata(renamed, list(metadata.items()), lambda: {"version": 1}))
    return result  # type: ignore[no-any-return]


def _is_name(key: Any, value: Any) -> bool:
    """Whether a key names part of the model, as `ckpt convert` has it; an epoch beside the tensors does not."""
    return isinstance(key, str) and (isinstance(value, torch.Tensor) or key.endswith("_extra_state") or "." in key)


# --- loading


def load(path: str | os.PathLike[str], *, map_location: MapLocation = "cpu") -> Any:
    """The whole checkpoint as Python data with live tensors. Executes nothing in the file.

    Known plain objects come as plain data (a Namespace as a dict, a NumPy number as a number). Ties, strides and offsets
    are as `torch.load` gives them.

    Args:
        path: a checkpoint in any container that ckpt reads.
        map_location: a device for everything, a mapping from device tag to device, or None for the file's own tags.

    Raises:
        ObjectsError: an object that is not plain data. CkptError: the file cannot be read.
    """
    with open_checkpoint(path) as checkpoint:
        unknown = plain.find_unknown(checkpoint.root)
        if unknown:
            raise _objects_error(path, unknown)
        root, fates = plain.make_plain(checkpoint.root)
        dropped = [(fate.where, fate.name) for fate in fates if fate.became == "dropped"]
        if dropped:
            raise _objects_error(path, dropped)
        return _Builder(checkpoint, map_location).build(casts.to_little_endian(root, checkpoint.decoded.byteorder))


def _objects_error(path: str | os.PathLike[str], found: list[tuple[Where, str]]) -> ObjectsError:
    return ObjectsError(
        f"{path} holds objects that are not plain data.",
        why="; ".join(f"{dotted(where) or 'the root'}: {name}" for where, name in found[:8]),
        fix=f"Make data of them: ckpt convert {path} OUT --objects plain",
    )


def load_state_dict(
    path: str | os.PathLike[str], *, map_location: MapLocation = "cpu", select: str | None = None, unwrap: bool = True,
    dtype: torch.dtype | str | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """One state dict of a checkpoint as live tensors, ready for `model.load_state_dict`. Executes nothing in the file.

    Values beside the tensors (an epoch) are left out. A pickled module gives its state dict.

    Args:
        path: a checkpoint in any container that ckpt reads.
        map_location: as for `load`.
        select: the dotted path of the state dict ("model", "ema"), where the checkpoint holds several.
        unwrap: remove the wrappers of DP, DDP, compile, FSDP1 and activation checkpointing from the names.
        dtype: cast float tensors to this torch.dtype, or bf16, fp16, fp32, fp64; ties and views stay.

    Raises:
        NothingMatchedError: no state dict there, or several and no `select`. CollisionError: two names would become one.
        UsageError: a dtype that is no float, a device that is not there. CkptError: the file cannot be read.
    """
    target = None if dtype is None else _cast_target(dtype)
    with open_checkpoint(path) as checkpoint:
        state_dict = choose_state_dict(checkpoint, select)
        transforms.restore_named_ties(state_dict.node, checkpoint.decoded.metadata)
        if unwrap:
            transforms.rename_state_dict(state_dict, names.unwrap)
        root = casts.to_little_endian(_loadable(state_dict.node), checkpoint.decoded.byteorder)
        if target is not None:
            root, _ = casts.cast_floats(root, target)
        loaded: dict[str, torch.Tensor] = _Builder(checkpoint, map_location).build(root)
        return loaded


def _dtype_row(dtype: torch.dtype) -> DType:
    return DTYPES[str(dtype).removeprefix("torch.")]


def _cast_target(dtype: torch.dtype | str) -> DType:
    name = CAST_TARGETS.get(dtype, "") if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    row = DTYPES.get(name)
    if row is None or row.family != "float" or row.packed > 1:
        raise UsageError(f"dtype={dtype} is no float type that torch casts to.")
    return row


def _loadable(node: Dict) -> Dict:
    """A state dict with what `load_state_dict` takes: tensors, and what modules keep as `_extra_state`."""
    kept = [
        (key, value) for key, value in node.items if type(key) is str and (is_tensor(value) or key.endswith("_extra_state"))
    ]
    made = Dict(kept, ordered=node.ordered)
    made.attributes = node.attributes
    root, _ = plain.make_plain(made)
    return cast("Dict", root)


class _Builder:
    """Live Python data from a tree, without recursion: containers are made first and filled later."""

    def __init__(self, checkpoint: Checkpoint, map_location: MapLocation) -> None:
        self.path = checkpoint.path
        self.map_location = map_location
        self.devices: dict[str, torch.device] = {}
        self.made: dict[int, Any] = {}
        self.pending: list[Node] = []

    def build(self, root: Node) -> Any:
        result = self.value(root)
        while self.pending:
            node = self.pending.pop()
            made = self.made[id(node)]
            if type(node) is List:
                made.extend(self.value(item) for item in node.items)
                continue
            attributes = node.attributes if type(node) is Dict else node.extras.state
            if type(node) is Dict:
                made.update((self.value(key), self.value(value)) for key, value in node.items)
            for name, value in attributes.items if type(attributes) is Dict else ():
                setattr(made, name, self.value(value))
        return result

    def value(self, node: Node) -> Any:
        kind = type(node)
        if kind is tuple:
            return self.tuple(node)
        if kind not in (Dict, List, Entry, Object, Global, Storage):
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
        make = _OBJECTS.get(str(node.function)) if type(node) is Object else None
        if make is None or type(node.args) is not tuple or node.steps:
            what = "a sparse, quantised, nested or meta tensor" if is_tensor(node) else f"{getattr(node, 'function', node)}"
            raise ObjectsError(f"{self.path} holds {what}, which cannot be made without torch.load.")
        args = [part.items if type(part) is List else part for part in node.args]
        return make(*map(self.value, args)) if not any(type(arg) is list for arg in args) else make(*args)

    def tensor(self, entry: Entry) -> torch.Tensor:
        storage = self.value(entry.storage)
        tensor = torch.empty(0, dtype=torch_dtype(entry.dtype), device=storage.device)
        tensor.set_(storage, entry.offset, entry.shape, entry.stride)
        bits = lazy_bits(entry)
        tensor = tensor.conj() if "conj" in bits else tensor
        tensor = torch._neg_view(tensor) if "neg" in bits else tensor
        if entry.kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
        return tensor.requires_grad_(entry.requires_grad)

    def storage(self, storage: Storage) -> torch.UntypedStorage:
        device = self.device(storage.device or "cpu")
        if device.type == "meta":
            return torch.UntypedStorage(storage.nbytes, device="meta")  # type: ignore[no-untyped-call]
        data = bytearray(storage.nbytes)
        fill(storage.content, memoryview(data))
        made = (
            torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
            if data
            else torch.empty(0, dtype=torch.uint8).untyped_storage()
        )
        return made if device.type == "cpu" else made.to(device=device)

    def device(self, tag: str) -> torch.device:
        """Where a storage with this tag goes; made sure of once."""
        if tag not in self.devices:
            if isinstance(self.map_location, Mapping):
                wanted: str | torch.device = self.map_location.get(tag, tag)
            else:
                wanted = tag if self.map_location is None else self.map_location
            try:
                self.devices[tag] = torch.device(wanted)
                torch.empty(0, device=wanted)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                raise UsageError(
                    f"{self.path} has tensors tagged {tag!r}, which cannot be placed on {str(wanted)!r} here.",
                    why=str(error).splitlines()[0], fix="Choose another device with map_location.",
                ) from None  # fmt: skip
        return self.devices[tag]


_OBJECTS: dict[str, Callable[..., Any]] = {
    "builtins.set": set,
    "builtins.complex": complex,
    "builtins.bytearray": bytearray,
    "torch.Size": lambda sizes: torch.Size(sizes),
    "torch.device": lambda *args: torch.device(*args),
}


def fill(content: Content, buffer: memoryview) -> None:
    """Read a content into a buffer of its size."""
    if isinstance(content, Range):
        content.source.read_into(content.offset, buffer)
        return
    at = 0
    for chunk in chunks(content):
        buffer[at : at + len(chunk)] = chunk
        at += len(chunk)


# --- saving


def save(
    model_or_mapping: torch.nn.Module | Mapping[str, Any], path: str | os.PathLike[str], *, format: Format | None = None,
    wrapped: bool = False,
) -> None:  # fmt: skip
    """Save a model's state dict, or any mapping, so that the file is the old one or the whole new one, and durable.

    Args:
        model_or_mapping: a module, wrapped by DP, DDP, FSDP1 or compile or not; or a mapping, saved as it is.
        path: the file; replaced when it exists.
        format: "pth" (what `torch.save` writes) or "safetensors" (one flat state dict, ties kept); else by extension.
        wrapped: keep the wrapper's names of a module.

    Raises:
        ContainerLimitError: a mapping that safetensors cannot hold. OutputError: the file cannot be written.
    """
    kind = output_format(path, format)
    data = _state_dict_of(model_or_mapping, wrapped) if isinstance(model_or_mapping, torch.nn.Module) else model_or_mapping
    if kind == "safetensors":
        flat = flatten(_tree_of(data))
        pieces = safetensors.lay_out(flat.tensors, flat.metadata)
        with replacing(path, overwrite=True, durable=True) as output:
            write(pieces, output)
        return
    with replacing(path, overwrite=True, durable=True) as output, os.fdopen(os.dup(output.fd), "wb") as stream:
        torch.save(data, stream)


def _state_dict_of(model: torch.nn.Module, wrapped: bool) -> Mapping[str, Any]:
    if wrapped:
        return model.state_dict()
    while True:
        if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return _renamed(model.state_dict(), names.strip_inner)


def _tree_of(data: Mapping[str, Any]) -> Node:
    """A mapping as a tree; tensors on one storage stay on one."""
    storages: dict[int, Storage] = {}

    def node(value: Any, name: str) -> Node:
        if isinstance(value, torch.Tensor):
            return _entry_of(value, name, storages)
        if isinstance(value, Mapping):
            made = Dict([(key, node(item, str(key))) for key, item in value.items()], ordered=True)
            if isinstance(metadata := getattr(value, "_metadata", None), Mapping):
                made.attributes = Dict([("_metadata", node(metadata, "_metadata"))])
            return made
        if isinstance(value, list | tuple):
            return List([node(item, name) for item in value])
        if value is None or isinstance(value, str | int | float | bool):
            return value
        raise ContainerLimitError(f"{name!r} is a {type(value).__name__}, which safetensors cannot hold.")

    return node(data, "the mapping")


def _entry_of(tensor: torch.Tensor, name: str, storages: dict[int, Storage]) -> Entry:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ContainerLimitError(f"{name!r} is a sparse, quantised or meta tensor, which safetensors cannot hold.")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = _dtype_row(tensor.dtype)
    live = tensor.untyped_storage()
    storage = storages.get(live._cdata)
    if storage is None:
        content = Computed(live.nbytes(), lambda: _storage_chunks(live))
        storage = storages[live._cdata] = Storage(str(len(storages)), dtype, live.nbytes(), str(tensor.device), content)
    entry = Entry(storage, dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    trees.check(entry, repr(name))
    return entry


def _storage_chunks(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    """The bytes of a live storage, without a copy of more than what lies on another device."""
    on_cpu = storage if storage.device.type == "cpu" else storage.to(device=torch.device("cpu"))
    if on_cpu.nbytes():
        view = memoryview((ctypes.c_char * on_cpu.nbytes()).from_address(on_cpu.data_ptr())).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]
