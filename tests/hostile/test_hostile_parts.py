"""Folders of parts that lie: about ranks, places, sizes and numbers. Each is refused by name at no great cost; nothing runs."""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import ckpt_tools
from ckpt_tools.errors import CkptError, PartError
from tests.support.counting import instructions
from tests.support.rank_files import fsdp2, save_ranks, sharded
from tests.support.samples import edit
from tests.support.zero_files import TAG, save_zero, trained

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MOST = 4_000_000  # bytecode instructions; a small folder of three ranks takes about a tenth of it


def expect_refused(folder: Path, text: str, **options: Any) -> None:
    """Every way to read the folder is refused with this text, and costs little."""
    out = folder.parent / "out.pth"

    def convert() -> None:
        with pytest.raises(CkptError, match=text):
            ckpt_tools.convert(folder, out, **options)

    assert instructions(convert) < MOST
    assert not out.exists()


# --- files of ranks


def test_ten_thousand_ranks(tmp_path: Path) -> None:
    """Names, and meshes, that claim so many ranks are told of what is missing without a list of all."""
    save_ranks(tmp_path / "in", fsdp2, 1)
    own = tmp_path / "in" / "model_world_size_1_rank_0.pt"
    own.rename(tmp_path / "in" / "model_world_size_999999_rank_0.pt")
    expect_refused(tmp_path / "in", "999998 of 999999 parts are missing: rank 1, rank 2")


def test_many_files_that_hold_nothing(tmp_path: Path) -> None:
    """Every rank's file is read once."""
    save_ranks(tmp_path / "in", lambda *_: {}, 1)
    own = tmp_path / "in" / "model_world_size_1_rank_0.pt"
    data = own.read_bytes()
    own.unlink()
    for rank in range(60):
        (tmp_path / "in" / f"model_world_size_60_rank_{rank}.pt").write_bytes(data)
    assert instructions(lambda: ckpt_tools.inspect(tmp_path / "in")) < MOST


MANY = torch.zeros(1, dtype=torch.int32).expand(10**9)


