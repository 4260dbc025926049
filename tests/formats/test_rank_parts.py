"""One rank's part of a model is named as such and never passes for the model; what is whole on a rank is read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import ckpt_tools
from ckpt_tools.errors import PartError
from ckpt_tools.torch import load, load_into, load_state_dict, save
from tests.support.rank_files import Net, fsdp1, fsdp2, fsdp_tp, hsdp, net, rank_of, save_ranks, tp

FAMILIES = {"FSDP1": fsdp1, "FSDP2": fsdp2, "HSDP": hsdp, "TP": tp, "FSDP2 x TP": fsdp_tp}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Rank 3 of 4 of every family, each alone in a folder."""
    found = {}
    for family, cut in FAMILIES.items():
        folder = tmp_path_factory.mktemp(cut.__name__)
        save_ranks(folder, cut, 4)
        for path in folder.glob("*_[012].pt"):
            path.unlink()
        found[family] = folder / "model_world_size_4_rank_3.pt"
    return found


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole model, for what takes two files."""
    path = tmp_path_factory.mktemp("whole") / "model.pth"
    torch.save(net().state_dict(), path)
    return path


CALLS: dict[str, Callable[[Path, Path, Path], Any]] = {
    "convert": lambda part, _, out: ckpt_tools.convert(part, out),
    "keep": lambda part, _, out: ckpt_tools.convert(part, out, objects="keep"),
    "plain": lambda part, _, out: ckpt_tools.convert(part, out, objects="plain"),
    "drop": lambda part, _, out: ckpt_tools.convert(part, out, objects="drop"),
    "safetensors": lambda part, _, out: ckpt_tools.convert(part, out.with_suffix(".safetensors"), objects="plain"),
    "slim": lambda part, _, out: ckpt_tools.convert(part, out, slim=True),
    "ema": lambda part, _, out: ckpt_tools.convert(part, out, ema=True),
    "keep-glob": lambda part, _, out: ckpt_tools.convert(part, out, objects="plain", keep="bn.*"),
    "shards": lambda part, _, out: ckpt_tools.convert(part, out.with_suffix(""), objects="plain", shard_size="1KB"),
    "dcp": lambda part, _, out: ckpt_tools.convert(part, out.with_suffix(""), objects="plain", format="dcp"),
    "dry": lambda part, _, out: ckpt_tools.convert(part, out, objects="plain", dry_run=True),
    "like": lambda part, model, out: ckpt_tools.convert(part, out, objects="plain", like=model),
    "as-target": lambda part, model, out: ckpt_tools.convert(model, out, like=part),
    "in-place-plain": lambda part, *_: ckpt_tools.edit_in_place(part, objects="plain"),
    "in-place-drop": lambda part, *_: ckpt_tools.edit_in_place(part, objects="drop"),
    "diff": lambda part, model, _: ckpt_tools.diff(part, model),
    "diff-right": lambda part, model, _: ckpt_tools.diff(model, part, values=True),
    "stats": lambda part, *_: ckpt_tools.stats(part),
    "average": lambda part, model, out: ckpt_tools.average([part, model], out, objects="plain"),
    "match": lambda part, model, _: ckpt_tools.match(part, like=model),
    "match-target": lambda part, model, _: ckpt_tools.match(model, like=part),
    "repair": lambda part, _, out: ckpt_tools.repair(part, out.with_suffix(".safetensors")),
    "load": lambda part, *_: load(part),
    "load_state_dict": lambda part, *_: load_state_dict(part),
    "load_into": lambda part, *_: load_into(Net(), part),
}


@pytest.mark.parametrize(("call", "family"), [*((call, "FSDP2") for call in CALLS), *(("convert", each) for each in FAMILIES)])
def test_a_part_is_no_model(call: str, family: str, parts: dict[str, Path], model_file: Path, tmp_path: Path) -> None:
    """Whatever would write, load, measure or compare a part as the model refuses it by name, and writes nothing."""
    before = parts[family].read_bytes()
    with pytest.raises(PartError, match="rank 3 of 4: 1/") as caught:
        CALLS[call](parts[family], model_file, tmp_path / "out.pth")
    assert "ckpt_tools.torch.save(model, OUT)" in caught.value.fix
    assert not list(tmp_path.iterdir())
    assert parts[family].read_bytes() == before


@pytest.mark.parametrize(("family", "found"), [
    ("FSDP1", "rank 3 of 4: 1/4 of 8 tensors, 3 are whole"),
    ("FSDP2", "rank 3 of 4: 1/4 of 8 tensors, 3 are whole"),
    ("HSDP", "rank 3 of 4: 1/2 of 8 tensors, 3 are whole"),
    ("TP", "rank 3 of 4: 1/4 of 3 tensors, 8 are whole"),
    ("FSDP2 x TP", "rank 3 of 4: 1/4 of 8 tensors, 3 are whole"),
])  # fmt: skip
def test_inspect_and_check_name_the_part(family: str, found: str, parts: dict[str, Path]) -> None:
    """Both say whose part it is, of what; no command that is shown would be refused; the JSON says where it lies."""
    described = ckpt_tools.inspect(parts[family])
    assert described.findings[0].code == "partition"
    assert described.findings[0].found == found
    assert described.part is not None
    kind = "ShardedTensor" if family == "FSDP1" else "DTensor"
    assert (described.part["rank"], described.part["world"], described.part["family"]) == (3, 4, kind)
    checked = ckpt_tools.check(parts[family])
    assert checked.verdict == "findings"
    assert found in [finding.found for finding in checked.findings]
    assert not [finding.fix for finding in (*described.findings, *checked.findings) if finding.fix.startswith("ckpt convert")]
    row = next(row for row in described.tensors if row["name"] == "a.weight")
    assert row["shape"] == [5, 7]
    sizes = [box["shape"] for box in row["part"]["held"]]
    assert row["bytes"] == sum(4 * rows * columns for rows, columns in sizes)


def test_repair_keeps_a_part_a_part(parts: dict[str, Path], tmp_path: Path) -> None:
    """What it writes loads on the same rank."""
    repaired = ckpt_tools.repair(parts["FSDP2"], tmp_path / "again.pt")
    assert "partition" in [code for code, _ in repaired.notes]
    with rank_of(3, 4):
        loaded = torch.load(tmp_path / "again.pt", weights_only=False)
    assert loaded["emb.weight"].to_local().shape == (1, 7)


@pytest.mark.parametrize("cut", [fsdp1, fsdp2, tp])
def test_a_world_of_one_is_whole(cut: Callable[..., Mapping[str, Any]], tmp_path: Path) -> None:
    """Distributed tensors of which a rank has all are the tensors: every command takes them, ties stay."""
    expected = save_ranks(tmp_path, cut, 1)
    path = tmp_path / "model_world_size_1_rank_0.pt"
    assert "partition" not in [finding.code for finding in ckpt_tools.inspect(path).findings]
    loaded = load_state_dict(path)
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    report = ckpt_tools.convert(path, tmp_path / "out.safetensors")
    assert "distributed-tensors" in [note.code for note in report.notes]
    assert ckpt_tools.diff(path, tmp_path / "out.safetensors").same
    model = Net()
    assert load_into(model, path)
    assert torch.equal(model.emb.weight, expected["emb.weight"])
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")
    assert torch.equal(torch.load(tmp_path / "out.pth", weights_only=True)["b.bias"], expected["b.bias"])
    ckpt_tools.convert(path, tmp_path / "slim.pth", slim=True)
    assert list(torch.load(tmp_path / "slim.pth", weights_only=True)) == list(expected)


def place(path: Path, tensor: torch.Tensor, placements: list[Any]) -> Path:
    """A file of rank 1 of 2 with one DTensor made of this local tensor."""
    with rank_of(1, 2):
        made = DTensor.from_local(tensor, init_device_mesh("cpu", (2,)), placements, run_check=False)
        torch.save({"w.weight": nn.Parameter(made), "bias": torch.ones(2)}, path)
    return path


def test_replicated_tensors_are_read(tmp_path: Path) -> None:
    """What every rank has whole is the tensor; the object and its globals are gone."""
    path = place(tmp_path / "a.pt", torch.arange(6.0).view(2, 3), [Replicate()])
    assert ckpt_tools.inspect(path).tensors[0]["kind"] == "dtensor"
    ckpt_tools.convert(path, tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)["w.weight"]
    assert torch.equal(made, torch.arange(6.0).view(2, 3))


def old_state(mesh: DeviceMesh) -> dict[str, Any]:
    """What torch 2.4 to 2.8 pickle of a mesh."""
    coordinate = mesh.get_coordinate()
    return {"device_type": "cpu", "mesh": mesh.mesh, "mesh_dim_names": list(mesh.mesh_dim_names or ()), "_thread_id": None,
            "_coordinate_on_dim": None if coordinate is None else list(coordinate)}  # fmt: skip


@pytest.mark.parametrize("family", ["HSDP", "TP", "FSDP2 x TP"])
def test_meshes_of_older_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh that pickles its tensor of ranks, with a list of them beside it, says the same."""
    save_ranks(tmp_path / "new", FAMILIES[family], 4)

    def state(mesh: DeviceMesh) -> dict[str, Any]:
        return old_state(mesh) | {"_flatten_mesh_list": tuple(mesh.mesh.flatten().tolist())}

    monkeypatch.setattr(DeviceMesh, "__getstate__", state)
    monkeypatch.setattr(DTensor, "__module__", "torch.distributed._tensor.api")
    save_ranks(tmp_path / "old", FAMILIES[family], 4)
    for rank in range(4):
        new, old = (ckpt_tools.inspect(tmp_path / age / f"model_world_size_4_rank_{rank}.pt") for age in ("new", "old"))
        assert [row["part"]["held"] for row in new.tensors if "part" in row] == [
            row["part"]["held"] for row in old.tensors if "part" in row
        ]
        assert old.part is not None
        assert old.part["rank"] == rank


def test_sharded_tensors_are_not_saved_as_a_model(tmp_path: Path) -> None:
    """FSDP1's sharded state dict is refused by `save`, with torch's own way to the whole one."""
    with rank_of(0, 2), pytest.raises(PartError, match="ShardedTensors") as caught:
        save(fsdp1(net(), 0, 2), tmp_path / "a.pth")
    assert "FULL_STATE_DICT" in caught.value.fix
    assert not list(tmp_path.iterdir())
