"""The files of all ranks become one checkpoint, equal to the model that was cut, or an error names what does not fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_leaves, tree_map

import ckpt_tools
from ckpt_tools.errors import ChecksumError, NotACheckpointError, PartError
from ckpt_tools.torch import load_state_dict
from tests.support.commands import ckpt
from tests.support.graphs import equal
from tests.support.rank_files import fsdp2, net, rank_of, save_ranks, sharded
from tests.support.zips import flip_byte

ROOT = Path(__file__).parents[2] / "fixtures"
FOLDERS = sorted([*(path for path in (ROOT / "parts").iterdir() if path.is_dir()), ROOT / "fsdp1" / "sharded-bf16"])
CONTAINERS = {"consolidated": "consolidated", "dcp": "dcp", "loose": "sharded"}


@pytest.mark.parametrize("genuine", FOLDERS, ids=lambda folder: folder.name)
def test_genuine_folders(genuine: Path, tmp_path: Path) -> None:
    """What torch's ranks saved (fixtures/makers), and FSDP1 of more ranks than rows: the model before it was cut."""
    reference = torch.load(genuine / "reference.pth", weights_only=True)
    assert ckpt_tools.inspect(genuine).container == CONTAINERS.get(genuine.name, "rank-files")
    ckpt_tools.convert(genuine, tmp_path / "out.pth")
    loaded = [load_state_dict(path) for path in (genuine, *genuine.glob("model_*"))]
    for found in (torch.load(tmp_path / "out.pth", weights_only=True), *loaded):
        assert equal(dict(sorted(found.items())), dict(sorted(reference.items())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of FSDP2 on 3 ranks."""
    save_ranks(tmp_path / "in", fsdp2, 3)
    return tmp_path / "in"


def test_check_reads_every_record_of_every_rank(folder: Path) -> None:
    """A flipped bit in one rank's part is found, and the file named."""
    assert ckpt_tools.check(folder).records == sum(ckpt_tools.check(path).records for path in folder.iterdir())
    path = folder / "model_world_size_3_rank_1.pt"
    with rank_of(1, 3):
        part = fsdp2(net(), 1, 3)["emb.weight"].to_local().detach()
    flip_byte(path, part.numpy().tobytes())
    with pytest.raises(ChecksumError):
        ckpt_tools.convert(folder, folder.parent / "out.pth")
    damaged = [row for row in ckpt_tools.check(folder).findings if row.code == "damaged-record"]
    assert "rank_1.pt" in damaged[0].found


def stepped(model: nn.Module) -> Any:
    """AdamW after a step of a model."""
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() * (number + 1)
    optimizer.step()
    return optimizer


def cut_optimizer(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
    """The state of AdamW after a step of an FSDP2 model."""
    fsdp2(model, rank, world)
    state: Mapping[str, Any] = stepped(model).state_dict()
    return state


def test_optimizer_files(tmp_path: Path) -> None:
    """The optimizer's files beside the model's are a checkpoint of their own, merged when one of them is named."""
    expected = save_ranks(tmp_path, fsdp2, 2)
    save_ranks(tmp_path, cut_optimizer, 2, name="optim_world_size_{world}_rank_{rank}.pt")
    assert equal(load_state_dict(tmp_path), expected)
    ckpt_tools.convert(tmp_path / "optim_world_size_2_rank_0.pt", tmp_path / "optim.pth")
    merged, whole = torch.load(tmp_path / "optim.pth", weights_only=True), stepped(net()).state_dict()
    assert merged["param_groups"] == whole["param_groups"]
    for number, state in whole["state"].items():
        assert all(torch.equal(merged["state"][number][key], value) for key, value in state.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_resumes_from_them(tmp_path: Path) -> None:
    """Model and optimizer of 3 ranks, as dcp, fill a job of one by torch's own reader, bit for bit."""

    def cut(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        return {"model": fsdp2(model, rank, world), "optim": get_optimizer_state_dict(model, stepped(model))}

    save_ranks(tmp_path / "in", cut, 3)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "dcp", format="dcp")
    model: Any = net()
    wanted = {"model": model.state_dict(), "optim": {"state": get_optimizer_state_dict(model, stepped(model))["state"]}}
    found = tree_map(torch.zeros_like, wanted)
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert len(wanted["optim"]["state"]) == len(list(model.parameters()))
    assert all(map(torch.equal, tree_leaves(found), tree_leaves(wanted)))


def test_another_step(tmp_path: Path) -> None:
    """Tensors that every rank has whole must be equal; a step that differs is said before a byte is read."""

    def cut(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        model.bn.num_batches_tracked.fill_(rank)  # type: ignore[union-attr, operator]
        return fsdp2(model, rank, world)

    save_ranks(tmp_path / "a", cut, 2)
    assert ckpt_tools.inspect(tmp_path / "a").container == "rank-files"
    with pytest.raises(PartError, match=r"ranks 0, 1 hold different values for 'bn\.num_batches_tracked'"):
        ckpt_tools.convert(tmp_path / "a", tmp_path / "out.pth")
    save_ranks(tmp_path / "b", lambda model, rank, world: {"model": fsdp2(model, rank, world), "step": rank, "host": rank}, 2)
    with pytest.raises(PartError, match="'step' is 0 on rank 0, and another on rank 1"):
        load_state_dict(tmp_path / "b")
    save_ranks(tmp_path / "c", lambda model, rank, world: {"model": fsdp2(model, rank, world), "step": 7, "host": rank}, 2)
    assert "parts-differ" in [note.code for note in ckpt_tools.convert(tmp_path / "c", tmp_path / "c.pth").notes]
    assert torch.load(tmp_path / "c.pth", weights_only=True)["step"] == 7
    save_ranks(
        tmp_path / "d", lambda model, rank, world: {"model": fsdp2(model, rank, world)} | dict.fromkeys(["late"] * rank, 1), 2
    )
    assert "'late'" in next(row.text for row in ckpt_tools.convert(tmp_path / "d", tmp_path / "d.pth").notes)


def test_sums_and_flat_rows_are_refused(tmp_path: Path) -> None:
    """Partial tensors, and FSDP1's one row of all parameters, are refused by name."""

    def partial(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        return {"w.weight": DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (world,)), [Partial()], run_check=False)}

    save_ranks(tmp_path / "a", partial, 2)
    with pytest.raises(PartError, match=r"'w\.weight' is a sum"):
        ckpt_tools.inspect(tmp_path / "a")
    save_ranks(tmp_path / "b", lambda _, rank, world: {"net._flat_param": sharded(torch.arange(6.0), rank, world)}, 2)
    with pytest.raises(PartError, match="LOCAL_STATE_DICT"):
        ckpt_tools.inspect(tmp_path / "b")


def test_boxes_that_leave_something_out(tmp_path: Path) -> None:
    """A rank that holds nothing of what it should leaves a hole, which is said in elements."""

    def cut(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        made = sharded(torch.arange(6.0), rank, world)
        if rank == 1:
            made._local_shards = []
        return {"w.weight": made}

    save_ranks(tmp_path, cut, 2)
    with pytest.raises(PartError, match=r"'w\.weight' is not whole: 3 of its 6 elements are on rank 0"):
        ckpt_tools.inspect(tmp_path)


def test_names_of_rank_files(tmp_path: Path) -> None:
    """dinov2's names work as verl's do; several models in one folder are a question, answered by naming a file."""
    expected = save_ranks(tmp_path, fsdp2, 2, name="model_0001.rank_{rank}.pth")
    assert equal(load_state_dict(tmp_path), expected)
    save_ranks(tmp_path, fsdp2, 2, name="model_0002.rank_{rank}.pth")
    with pytest.raises(NotACheckpointError, match="not a checkpoint"):
        load_state_dict(tmp_path)
    assert equal(load_state_dict(tmp_path / "model_0002.rank_1.pth"), expected)


def test_what_lies_beside_the_parts_is_checked(tmp_path: Path) -> None:
    """`ckpt check FOLDER` takes the parts together, and every other checkpoint in the folder by itself."""
    save_ranks(tmp_path, fsdp2, 2)
    torch.save({"w.weight": torch.ones(2)}, tmp_path / "other.pth")
    shown = ckpt("check", "--json", tmp_path).output
    assert "other.pth" in shown
    assert "rank_1" not in shown


def test_a_state_beside_that_is_each_ranks_own(tmp_path: Path) -> None:
    """Random states differ between ranks by their nature; the first rank's is taken."""
    save_ranks(tmp_path / "in", lambda model, rank, world: {
        "model": fsdp2(model, rank, world), "rng_state": torch.full((4,), rank, dtype=torch.uint8)
    }, 2)  # fmt: skip
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["rng_state"].tolist() == [0, 0, 0, 0]


def test_a_tensor_that_is_all_that_a_rank_has(tmp_path: Path) -> None:
    """Its path is empty: it is joined as any other, and cannot be left out."""

    def cut(model: nn.Module, rank: int, world: int) -> Any:
        return fsdp2(model, rank, world)["emb.weight"]

    expected = save_ranks(tmp_path / "in", cut, 2)["emb.weight"]
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth", weights_only=True), expected)
    torch.save({"w": torch.ones(2)}, tmp_path / "in" / "model_world_size_2_rank_1.pt")
    with pytest.raises(PartError, match="is not on rank"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "part.pth", partial=True)


def test_rows_without_names() -> None:
    """What FSDP1 saved as LOCAL_STATE_DICT: rows of parameters without names are refused, and what to do is said."""
    with pytest.raises(PartError, match="without their names: FSDP1's LOCAL_STATE_DICT") as caught:
        load_state_dict(ROOT / "fsdp1" / "local-bf16")
    assert "SHARDED_STATE_DICT" in caught.value.fix
