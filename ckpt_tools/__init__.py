"""Inspect, convert, check and repair PyTorch checkpoints, executing nothing in them. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_tools._version import __version__
from ckpt_tools.convert import convert
from ckpt_tools.errors import CkptError

if TYPE_CHECKING:
    from ckpt_tools.averaging import Averaged, average
    from ckpt_tools.checking.report import Checked
    from ckpt_tools.checking.run import check
    from ckpt_tools.converted import Converted
    from ckpt_tools.describe import Description, inspect
    from ckpt_tools.difference_report import Difference
    from ckpt_tools.differences import diff
    from ckpt_tools.formats.open import Checkpoint, open_checkpoint
    from ckpt_tools.inplace import edit_in_place
    from ckpt_tools.repairing.report import Repaired
    from ckpt_tools.repairing.run import repair
    from ckpt_tools.tensor_stats import Stats, stats

__all__ = [
    "Averaged",
    "Checked",
    "Checkpoint",
    "CkptError",
    "Converted",
    "Description",
    "Difference",
    "Repaired",
    "Stats",
    "__version__",
    "average",
    "check",
    "convert",
    "diff",
    "edit_in_place",
    "inspect",
    "open_checkpoint",
    "repair",
    "stats",
]

_HOMES = {
    "Averaged": "averaging",
    "Checked": "checking.report",
    "Checkpoint": "formats.open",
    "Converted": "converted",
    "Description": "describe",
    "Difference": "difference_report",
    "Repaired": "repairing.report",
    "Stats": "tensor_stats",
    "average": "averaging",
    "check": "checking.run",
    "diff": "differences",
    "edit_in_place": "inplace",
    "inspect": "describe",
    "open_checkpoint": "formats.open",
    "repair": "repairing.run",
    "stats": "tensor_stats",
}


def __getattr__(name: str) -> Any:
    """The other public names are imported when they are first used: `ckpt inspect` does not pay for `convert`."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt_tools' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ckpt_tools.{_HOMES[name]}"), name)
