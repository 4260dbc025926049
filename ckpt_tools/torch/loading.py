"""Load checkpoints as live tensors."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_tools.edit import casts, renaming
from ckpt_tools.edit.objects import plain
from ckpt_tools.edit.objects.losses import check_state_dict, tensors_of
from ckpt_tools.errors import ObjectsError, UsageError
from ckpt_tools.fit.targets import choose_state_dict
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, is_tensor, tensors_by_name
from ckpt_tools.io.source import AnyPath, File, as_path
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import dotted, listed
from ckpt_tools.torch.building import Builder, MapLocation
from ckpt_tools.tree import names
from ckpt_tools.tree.dtypes import DTYPES, DType, cast_target
from ckpt_tools.tree.nodes import Dict, Pair, Where, as_dict
from ckpt_tools.tree.options import natural


@natural
def load(path: File, *, map_location: MapLocation = "cpu") -> Any:
    """The whole checkpoint as Python data with live tensors. Executes nothing in the file.

    Known plain objects come as plain data (a Namespace as a dict, a NumPy number as a number). Ties, strides and offsets
    are as `torch.load` gives them.

    Args:
        path: a checkpoint in any container that ckpt reads.
        map_location: a device for everything, a mapping from device tag to device, or None for the file's own tags.

    Raises:
        ObjectsError: an object that is not plain data. CkptError: the file cannot be read.
    """
    with open_whole(path) as checkpoint:
        unknown = plain.find_unknown(checkpoint.root)
        if unknown:
            raise _objects_error(as_path(path), unknown)
        root, fates = plain.make_plain(checkpoint.root)
        dropped = [(tuple(fate.where), fate.name) for fate in fates if fate.became == "dropped"]
        if dropped:
            raise _objects_error(as_path(path), dropped)
        return Builder(checkpoint, map_location).build(casts.to_little_endian(root, checkpoint.byteorder))


def _objects_error(path: AnyPath, found: list[tuple[Where, str]]) -> ObjectsError:
    return ObjectsError(
        f"{path} holds objects that are not plain data.",
        why="; ".join(f"{dotted(where) or 'the root'}: {name}" for where, name in found[:8]),
        fix=f"Make data of them: ckpt convert {path} OUT --objects plain",
    )


@natural
def load_state_dict(
    path: File, *, map_location: MapLocation = "cpu", select: str | None = None, unwrap: bool = True,
    dtype: torch.dtype | str | None = None, mmap: bool = True,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """One state dict of a checkpoint as live tensors, ready for `model.load_state_dict`. Executes nothing in the file.

    Values beside the tensors (an epoch) are left out. A pickled module gives its state dict.

    Args:
        path: a checkpoint in any container that ckpt reads.
        map_location: as for `load`.
        select: the dotted path of the state dict ("model", "ema"), where the checkpoint holds several.
        unwrap: remove the wrappers of DP, DDP, compile, FSDP1 and activation checkpointing from the names.
        dtype: cast float tensors to this torch.dtype, or bf16, fp16, fp32, fp64; ties and views stay.
        mmap: map the file into memory: a tensor's bytes are read when they are first used. What is written to a tensor does not
            reach the file. While such tensors live, the file may be renamed, removed or replaced (as `save` does), but not
            truncated or overwritten in place (as `torch.save` to the same path does): that ends the process (SIGBUS).
            mmap=False reads everything now. Files below 1 MiB, compressed or cast tensors are always read.

    Raises:
        NothingMatchedError: no state dict there, or several and no `select`. ConvertError: two names would become one.
        UsageError: a dtype that is not a float, a device that is not there, a select that is not text.
        CkptError: the file cannot be read.
    """
    target = None if dtype is None else _cast_target(dtype)
    with open_whole(path) as checkpoint:
        state_dict = choose(checkpoint, select)
        if unwrap:
            renaming.rename_state_dict(state_dict, names.unwrap)
        root = casts.to_little_endian(loadable(state_dict.node, as_path(path)), checkpoint.byteorder)
        if target is not None:
            root, _ = casts.cast_floats(root, target, {})
        loaded: dict[str, torch.Tensor] = Builder(checkpoint, map_location, mapped=mmap).build(root)
        checkpoint.source.check_unchanged()
        return loaded


def _cast_target(dtype: torch.dtype | str) -> DType:
    name = str(dtype)
    row = DTYPES.get(cast_target(name) or name.removeprefix("torch."))
    if row is None or row.family != "float" or row.packed > 1:
        raise UsageError(f"dtype={dtype} is not a float type that torch casts to.")
    return row


def loadable(node: Dict, path: AnyPath) -> Dict:
    """A state dict with what `load_state_dict` takes: tensors, and what modules keep as `_extra_state`."""
    kept: list[Pair] = [pair for pair in node.named.items() if is_tensor(pair[1]) or pair[0].endswith("_extra_state")]
    made = Dict(kept, ordered=node.ordered)
    made.attributes = node.attributes
    tensors = tensors_by_name(made)
    root = as_dict(plain.make_plain(made)[0])
    if lost := tensors.keys() - tensors_by_name(root).keys():
        raise ObjectsError(
            f"{tensors_of(path, lost)} cannot be made without their class: {listed(sorted(lost), 8)}.",
            why="Each is an object around other tensors.", fix="torch.load makes them, where the class is there.",
        )  # fmt: skip
    return root


def choose(checkpoint: Checkpoint, select: str | None) -> StateDict:
    """The selected state dict of a checkpoint, or its only one."""
    if select is not None and not isinstance(select, str):
        raise UsageError(f"select={select!r} is not text.", fix='Give the dotted path of the state dict: "model", "nets.0".')
    state_dict = choose_state_dict(checkpoint, select)
    check_state_dict(checkpoint, state_dict)
    return state_dict
