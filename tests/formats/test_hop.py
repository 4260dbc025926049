"""A training run moves between frameworks half-way, and its losses are those of one that did not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

import ckpt_tools
from tests.support.hop import STEPS, adamw, batch, net
from tests.support.rank_files import rank_of
from tests.support.samples import FIXTURES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ZERO = FIXTURES / "deepspeed" / "hop"  # four steps under ZeRO-3 on two ranks: fixtures/makers/zero_hop.py
HALF = STEPS // 2


class Run:
    """A model in training; its state is what torch's own functions take out of a run."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = adamw(self.model)

    def train(self, first: int, last: int) -> list[float]:
        """Steps `first` to `last`, and their losses."""
        losses = []
        for step in range(first, last):
            images, labels = batch(step, 0, 1)
            loss = cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """Model and optimizer by names."""
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))


def save_ranks(folder: Path, state: dict[str, Any]) -> Path:
    """As FSDP2 has them on three ranks, of which no size is a multiple."""
    folder.mkdir()
    for rank in range(3):
        with rank_of(rank, 3):
            mesh = init_device_mesh("cpu", (3,))

            def cut(value: Any, mesh: Any = mesh) -> Any:
                is_cut = isinstance(value, torch.Tensor) and value.dim()
                return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) if is_cut else value

            torch.save(tree_map(cut, state), folder / f"model_world_size_3_rank_{rank}.pt")
    return folder


@pytest.mark.parametrize(
    ("source", "target"), [("ranks of FSDP2", "dcp"), ("ranks of FSDP2", "one.pth"), ("ZeRO-3", "dcp"), ("ZeRO-3", "one.pth")]
)
def test_losses_after_a_hop_are_those_of_the_unbroken_run(source: str, target: str, tmp_path: Path) -> None:
    """By torch's own reader; a sum of another order may change the last digit of a float32. DeepSpeed trained the same run."""
    losses = Run().train(0, STEPS)
    assert json.loads((ZERO / "losses.json").read_text()) == pytest.approx(losses, abs=5e-7)
    assert losses[-1] != pytest.approx(losses[-2], abs=0.1)
    (begun := Run()).train(0, HALF)
    folder = ZERO if source == "ZeRO-3" else save_ranks(tmp_path / "in", begun.state())
    select = "training" if source == "ZeRO-3" else None
    ckpt_tools.convert(folder, tmp_path / target, select=select, format="dcp" if target == "dcp" else None)
    resumed = Run()
    found = resumed.state()
    if target == "dcp":
        dcp.load(found, checkpoint_id=tmp_path / target, no_dist=True)
    else:
        found = torch.load(tmp_path / target, weights_only=True)
    set_state_dict(resumed.model, resumed.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert resumed.train(HALF, STEPS) == pytest.approx(losses[HALF:], abs=5e-7)
