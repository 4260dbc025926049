"""Inspect and convert PyTorch checkpoints without executing anything in them. Importing this imports no torch."""

from __future__ import annotations

from ckpt_tools._version import __version__
from ckpt_tools.checkpoint import Checkpoint, open_checkpoint
from ckpt_tools.convert import Converted, convert
from ckpt_tools.describe import Description, inspect
from ckpt_tools.errors import CkptError

__all__ = ["Checkpoint", "CkptError", "Converted", "Description", "__version__", "convert", "inspect", "open_checkpoint"]
