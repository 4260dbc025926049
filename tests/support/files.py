"""Checkpoints as torch and safetensors themselves write and read them, by the extension."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def save(path: Path, state: Any, **options: Any) -> Path:
    """Writes a file, and its folder; the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (save_file(state, path, **options) if path.suffix == ".safetensors" else torch.save(state, path, **options))
    return path


def load(path: Path) -> Any:
    """What a file holds; of a pickle plain data and tensors alone."""
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
