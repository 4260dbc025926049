"""What stands around a network: DataParallel, DistributedDataParallel, FSDP2; and the tensors that they share or cut."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.parallel import World


def wrap(network: nn.Module, image: Tensor, config: Config, world: World) -> nn.Module:
    """`network` as the mode calls for it: as it is, inside DataParallel or DistributedDataParallel, or sharded.

    `image` is a batch (1, ...) of one input image.
    """
    if config.sync_bn:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    ids = [device.index for device in world.devices if device.type == "cuda"] or None
    if config.parallel == "dp":
        return nn.DataParallel(network, device_ids=ids)
    if config.parallel == "ddp":
        return settled(DistributedDataParallel(network, ids, find_unused_parameters=config.find_unused_parameters), image)
    return sharded(network, world) if config.parallel == "fsdp" else network


def settled(model: nn.Module, image: Tensor) -> nn.Module:
    """`model` after one backward pass that changes nothing.

    DistributedDataParallel groups gradients anew after its first pass, and with three ranks or more the groups decide in which
    order gloo adds up: without this, the first step after a resume would round otherwise than in a run that never stopped.
    """
    model.eval()
    torch.autograd.backward(model(image).sum())
    model.zero_grad(set_to_none=True)
    return model


def sharded(network: nn.Module, world: World) -> nn.Module:
    """`network` under FSDP2: each of its parameters is a DTensor from now on, this rank's rows of it.

    Layer by layer, so that the whole weights of one layer at a time are in memory.
    """
    from torch.distributed.device_mesh import init_device_mesh  # takes a second, which other modes need not wait
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("fsdp",))
    for layer in (*network.children(), network):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return network


def sync_gradients(model: Any, now: bool) -> None:
    """Whether the next pass averages gradients over all ranks: only the last one of a batch has to."""
    inner = getattr(model, "_orig_mod", model)  # under torch.compile
    if isinstance(inner, DistributedDataParallel):
        inner.require_backward_grad_sync = now
    elif hasattr(inner, "set_requires_gradient_sync"):  # under FSDP2
        inner.set_requires_gradient_sync(now)


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that FSDP2 cut, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copy_from_rank_0(tensors: Iterable[Tensor], world: World) -> None:
    """Gives rank 0's batch statistics to all ranks; DistributedDataParallel may have done so before the last pass."""
    for tensor in tensors:
        if world.size > 1 and not hasattr(tensor, "to_local"):
            first = tensor.cpu()
            dist.broadcast(first, src=0, group=world.control)
            tensor.copy_(first)


def floats(network: nn.Module) -> dict[str, Tensor]:
    """Weights and batch statistics by name, without counts: what an average is made of."""
    return {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}


def part(whole: Any, like: Any) -> Any:
    """This rank's part of a tensor that is whole, where `like` was cut by FSDP2; anything else as it is."""
    if not hasattr(like, "placements") or getattr(whole, "shape", None) != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
