"""What a conversion would write, as live tensors."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch

from ckpt_tools.operations.convert.conversion import open_input
from ckpt_tools.operations.convert.edits import Edits
from ckpt_tools.operations.convert.options import ConvertOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.torch.building import Builder
from ckpt_tools.torch.loading import choose, loadable


def load_edited(path: str | os.PathLike[str], options: ConvertOptions) -> dict[str, torch.Tensor]:
    """The only state dict of what `convert` with these options would write, as live tensors."""
    edits = Edits(options)
    with ExitStack() as stack, open_input(path, options) as checkpoint:
        checkpoint.root = edits.apply(checkpoint, Converted(str(path), ""), stack).root
        vars(checkpoint).pop("state_dicts", None)  # of the tree as it was
        state_dict = choose(checkpoint, None)
        root = loadable(state_dict.node, path)
        loaded: dict[str, torch.Tensor] = Builder(checkpoint, "cpu" if options.map_location is None else None).build(root)
        checkpoint.decoded.source.check_unchanged()
        return loaded
