"""What each process of a two-process job does: saves an FSDP2 model whole, loads files into one, and folders by torch's reader.

Run by tests.support.job: fsdp_job.py FOLDER, in which a dcp that we wrote is called `ours`
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.torch import load_into, save
from tests.support.rank_files import Net, net

folder = Path(sys.argv[1])
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
expected = net().state_dict()

model = net()
fully_shard(model, mesh=mesh)
save(model, folder / "model.pth")
save(model, folder / "model.safetensors")
assert (folder / "model.safetensors").exists()  # in every process, once save has returned

optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
optimizer.step()
save({"model": model, "optimizer": optimizer.state_dict()}, folder / "training.pth")

other = Net()
fully_shard(other, mesh=mesh)
report = load_into(other, folder / "model.safetensors")
assert report, str(report)
for name, value in other.state_dict().items():
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert torch.equal(whole, expected[name]), name

# each rank takes its own rows, and its own columns, of any container
big = torch.nn.Linear(512, 512)
torch.manual_seed(0)
torch.nn.init.normal_(big.weight)
torch.nn.init.normal_(big.bias)
for tensor in big.parameters():
    dist.broadcast(tensor.data, 0)
whole_weight = big.weight.detach().clone()
fully_shard(big, mesh=mesh)
save(big, folder / "big.safetensors")
save(big, folder / "big.pth")
save(big, folder / "big", format="dcp")
for place in ("big.safetensors", "big.pth", "big"):
    rows: Any = torch.nn.Linear(512, 512)
    columns: Any = torch.nn.Linear(512, 512)
    fully_shard(rows, mesh=mesh)
    assert load_into(rows, folder / place)
    assert torch.equal(rows.weight.full_tensor(), whole_weight), place
    parallelize_module(columns, mesh, RowwiseParallel())
    assert load_into(columns, folder / place)
    assert torch.equal(columns.weight.full_tensor(), whole_weight), place
try:
    load_into(other, folder / "model.pth", assign=True)
except UsageError:
    pass
else:
    raise AssertionError("assign=True was taken")
try:
    save({"weight": next(model.parameters())}, folder / "missing" / "model.pth")
except CkptError:
    pass
else:
    raise AssertionError("a folder that is not there was written to")

# a folder that we wrote, in one process, loaded by torch's own reader; and what it saves of FSDP2 and in columns
pair = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float64))
fully_shard(pair, mesh=mesh)
columns = distribute_tensor(torch.zeros(3, 7), mesh, [Shard(1)])
state: dict[str, Any] = {"model": pair.state_dict(), "columns": columns, "tied": torch.zeros(5, 6), "epoch": 0}
dcp.load(state, checkpoint_id=folder / "ours")  # resharded: it was written by one process
torch.manual_seed(1)
wanted = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float64)).state_dict()
for name, tensor in pair.state_dict().items():
    assert torch.equal(tensor.full_tensor(), wanted[name]), name
assert torch.equal(columns.full_tensor(), torch.arange(21.0).view(3, 7))
assert torch.equal(state["tied"], wanted["0.weight"])
assert state["epoch"] == 7

saved = {"model": pair.state_dict(), "columns": columns, "nested": {"lr": 0.5, "list": [torch.ones(2), {"x": [1, 2]}]}}
dcp.save(saved, checkpoint_id=folder / "theirs")
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of gloo that still run abort an interpreter that winds down
