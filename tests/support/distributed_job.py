"""What each process of a two-process job does: loads a folder that we wrote, saves what it holds under FSDP2 and in columns.

Run by tests.support.job: distributed_job.py OURS THEIRS
"""

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

ours, theirs = sys.argv[1:]
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))

model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float64))
fully_shard(model, mesh=mesh)
columns = distribute_tensor(torch.zeros(3, 7), mesh, [Shard(1)])
state: dict[str, Any] = {"model": model.state_dict(), "columns": columns, "tied": torch.zeros(5, 6), "epoch": 0}
dcp.load(state, checkpoint_id=ours)  # resharded: it was written by one process
torch.manual_seed(1)
expected = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float64)).state_dict()
for name, tensor in model.state_dict().items():
    assert torch.equal(tensor.full_tensor(), expected[name]), name
assert torch.equal(columns.full_tensor(), torch.arange(21.0).view(3, 7))
assert torch.equal(state["tied"], expected["0.weight"])
assert state["epoch"] == 7

saved = {"model": model.state_dict(), "columns": columns, "nested": {"lr": 0.5, "list": [torch.ones(2), {"x": [1, 2]}]}}
dcp.save(saved, checkpoint_id=theirs)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of gloo that still run abort an interpreter that winds down
