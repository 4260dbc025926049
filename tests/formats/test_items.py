"""A folder of torch_checkpointing becomes what was saved: DTensors, and plain tensors that only metadata.pkl places."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import CkptError, DamagedFileError, PartError, UnsupportedContainerError
from ckpt_tools.torch import load_state_dict
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES

GENUINE = FIXTURES / "torch_checkpointing" / "fsdp2"
Row = dict[str, Any]
Cut = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, Row]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The genuine folder, to be changed."""
    return Path(shutil.copytree(GENUINE / "step_2", tmp_path / "step_2"))


def test_every_item_is_whole() -> None:
    """The model equals what it was before it was cut, the optimizer what torch gathers; an item of its own is a value."""
    reference = torch.load(GENUINE / "reference.pth")
    model = load_state_dict(GENUINE / "step_2", select="model")
    assert all(torch.equal(model[name], value) for name, value in reference["model"].items())
    assert list(model) == list(reference["model"])
    found = ckpt_tools.inspect(GENUINE / "step_2")
    assert (found.container, found.values["step"], found.part) == ("rank-files", 2, None)
    assert ckpt_tools.check(GENUINE / "step_2").verdict != "unreadable"


def test_the_optimizer_is_torchs(tmp_path: Path) -> None:
    """`--select optim` gives the state dict that torch gathers, tensor for tensor."""
    ckpt_tools.convert(GENUINE / "step_2", tmp_path / "optim.pth", select="optim")
    written = torch.load(tmp_path / "optim.pth")
    wanted = torch.load(GENUINE / "reference.pth")["optim"]
    assert written["param_groups"] == wanted["param_groups"]
    for name, state in wanted["state"].items():
        assert all(torch.equal(written["state"][name][key], value) for key, value in state.items())


def test_one_file_stands_for_its_item(tmp_path: Path) -> None:
    """A rank's file is a part; with those beside it, it becomes the item alone."""
    path = GENUINE / "step_2" / "model_1.pt"
    assert (ckpt_tools.inspect(path).part or {})["world"] == 3
    ckpt_tools.convert(path, tmp_path / "model.safetensors")
    assert ckpt_tools.diff(path, tmp_path / "model.safetensors").same
    assert ckpt_tools.inspect(tmp_path / "model.safetensors").totals["tensors"] == 8


def test_dtensors_need_no_metadata(folder: Path) -> None:
    """Without metadata.pkl one file stands for those beside it, since DTensors say their place; a missing one is named."""
    whole = load_state_dict(folder, select="model")
    (folder / "metadata.pkl").unlink()
    loaded = load_state_dict(folder / "model_1.pt")
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())
    (folder / "model_2.pt").unlink()
    with pytest.raises(PartError, match="of a job of 3 ranks"):
        load_state_dict(folder / "model_1.pt")


def test_a_missing_rank_is_named(folder: Path) -> None:
    """Without a rank's file the item is refused, before anything is written."""
    (folder / "model_1.pt").unlink()
    with pytest.raises(PartError, match="missing: rank 1"):
        load_state_dict(folder, select="model")
    report = ckpt_tools.convert(folder, folder.parent / "rest.pth", partial=True)
    assert "model.0.weight" in dict(report.dropped)
    assert list(torch.load(folder.parent / "rest.pth")["model"]) == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]


# --- plain tensors, which only metadata.pkl places


def rows(tensor: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, Row]:
    """A share of the rows, as DTensorShardingMetadata says it."""
    parts = list(tensor.chunk(world)) if tensor.dim() else [tensor] * world
    local = parts[rank] if rank < len(parts) else tensor[:0]
    placement = {"type": "Shard", "dim": 0} if tensor.dim() else {"type": "Replicate"}
    mesh = {"device_type": "cpu", "mesh_shape": (world,), "mesh_data": tuple(range(world)), "mesh_dim_names": None}
    data = {"global_shape": list(tensor.shape), "stride": list(tensor.stride()), "dtype": str(tensor.dtype)}
    row = {"type": "DTensorShardingMetadata", "data": data | {"mesh_spec": mesh, "placements": [placement]}}
    return local.clone(), {"sharding_metadata": row, "ranks": tuple(range(world))}


def boxes(tensor: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, Row]:
    """A share of the columns with a margin around it, as default_tensor_v1 says it."""
    if tensor.dim() < 2:
        at, local = ([], []) if rank else ([[0] * tensor.dim()], [list(tensor.shape)])
        data = {"global_shape": list(tensor.shape), "global_offsets": at, "local_offsets": at, "local_sizes": local}
        return tensor.clone(), {"sharding_metadata": _v1(data, tensor), "ranks": (rank,)}
    part = list(tensor.chunk(world, 1))[rank]
    start = sum(piece.shape[1] for piece in list(tensor.chunk(world, 1))[:rank])
    padded = torch.nn.functional.pad(part, (1, 2), value=9)
    data = {"global_shape": list(tensor.shape), "global_offsets": [[0, start]], "local_offsets": [[0, 1]],
            "local_sizes": [list(part.shape)]}  # fmt: skip
    return padded, {"sharding_metadata": _v1(data, tensor), "ranks": (rank,)}


def _v1(data: Row, tensor: torch.Tensor) -> Row:
    return {"type": "default_tensor_v1", "data": data | {"dtype": str(tensor.dtype)}}


