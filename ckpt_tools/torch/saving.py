"""Save so that the file is the old one or the whole new one."""

from __future__ import annotations

import collections
import ctypes
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_tools.edit.flatten import flatten
from ckpt_tools.errors import ConvertError
from ckpt_tools.formats.single import reader
from ckpt_tools.io.content import CHUNK, Computed
from ckpt_tools.io.output import Output, output_error, replacing
from ckpt_tools.io.source import File, as_path
from ckpt_tools.io.writer import write
from ckpt_tools.torch.copying import is_freed
from ckpt_tools.torch.gathering import has_parts, leaves, write_gathered
from ckpt_tools.torch.live_names import inside_wrappers, renamed_state_dict
from ckpt_tools.tree import names
from ckpt_tools.tree import nodes as trees
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Storage
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.output_names import FLAT, Format, output_format


@natural
def save(
    model_or_mapping: torch.nn.Module | Mapping[str, Any], path: File, *, format: Format | None = None,
    wrapped: bool = False,
) -> None:  # fmt: skip
    """Save a model's state dict, or any mapping, so that the file is the old one or the whole new one, and durable.

    DTensors (FSDP2, HSDP, tensor parallelism) are gathered first, so that the file holds the model: every process of the job
    must call this then, and the first one writes. It returns in all of them once the file is there, or fails in all.

    Args:
        model_or_mapping: a module, wrapped by DP, DDP, FSDP1 or compile or not; or a mapping, saved as it is, but for modules
            in it: each becomes its state dict, as if it were saved alone. (`torch.save` would pickle its class.)
        path: the file; replaced when it exists.
        format: "pth" (what `torch.save` writes), "pth-legacy" (what it wrote before 1.6), "safetensors" (one flat state dict,
            ties kept), "gguf" (one too, for llama.cpp's tools) or "dcp" (a folder for `torch.distributed.checkpoint`); else by
            extension.
        wrapped: keep the wrapper's names of a module.

    Raises:
        ConvertError: a mapping that safetensors cannot hold. OutputError: the file cannot be written.
        PartError: ShardedTensors of FSDP1, each one process's part; the message says how to take them whole.
        UsageError: processes that hold different tensors give one path.
    """
    path = as_path(path)
    kind = output_format(path, format)
    data = _without_modules(model_or_mapping, wrapped, set())
    if has_parts(data):
        write_gathered(data, path, lambda whole: _write(whole, path, kind))
    else:
        _write(data, path, kind)


def _write(data: Mapping[str, Any], path: str | os.PathLike[str], kind: Format) -> None:
    if kind in FLAT:
        flat = flatten(_tree_of(data, kind), holder=kind)
        pieces = reader(kind).lay_out(flat.tensors, flat.metadata)
        with replacing(path, overwrite=True, durable=True) as output:
            write(pieces, output)
        return
    if kind == "dcp":
        from ckpt_tools.operations.convert.folder import write_dcp

        write_dcp(_tree_of(data, "a distributed checkpoint"), path)
        return
    with replacing(path, overwrite=True, durable=True) as output:
        _save_pth(data, output, zipped=kind == "pth")


def _save_pth(data: Any, output: Output, *, zipped: bool) -> None:
    """`torch.save` into the output. It makes a RuntimeError of whatever its stream raises: the real one is raised again."""
    for value in leaves(data):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and is_freed(value):
            raise ConvertError(f"The memory of a tensor of shape {tuple(value.shape)} has been freed.")
    raw = _Stream(output)
    try:
        with io.BufferedWriter(raw, CHUNK) as stream:
            torch.save(data, stream, _use_new_zipfile_serialization=zipped)
    except BaseException as error:
        if raw.failed is not None:
            raise raw.failed from None
        if isinstance(error, pickle.PicklingError | AttributeError | TypeError | RecursionError):  # pickle's own errors
            raise ConvertError(f"{output.target} would hold what cannot be pickled.", why=f"{error}.") from error
        raise


class _Stream(io.RawIOBase):
    """Writes to an output, with our errors. After one it takes everything and writes nothing."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.failed: BaseException | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data)
        try:
            while len(left) and self.failed is None:
                left = left[os.write(self.output.fd, left) :]
        except OSError as error:
            self.failed = output_error(self.output.target, error)
            raise self.failed from None
        except BaseException as error:  # Ctrl-C
            self.failed = error
            raise
        return len(data)


def _without_modules(value: Any, wrapped: bool, above: set[int]) -> Any:
    """The same data with the state dicts of modules in their place; the very same object where there are none."""
    if isinstance(value, torch.nn.Module):
        return value.state_dict() if wrapped else renamed_state_dict(inside_wrappers(value).state_dict(), names.strip_inner)
    if type(value) not in (dict, collections.OrderedDict, list, tuple) or id(value) in above:
        return value
    old = list(value.values()) if isinstance(value, dict) else value
    new = [_without_modules(part, wrapped, above | {id(value)}) for part in old]
    if all(one is other for one, other in zip(old, new, strict=True)):
        return value
    return type(value)(zip(value, new, strict=True)) if isinstance(value, dict) else type(value)(new)


_DEEPEST = 100  # mappings in mappings


def _tree_of(data: Mapping[str, Any], holder: str) -> Node:
    """A mapping as a tree for what it is to be held by; tensors on one storage stay on one."""
    storages: dict[int, Storage] = {}

    def node(value: Any, name: str, above: frozenset[int] = frozenset()) -> Node:
        if isinstance(value, torch.Tensor):
            return _entry_of(value, name, storages, holder)
        if id(value) in above or len(above) > _DEEPEST:
            raise ConvertError(f"{name!r} is nested in itself, or too deep, which {holder} cannot hold.")
        inside = above | {id(value)}
        if isinstance(value, Mapping):
            made = Dict([(key, node(item, str(key), inside)) for key, item in value.items()], ordered=True)
            if isinstance(metadata := getattr(value, "_metadata", None), Mapping):
                made.attributes = Dict([("_metadata", node(metadata, "_metadata"))])
            return made
        if isinstance(value, list | tuple):
            return List([node(item, name, inside) for item in value])
        if value is None or isinstance(value, str | int | float | bool):
            return value
        raise ConvertError(f"{name!r} is a {type(value).__name__}, which {holder} cannot hold.")

    return node(data, "the mapping")


def _entry_of(tensor: torch.Tensor, name: str, storages: dict[int, Storage], holder: str) -> Entry:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ConvertError(f"{name!r} is a sparse, quantised or meta tensor, which {holder} cannot hold.")
    if is_freed(tensor):
        raise ConvertError(f"The memory of {name!r} has been freed.")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype: DType = DTYPES[str(tensor.dtype).removeprefix("torch.")]
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
