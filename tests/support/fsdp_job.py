"""What each process of a two-process job does: saves an FSDP2 model whole, and loads files into one.

Run by torchrun: fsdp_job.py FOLDER
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, os.getcwd())
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
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of gloo that still run abort an interpreter that winds down
