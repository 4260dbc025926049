"""Load code: checkpoints as live tensors, names without wrappers, atomic saves. The part of ckpt_tools that imports torch.

from ckpt_tools.torch import load_state_dict, save
model.load_state_dict(load_state_dict("ddp.pth", map_location="cpu"))
"""

from __future__ import annotations

from ckpt_tools.torch.building import MapLocation
from ckpt_tools.torch.into import load_into
from ckpt_tools.torch.live_names import add_prefix, strip_prefix, unwrap
from ckpt_tools.torch.loading import load, load_state_dict
from ckpt_tools.torch.report import LoadReport
from ckpt_tools.torch.saving import save

__all__ = ["LoadReport", "MapLocation", "add_prefix", "load", "load_into", "load_state_dict", "save", "strip_prefix", "unwrap"]
