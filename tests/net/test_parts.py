"""Parts of a job put together: what comes out is the model that was cut, or the error names what does not belong together."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError
from tests.support.rank_files import Cut, fsdp1, fsdp2, fsdp_tp, hsdp, rank_of, save_ranks, tp
from tests.support.zero_files import save_zero, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = Mapping[str, Any]
FILE = "model_world_size_{world}_rank_{rank}.pt"


def equal(found: State, wanted: State) -> None:
    """Names, types and bits."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("cut", "world"),
    [(fsdp1, 7), (fsdp2, 5), (fsdp2, 9), (hsdp, 6), (tp, 3), (fsdp_tp, 8)],
)  # fmt: skip
def test_uneven_cuts(cut: Cut, world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Sizes that the ranks do not divide, more ranks than rows (so empty shards), two dimensions of meshes."""
    wanted = save_ranks(tmp_path / "in", cut, world, dtype=dtype)
    equal(ckpt_tools.torch.load_state_dict(tmp_path / "in"), wanted)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth")
    equal(found, wanted)
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


def changed(state: State, rank: int, world: int) -> State:
    """The last rank has one other number in a replica."""
    if rank == world - 1:
        found = state["a.weight"]
        (found.to_local() if isinstance(found, DTensor) else found).detach().view(-1)[0] += 1
    return state


def other_rank(folder: Path) -> None:
    """Another run's file of the same rank: the same shapes, other numbers in what every rank has whole."""
    torch.manual_seed(5)
    with rank_of(1, 2):
        model = save_model()
        torch.save(fsdp2(model, 1, 2), folder / FILE.format(world=2, rank=1))


def save_model() -> nn.Module:
    """The network of another run, which counted other batches."""
    from tests.support.rank_files import Net

    model = Net()
    model.bn.num_batches_tracked.fill_(3)  # type: ignore[union-attr]
    return model


def renamed(folder: Path) -> None:
    """Rank 1's file once more, as rank 0's."""
    shutil.copy(folder / FILE.format(world=2, rank=1), folder / FILE.format(world=2, rank=0))


def of_three(folder: Path) -> None:
    """Rank 1 of a job of three."""
    save_ranks(folder / "three", fsdp2, 3)
    (folder / "three" / FILE.format(world=3, rank=1)).replace(folder / FILE.format(world=2, rank=1))
    shutil.rmtree(folder / "three")


def of_double(folder: Path) -> None:
    """Rank 1 of a job in another precision."""
    save_ranks(folder / "double", fsdp2, 2, dtype=torch.float64)
    (folder / "double" / FILE.format(world=2, rank=1)).replace(folder / FILE.format(world=2, rank=1))
    shutil.rmtree(folder / "double")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "other-run": other_rank, "twice": renamed, "of-three": of_three, "of-double": of_double,
    "missing": lambda folder: (folder / FILE.format(world=2, rank=1)).unlink(),
    "cut": lambda folder: (folder / FILE.format(world=2, rank=1)).write_bytes(
        (folder / FILE.format(world=2, rank=1)).read_bytes()[:-300]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_rank_that_does_not_belong(name: str, tmp_path: Path) -> None:
    """Of another run, twice, of another job, in another precision, missing, cut: refused by all that would write or load."""
    save_ranks(tmp_path / "in", fsdp2, 2)
    DAMAGES[name](tmp_path / "in")
    for target in ("out.pth", "out.safetensors"):
        with pytest.raises(CkptError):
            ckpt_tools.convert(tmp_path / "in", tmp_path / target)
    with pytest.raises(CkptError):
        ckpt_tools.torch.load_state_dict(tmp_path / "in")
    assert ckpt_tools.check(tmp_path / "in").verdict in ("unreadable", "findings")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(("cut", "world"), [(hsdp, 4), (hsdp, 6)])
def test_replicas_that_differ(cut: Cut, world: int, tmp_path: Path) -> None:
    """One number in one replica is enough."""
    save_ranks(tmp_path / "in", lambda model, rank, ranks: changed(cut(model, rank, ranks), rank, ranks), world)
    with pytest.raises(CkptError, match=r"a\.weight"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_an_empty_shard_of_every_kind(tmp_path: Path) -> None:
    """A rank without any row of any weight: its file counts, and is needed."""

    def cut(model: nn.Module, rank: int, world: int) -> State:
        small: Any = nn.Linear(3, 1)
        with torch.no_grad():
            small.weight.copy_(torch.arange(3.0))
            small.bias.fill_(5)
        fully_shard(small, mesh=init_device_mesh("cpu", (world,)))
        found: State = small.state_dict()
        return found

    save_ranks(tmp_path / "in", cut, 3)
    found = ckpt_tools.torch.load_state_dict(tmp_path / "in")
    assert (found["weight"].tolist(), found["bias"].tolist()) == ([[0, 1, 2]], [5])
    (tmp_path / "in" / FILE.format(world=3, rank=2)).unlink()
    with pytest.raises(CkptError, match="rank 2"):
        ckpt_tools.torch.load_state_dict(tmp_path / "in")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_of_every_stage(stage: int, world: int, tmp_path: Path) -> None:
    """DeepSpeed's flat groups, padded and cut anywhere: the weights in fp32, frozen ones and buffers."""
    job = trained()
    save_zero(tmp_path / "in", job, stage, world)
    equal(ckpt_tools.torch.load_state_dict(tmp_path / "in"), job.whole)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (1,)], ids=str)
def test_boxes_of_torch_checkpoint(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A .distcp of FSDP's boxes, written on each rank in turn, is read as torch's own conversion reads it."""
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    save({"model": {"w": whole, "turned": whole.t() if whole.ndim == 2 else whole}, "step": 3},
         checkpoint_id=tmp_path / "in", no_dist=True)  # fmt: skip
    dcp_to_torch_save(tmp_path / "in", tmp_path / "torch.pth")
    ckpt_tools.convert(tmp_path / "in", tmp_path / "ours.pth")
    wanted, found = (torch.load(tmp_path / name, weights_only=True) for name in ("torch.pth", "ours.pth"))
    equal(found["model"], wanted["model"])
    assert found["step"] == wanted["step"]
