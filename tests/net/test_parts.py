"""Parts of a job put together: what comes out is the model that was cut, or the error names what does not belong together."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError
from tests.support.graphs import equal
from tests.support.rank_files import Cut, fsdp1, fsdp2, fsdp_tp, hsdp, save_ranks, tp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = Mapping[str, Any]
FILE = "model_world_size_{world}_rank_{rank}.pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cut", "world"), [(fsdp1, 7), (fsdp2, 9), (hsdp, 6), (tp, 3), (fsdp_tp, 8)])
def test_uneven_cuts(cut: Cut, world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Sizes that the ranks do not divide, more ranks than rows (so empty shards), two dimensions of meshes."""
    wanted = save_ranks(tmp_path / "in", cut, world, dtype=dtype)
    assert equal(ckpt_tools.torch.load_state_dict(tmp_path / "in"), wanted)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth")
    assert equal(found, wanted)
    assert found["head.weight"].data_ptr() == found["emb.weight"].data_ptr()
    part = tmp_path / "in" / FILE.format(world=world, rank=world - 1)
    assert ckpt_tools.check(tmp_path / "in").verdict == "healthy"
    with pytest.raises(CkptError):  # a part by itself is not the model
        ckpt_tools.torch.load_into(nn.Linear(2, 2), part)


PLACEMENTS = {
    "rows-rows": (Shard(0), Shard(0)), "rows-columns": (Shard(0), Shard(1)), "columns-rows": (Shard(1), Shard(0)),
    "columns-columns": (Shard(1), Shard(1)), "whole-rows": (Replicate(), Shard(0)), "columns-whole": (Shard(1), Replicate()),
    "whole": (Replicate(), Replicate()), "last-first": (Shard(2), Shard(0)),
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_meshes_of_two_dimensions(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Each placement on each mesh, of sizes that do not divide: which rank holds which box is torch's."""
    whole = torch.arange(5 * 7 * 3.0).reshape(5, 7, 3)
    world = sizes[0] * sizes[1]

    def cut(model: nn.Module, rank: int, world: int) -> State:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
        return {"w": distribute_tensor(whole.clone(), mesh, PLACEMENTS[name], src_data_rank=None), "step": 3}

    save_ranks(tmp_path / "in", cut, world)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], whole)


def test_columns_of_rows_longer_than_a_block(tmp_path: Path) -> None:
    """A tensor that was cut in columns, of which one row does not fit into the blocks that are put together at once."""
    whole = torch.arange(2 * 1_200_000.0, dtype=torch.float64).reshape(2, -1)

    def cut(model: nn.Module, rank: int, world: int) -> State:
        mesh = init_device_mesh("cpu", (2,))
        return {"w": distribute_tensor(whole.clone(), mesh, [Shard(1)], src_data_rank=None)}

    save_ranks(tmp_path / "in", cut, 2)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], whole)


def of_another_job(folder: Path, file: Path, **options: Any) -> None:
    """Rank 1 of a job of three, or in another precision."""
    world = options.pop("world", 2)
    save_ranks(folder, fsdp2, world, **options)
    (folder / FILE.format(world=world, rank=1)).replace(file)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "of three": lambda folder, file: of_another_job(folder, file, world=3),
    "of double": lambda folder, file: of_another_job(folder, file, dtype=torch.float64),
    "cut": lambda _, file: file.write_bytes(file.read_bytes()[:-300]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_rank_that_does_not_belong(name: str, tmp_path: Path) -> None:
    """Of another job, in another precision, cut: refused by all that would write or load."""
    save_ranks(tmp_path / "in", fsdp2, 2)
    DAMAGES[name](tmp_path / "other", tmp_path / "in" / FILE.format(world=2, rank=1))
    for target in ("out.pth", "out.safetensors"):
        with pytest.raises(CkptError):
            ckpt_tools.convert(tmp_path / "in", tmp_path / target)
        assert not (tmp_path / target).exists()
    with pytest.raises(CkptError):
        ckpt_tools.torch.load_state_dict(tmp_path / "in")
    assert ckpt_tools.check(tmp_path / "in").verdict in ("unreadable", "findings")


def test_replicas_that_differ(tmp_path: Path) -> None:
    """One number in one replica is enough."""

    def cut(model: nn.Module, rank: int, world: int) -> State:
        state = hsdp(model, rank, world)
        if rank == world - 1:
            state["a.weight"].to_local().detach().view(-1)[0] += 1
        return state

    save_ranks(tmp_path / "in", cut, 4)
    with pytest.raises(CkptError, match=r"a\.weight"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