@pytest.mark.parametrize("change", [
    {"_flatten_rank_map": None}, {"_flatten_rank_map": (0, 0)}, {"_flatten_rank_map": (-1, 0)}, {"_rank": 1 << 70},
    {"_coordinate_on_dim": (5,)},
    {"_coordinate_on_dim": (0, 0)}, {"_coordinate_on_dim": (-1,)}, {"_layout": None},
    {"device_type": "cpu", "mesh": MANY, "_flatten_mesh_list": (0, 1), "_coordinate_on_dim": [0], "": "by torch 2.4"},
], ids=str)  # fmt: skip
def test_meshes_that_lie(change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of 10^9 ranks, of one rank twice, of negative ones; a rank that is not in it, or beside its place."""
    own = DeviceMesh.__getstate__
    monkeypatch.setattr(DeviceMesh, "__getstate__", lambda mesh: change if "" in change else {**own(mesh), **change})
    save_ranks(tmp_path / "in", fsdp2, 2)
    expect_refused(tmp_path / "in", "cannot be placed")


def test_a_rank_that_claims_anothers_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinate is another's, with a part of the right size: the box would be there twice, and one is missing."""

    def cut(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        return {"w.weight": fsdp2(nn.Linear(4, 4, bias=False), rank, world)["weight"]}

    own = DeviceMesh.__getstate__
    monkeypatch.setattr(DeviceMesh, "__getstate__", lambda mesh: {**own(mesh), "_coordinate_on_dim": (0,), "_rank": 0})
    save_ranks(tmp_path / "in", cut, 2)
    expect_refused(tmp_path / "in", "it is rank 1's, and holds the part of rank 0")


@pytest.mark.parametrize("sizes", [(-4, 4), (1 << 62, 1 << 62), (1 << 70,)])
def test_impossible_shapes_of_a_sharded_tensor(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Negative sizes, and products that overflow."""

    def cut(_: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        made = sharded(torch.arange(8.0), rank, world)
        made._metadata.shards_metadata[1].shard_sizes[:] = sizes
        return {"w.weight": made}

    save_ranks(tmp_path / "in", cut, 2)
    expect_refused(tmp_path / "in", "w.weight|size|part of a model")


def test_two_ranks_in_one_name(tmp_path: Path) -> None:
    """The last number is the rank; what stands before it is a name like any other."""
    save_ranks(tmp_path / "in", fsdp2, 2, name="model_world_size_2_rank_7_rank_{rank}.pt")
    assert len(ckpt_tools.inspect(tmp_path / "in").tensors) == 11
    (tmp_path / "in" / "model_world_size_2_rank_7_rank_1.pt").rename(tmp_path / "in" / "model_world_size_2_rank_8_rank_1.pt")
    expect_refused(tmp_path / "in", "not a checkpoint")


class _Canary:
    """What a pickle would call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("family", ["ranks", "deepspeed"])
def test_a_dangerous_file_among_others(family: str, tmp_path: Path) -> None:
    """The call of one rank's pickle is listed and rated, by every command, and never made."""
    canary = tmp_path / "made"
    if family == "ranks":
        save_ranks(tmp_path / "in", lambda model, rank, world: {
            "model": fsdp2(model, rank, world), "extra": _Canary(canary) if rank else None
        }, 2)  # fmt: skip
    else:
        zero(tmp_path, 2, lambda saved: saved.update(extra=_Canary(canary)), OPTIMIZER.format(1), 2)
    scanned = ckpt_tools.scan(tmp_path / "in")
    assert any(report.verdict == "dangerous" for report in scanned)
    ckpt_tools.inspect(tmp_path / "in")
    ckpt_tools.check(tmp_path / "in")
    with contextlib.suppress(CkptError):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", objects="plain")
    assert not canary.exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_rank_that_is_no_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe, or a folder, under a rank's name is refused, and nobody waits for it."""
    save_ranks(tmp_path / "in", fsdp2, 2)
    (tmp_path / "in" / "model_world_size_2_rank_1.pt").unlink()
    make(tmp_path / "in" / "model_world_size_2_rank_1.pt")
    expect_refused(tmp_path / "in", "rank_1.pt")


# --- DeepSpeed


def zero(folder: Path, stage: int, change: Callable[[dict[str, Any]], object], name: str = MODEL, world: int = 1) -> Path:
    """A folder of DeepSpeed in which one file is changed."""
    edit(save_zero(folder / "in", trained(), stage, world) / name, change)
    return folder / "in"


def optimizer(**values: Any) -> Callable[[dict[str, Any]], object]:
    """A change of what a rank's optimizer file says."""
    return lambda saved: saved["optimizer_state_dict"].update(values)


@pytest.mark.parametrize("shape", [(-1, 7), (1 << 40, 1 << 40), (1 << 70,), ("13", 7)])
def test_shapes_of_deepspeed_that_lie(shape: tuple[Any, ...], tmp_path: Path) -> None:
    """Negative sizes, products that overflow, and what is not a number."""
    folder = zero(tmp_path, 2, lambda saved: saved["param_shapes"][0].update({"emb.weight": shape}))
    expect_refused(folder, "the shape of 'emb.weight'|do not add up|impossible")


@pytest.mark.parametrize(("values", "text"), [
    ({"partition_count": 0}, "no partition_count"), ({"partition_count": -3}, "no partition_count"),
    ({"partition_count": [1, 10**12]}, "and 999999999994 more"), ({"partition_count": [1, 1, 1]}, ""),
    ({"param_alignment_paddings": [[1 << 62, 1 << 62], [0, 0, 0]]}, "do not add up"),
    ({"param_alignment_paddings": [[-1, 1], [0, 0, 0]]}, "param_alignment_paddings"),
    ({"single_partition_of_fp32_groups": [torch.zeros(1).expand(10**9)] * 2}, "not rows|overlap|impossible|views"),
    ({"single_partition_of_fp32_groups": []}, "has other ones"),
])  # fmt: skip
def test_counts_of_deepspeed_that_lie(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Numbers of ranks, fillings and rows that no job has."""
    folder = zero(tmp_path, 2, optimizer(**values), OPTIMIZER.format(0))
    if text:
        expect_refused(folder, text)
        expect_refused(folder, text, partial=True)
    else:
        assert ckpt_tools.inspect(folder).tensors


def test_ranks_of_deepspeed_that_nobody_has(tmp_path: Path) -> None:
    """With `partial` the missing ranks of a world of thousands cost little, and those of a million are refused."""
    folder = zero(tmp_path / "a", 3, optimizer(partition_count=1 << 16), OPTIMIZER.format(0), world=2)
    expect_refused(folder, "65536|several jobs", partial=True)
    folder = zero(tmp_path / "b", 1, optimizer(partition_count=1 << 16), OPTIMIZER.format(0))
    edit(folder / TAG / MODEL, lambda saved: saved.update(dp_world_size=1 << 16))
    expect_refused(folder, "do not add up", partial=True)


def test_experts_that_lie(tmp_path: Path) -> None:
    """A billion of experts, and groups that are cut among ranks as no mixture is."""
    expect_refused(
        zero(tmp_path / "a", 1, optimizer(partition_count=[2, 1]), OPTIMIZER.format(0), world=1), "missing: zero_pp_rank_1_"
    )
    folder = zero(tmp_path / "b", 1, lambda saved: saved.update(num_experts=[10**9]))
    shutil.copy(folder / TAG / MODEL, folder / TAG / "layer_0_expert_0_mp_rank_00_model_states.pt")
    expect_refused(folder, "Experts are missing|something else than an expert")


def test_ties_of_deepspeed_in_a_circle(tmp_path: Path) -> None:
    """Names that are tied to each other, and to what is not there."""
    folder = zero(tmp_path, 2, lambda saved: saved.update(shared_params={"x.a": "x.b", "x.b": "x.a"}))
    with pytest.raises(PartError, match="is tied to"):
        ckpt_tools.inspect(folder)
