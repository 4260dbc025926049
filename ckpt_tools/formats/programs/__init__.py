"""What programs compute, read in their files and never run."""

from __future__ import annotations

from ckpt_tools.formats.base import Decoded
from ckpt_tools.tree.graphs import Graph


def graph_in(decoded: Decoded) -> Graph | None:
    """The graph of a program, None of anything else."""
    if decoded.container == "torch-export":
        from ckpt_tools.formats.programs import exported

        return exported.graph_in(decoded)
    if decoded.container == "torchscript":
        from ckpt_tools.formats.programs import scripted

        return scripted.graph_in(decoded)
    return None