def save(folder: Path, cut: Cut, world: int, dtype: torch.dtype = torch.float32, *, safetensors: bool = False) -> Row:
    """A folder of one item of plain tensors, under torch_checkpointing's rules; returns the whole."""
    torch.manual_seed(0)
    whole = {"a.weight": torch.randn(13, 8).to(dtype), "a.bias": torch.randn(5).to(dtype), "steps": torch.tensor(7)}
    described: Row = {}
    folder.mkdir()
    for rank in range(world):
        parts = {name: cut(value, rank, world) for name, value in whole.items()}
        held = {name: part.contiguous() for name, (part, _) in parts.items()}
        if safetensors:
            save_file(held, folder / f"m-{rank}.safetensors")
        else:
            torch.save(held, folder / f"model_{rank}.pt")
        for name, (_, row) in parts.items():
            found = described.setdefault(f'["{name}"]', [])
            found += [row] if row not in found else []
    layout = {"serialization_format": {"type": "SafetensorsSerialization"}}
    layouts = {rank: {"file_path": f"m-{rank}.safetensors"} | layout if safetensors else None for rank in range(world)}
    item = {"nested_path_to_metadata": described, "rank_to_layout_info": layouts}
    write(folder, {"metadata": {"model": item}, "world_size": world, "version": "2.0"})
    return whole


def write(folder: Path, content: object) -> None:
    """The folder's metadata.pkl."""
    (folder / "metadata.pkl").write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", [rows, boxes])
def test_plain_tensors_lie_where_metadata_says(cut: Cut, world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows by a mesh, columns with margins by offsets: the whole equals what was cut, bit for bit."""
    whole = save(tmp_path / "in", cut, world, dtype)
    loaded = load_state_dict(tmp_path / "in", select="model")
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())
    assert ckpt_tools.inspect(tmp_path / "in" / "model_0.pt").part
    assert torch.equal(load_state_dict(tmp_path / "in" / "model_0.pt")["a.weight"], whole["a.weight"])


def test_items_in_safetensors(tmp_path: Path) -> None:
    """Files of other names and in safetensors are read where metadata.pkl says so."""
    whole = save(tmp_path / "in", rows, 3, safetensors=True)
    for rank in range(3):
        torch.save(7, tmp_path / "in" / f"step_{rank}.pt")
    loaded = load_state_dict(tmp_path / "in", select="model")
    assert torch.equal(loaded["a.weight"], whole["a.weight"])


def item(content: Row) -> Row:
    """What is said of the model."""
    found: Row = content["metadata"]["model"]
    return found


def layout(path: str, kind: str) -> Callable[[Row], object]:
    """Both ranks have this file, of this format."""
    row = {"file_path": path, "serialization_format": {"type": kind}}
    return lambda content: item(content).update(rank_to_layout_info=dict.fromkeys(range(2), row))


LAUGHS: list[Any] = [0]
for _ in range(40):
    LAUGHS = [LAUGHS] * 40
EDITS: dict[str, tuple[Callable[[Row], object], type[CkptError], str]] = {
    "another shape": (
        lambda row: item(row)["nested_path_to_metadata"]['["a.weight"]'][0]["sharding_metadata"]["data"].update(
            global_shape=[99, 8]),
        PartError, "'a.weight' of rank 0 is not what metadata.pkl says"),
    "a path out of the folder": (
        layout("../../etc/passwd", "TorchSerialization"), DamagedFileError, "not a name inside its folder"),
    "shared lists without end": (
        lambda row: item(row)["nested_path_to_metadata"].update({'["x"]': LAUGHS}), DamagedFileError, "nested deeper"),
    "an unread format": (layout("a.json", "JsonSerialization"), UnsupportedContainerError, "JsonSerialization"),
    "another version": (lambda row: row.update(version="3.0"), UnsupportedContainerError, "version '3.0'"),
    "a world that lies": (lambda row: row.update(world_size=1 << 40), DamagedFileError, "does not describe its items"),
    "fewer ranks": (lambda row: row.update(world_size=1), DamagedFileError, "does not describe its items"),
    "no items": (lambda row: row.update(metadata=[]), DamagedFileError, "does not describe its items"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_what_metadata_lies_about_is_refused(name: str, tmp_path: Path) -> None:
    """Shapes, paths, worlds and versions that do not fit: an error that says which, in no time."""
    edit, error, said = EDITS[name]
    save(tmp_path / "in", rows, 2)
    content = pickle.loads((tmp_path / "in" / "metadata.pkl").read_bytes())
    edit(content)
    write(tmp_path / "in", content)
    with pytest.raises(error) as caught:
        load_state_dict(tmp_path / "in", select="model")
    assert said in str(caught.value)


def test_another_metadata_pkl_makes_no_items(tmp_path: Path) -> None:
    """Many things are called metadata.pkl: beside one of them every checkpoint of a folder stays its own."""
    for number in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"epoch_{number}.pt")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"labels": ["a"]}))
    shown = [json.loads(line)["path"] for line in ckpt("inspect", tmp_path, "--json").stdout.splitlines()]
    assert {Path(path).name for path in shown} >= {"epoch_0.pt", "epoch_1.pt"}
    assert ckpt_tools.inspect(tmp_path / "epoch_0.pt").part is None
