"""Load code: checkpoints as live tensors and in live models, names without wrappers, atomic saves. It needs torch.

from ckpt_tools.torch import load_into, load_state_dict, save
report = load_into(model, "ddp.pth")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    from ckpt_tools.torch.building import MapLocation
    from ckpt_tools.torch.guarding import Fate, Guard, guard, guarded
    from ckpt_tools.torch.into import load_into
    from ckpt_tools.torch.live_names import add_prefix, strip_prefix, unwrap
    from ckpt_tools.torch.loading import load, load_state_dict
    from ckpt_tools.torch.report import LoadReport
    from ckpt_tools.torch.saving import save

__all__ = [
    "Fate", "Guard", "LoadReport", "MapLocation", "add_prefix", "guard", "guarded", "load", "load_into", "load_state_dict",
    "save", "strip_prefix", "unwrap",
]  # fmt: skip

_HOMES = {
    "Fate": "guarding", "Guard": "guarding", "guard": "guarding",
    "guarded": "guarding",
    "LoadReport": "report", "MapLocation": "building", "add_prefix": "live_names", "load": "loading", "load_into": "into",
    "load_state_dict": "loading", "save": "saving", "strip_prefix": "live_names", "unwrap": "live_names",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when first used: who only wants a state dict does not wait for the matching, nor `ckpt_tools.open` for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt_tools.torch' has no attribute {name!r}")
    need_torch("Load code works on live tensors and modules.")
    from importlib import import_module

    return getattr(import_module(f"ckpt_tools.torch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What completion and help() show: also the names that are not imported yet."""
    return sorted({*globals(), *__all__})
