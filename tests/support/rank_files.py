"""Rank files as FSDP1, FSDP2, HSDP and tensor parallelism save them, of a whole world; made by torch in one process."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

State = dict[str, torch.Tensor]
Cut = Callable[[nn.Module, int, int], Mapping[str, Any]]


class Net(nn.Module):
    """Sizes that do not divide, buffers, a frozen weight, an embedding that is tied to the head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 7, dtype=dtype)
        self.a = nn.Linear(7, 5, dtype=dtype)
        self.bn = nn.BatchNorm1d(5, dtype=dtype)
        self.b = nn.Linear(5, 7, dtype=dtype)
        self.head = nn.Linear(7, 13, bias=False, dtype=dtype)
        self.head.weight = self.emb.weight
        self.b.weight.requires_grad_(False)


def net(dtype: torch.dtype = torch.float32) -> Net:
    """The network with the same weights each time."""
    torch.manual_seed(0)
    return Net(dtype)


@contextlib.contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world in which nothing is sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            _clear_python_sharding_prop_cache()  # what it knows of the mesh of this rank
            _clear_fast_path_sharding_prop_cache()


def fsdp2(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
    """`fully_shard` over all ranks."""
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
    return model.state_dict()


def hsdp(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
    """Replicated over two groups, sharded in each; over as many groups as ranks where their number is odd."""
    groups = 2 if world % 2 == 0 else world
    fully_shard(model, mesh=init_device_mesh("cpu", (groups, world // groups), mesh_dim_names=("replicate", "shard")))
    return model.state_dict()


_PLAN = {"a": ColwiseParallel(), "b": RowwiseParallel()}


def tp(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
    """Columns and rows over all ranks; what no plan names stays whole."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, _PLAN, src_data_rank=None)
    return model.state_dict()


def fsdp_tp(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
    """Tensor parallel in pairs (where the number of ranks is odd: all of them), then `fully_shard`: `_StridedShard`."""
    columns = 2 if world % 2 == 0 else world
    mesh = init_device_mesh("cpu", (world // columns, columns), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"], _PLAN, src_data_rank=None)
    fully_shard(model, mesh=mesh["fsdp"])
    return model.state_dict()


def fsdp1(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
    """What FSDP1's SHARDED_STATE_DICT holds: ShardedTensors of rows, buffers whole."""
    made = {id(value): sharded(value, rank, world) for value in model.parameters()}
    state = model.state_dict(keep_vars=True)
    return {name: made.get(id(value), value) for name, value in state.items()}


def sharded(tensor: torch.Tensor, rank: int, world: int) -> ShardedTensor:
    """A ShardedTensor of rows, as `torch.distributed.fsdp._shard_utils` makes it."""
    chunks, boxes, at = tensor.detach().chunk(world), [], 0
    for owner, chunk in enumerate(chunks):
        boxes.append(ShardMetadata([at, *[0] * (tensor.ndim - 1)], list(chunk.shape), placement=f"rank:{owner}/cpu"))
        at += len(chunk)
    own = [Shard(chunks[rank].clone(), boxes[rank])] if rank < len(chunks) else []
    metadata = ShardedTensorMetadata(boxes, tensor.size(), TensorProperties(dtype=tensor.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata)


def save_ranks(
    folder: Path,
    cut: Cut,
    world: int,
    *,
    dtype: torch.dtype = torch.float32,
    name: str = "model_world_size_{world}_rank_{rank}.pt",
) -> State:
    """The files of all ranks in a folder; returns the state dict of the model that was cut."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with rank_of(rank, world):
            torch.save(cut(net(dtype), rank, world), folder / name.format(world=world, rank=rank))
    return {key: value.detach().clone() for key, value in net(dtype).state_dict().items()}
