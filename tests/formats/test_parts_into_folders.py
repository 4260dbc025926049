"""The files of ranks into folders: torch's own reader takes the training state, and every edit goes with every folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckpt_tools
from tests.formats.test_rank_files import stepped
from tests.support.rank_files import fsdp2, net, save_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def training(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
    """FSDP2's model and AdamW after a step, the optimizer by names."""
    state = fsdp2(model, rank, world)
    return {"model": state, "optim": named_optimizer(model)}


def named_optimizer(model: nn.Module) -> dict[str, Any]:
    """The state of AdamW after a step, as `get_optimizer_state_dict` names it."""
    return dict(get_optimizer_state_dict(model, stepped(model)))


def test_torch_resumes_from_them(tmp_path: Path) -> None:
    """Model and optimizer of 3 ranks, as dcp, fill a job of one by torch's own reader, bit for bit."""
    save_ranks(tmp_path / "in", training, 3)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "dcp", format="dcp")
    model = net()
    optim = named_optimizer(model)
    blank = {name: {key: torch.zeros_like(value) for key, value in state.items()} for name, state in optim["state"].items()}
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    target: dict[str, Any] = {"model": weights, "optim": {"state": blank}}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(target["model"][name], value) for name, value in model.state_dict().items())
    assert len(optim["state"]) == len(list(model.parameters()))
    for name, state in optim["state"].items():
        assert all(torch.equal(target["optim"]["state"][name][key], value) for key, value in state.items())


def test_edits_compose_with_shards(tmp_path: Path) -> None:
    """`select`, `unwrap`, `rename`, `dtype` and `like` of a folder in one call, into shards."""

    def cut(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        return {"model": {f"_orig_mod.{name}": value for name, value in fsdp2(model, rank, world).items()}}

    expected = save_ranks(tmp_path / "in", cut, 3)
    wanted = {name.replace("emb.", "embed."): value.bfloat16() if value.is_floating_point() else value
              for name, value in expected.items()}  # fmt: skip
    (tmp_path / "like").mkdir()
    save_file({name: value.clone() for name, value in wanted.items()}, tmp_path / "like.safetensors")
    ckpt_tools.convert(tmp_path / "like.safetensors", tmp_path / "like", shard_size="200B", overwrite=True)
    report = ckpt_tools.convert(
        tmp_path / "in", tmp_path / "out", select="model", unwrap=True, rename=r"^emb\.=embed.", dtype="bf16",
        like=str(tmp_path / "like"), shard_size="200B",
    )  # fmt: skip
    assert report.files > 1
    ckpt_tools.convert(tmp_path / "out", tmp_path / "one.safetensors")
    found = load_file(tmp_path / "one.safetensors")
    assert {name for name in wanted if name not in report.aliases} <= set(found)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
