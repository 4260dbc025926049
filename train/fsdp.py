"""FSDP2: every rank keeps its part of every weight, and of what the optimizer knows about it.

Imported by runs under fsdp alone: torch.distributed.tensor takes a second.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ckpt_tools.errors import OutputError
from train.parallel import World


def sharded(model: nn.Module, world: World) -> nn.Module:
    """`model`, each of whose parameters is a DTensor from now on: this rank's rows of it.

    Layer by layer, so that the whole weights of one layer at a time are in memory. Gradients are averaged over the ranks,
    as DistributedDataParallel does it.
    """
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("fsdp",))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def own_parts(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A checkpoint whose tensors are whole, with this rank's parts in their place, cut as `model` is."""
    own, parameters = model.state_dict(), list(model.parameters())
    state = {
        place: {name: part(value, parameters[place]) for name, value in values.items()}
        for place, values in saved["optimizer"]["state"].items()
    }
    weights = {name: part(whole, own[name]) for name, whole in saved["model"].items()}
    return {**saved, "model": weights, "optimizer": {**saved["optimizer"], "state": state}}


def part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole; the tensor itself where `like` is not cut."""
    if isinstance(like, DTensor) and whole.shape == like.shape:
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole


def save_dcp(checkpoint: Mapping[str, Any], folder: Path, world: World) -> None:
    """Every rank's part, as any number of ranks loads it with `torch.distributed.checkpoint.load`.

    Raises OutputError where a rank cannot write its own.
    """
    try:
        dcp.save(dict(checkpoint), checkpoint_id=folder, process_group=world.control)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise OutputError(f"{folder} cannot be written.", why=f"Rank {rank}: {failure}", fix="Is the disk full?") from error
