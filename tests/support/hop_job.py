"""What each process of a four-process job does: trains eight steps unbroken, and eight with a hop after four.

Run by tests.support.job: hop_job.py ZERO OUT. OUT gets `losses.json`: eight losses of each way, four of the one from ZeRO.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt_tools
from tests.support.hop import STEPS, adamw, batch, net

zero, out = Path(sys.argv[1]), Path(sys.argv[2])
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "pair"))["pair"]  # ranks 0 and 1; 2 and 3 do the same
all_four = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
HALF = STEPS // 2


class Run:
    """A model in training on the ranks of a mesh, sharded or (under DistributedDataParallel) whole on each."""

    def __init__(self, mesh: DeviceMesh, *, whole: bool = False) -> None:
        self.mesh = mesh
        model = net()
        self.model: nn.Module = DistributedDataParallel(model, process_group=mesh.get_group()) if whole else cut(model, mesh)
        self.optimizer = adamw(self.model)

    def train(self, first: int, last: int) -> list[float]:
        """Steps `first` to `last`; the loss over all samples of each."""
        losses = []
        for step in range(first, last):
            images, labels = batch(step, self.mesh.get_local_rank(), self.mesh.size())
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach().double()
            dist.all_reduce(total, group=self.mesh.get_group())
            losses.append(total.item() / self.mesh.size())
        return losses

    def state(self) -> dict[str, Any]:
        """What torch's own functions take out of a run, and load."""
        return {"model": get_model_state_dict(self.model), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def load(self, state: dict[str, Any], *, whole: bool = False) -> None:
        """Put such a state into the run; `whole`: its tensors are."""
        options = StateDictOptions(full_state_dict=whole)
        set_model_state_dict(self.model, state["model"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state["optimizer"], options=options)

    def resume(self, folder: Path) -> None:
        """Load a dcp, each rank its part."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.load(state)


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, layer by layer."""
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def convert(source: Path, target: Path, **options: Any) -> Path:
    """The first rank converts, the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        ckpt_tools.convert(source, target, **options)
    dist.barrier()
    return target


losses = {"unbroken": Run(pairs).train(0, STEPS)}

begun = Run(pairs)
half = begun.train(0, HALF)
if dist.get_rank() < 2:
    (out / "ranks").mkdir(exist_ok=True)
    torch.save(begun.state(), out / "ranks" / f"model_world_size_2_rank_{dist.get_rank()}.pt")

resumed = Run(all_four)
resumed.resume(convert(out / "ranks", out / "dcp", format="dcp"))
losses["rank files -> dcp -> FSDP2"] = half + resumed.train(HALF, STEPS)

ddp = Run(all_four, whole=True)
ddp.load(torch.load(convert(out / "ranks", out / "one.pth"), weights_only=True), whole=True)
wrapped = ddp.train(HALF, HALF + 2)
if dist.get_rank() == 0:
    optimizer = get_optimizer_state_dict(ddp.model, ddp.optimizer)
    torch.save({"model": ddp.model.state_dict(), "optimizer": optimizer}, out / "ddp.pth")
back = Run(all_four)
back.resume(convert(out / "ddp.pth", out / "back", format="dcp", strip_module=True))
losses["rank files -> .pth -> DDP -> FSDP2"] = half + wrapped + back.train(HALF + 2, STEPS)

from_zero = Run(all_four)
from_zero.resume(convert(zero, out / "zero", format="dcp", select="training"))
losses["ZeRO-3 -> dcp -> FSDP2"] = from_zero.train(HALF, STEPS)

if dist.get_rank() == 0:
    (out / "losses.json").write_text(json.dumps(losses))
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of gloo that still run abort an interpreter that winds down
