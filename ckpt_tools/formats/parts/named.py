"""Files that hold one process's part of every tensor: read like any other, and worth a word, since no model loads them alone.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`), Megatron-LM's
`megatron/training/checkpointing.py`.
"""

from __future__ import annotations

from ckpt_tools.tree.modules import attributes
from ckpt_tools.tree.nodes import (
    Dict,
    Entry,
    List,
    Node,
    Object,
)

_MERGE = "In the folder of the checkpoint: python zero_to_fp32.py . OUT (DeepSpeed puts the script there)."


def partition(root: Node) -> tuple[str, str] | None:
    """What part of what a checkpoint is, and how to get the whole; None for anything that is no part."""
    if type(root) is not Dict:
        return None
    return _of_zero(root) or _of_megatron(root)


def _of_zero(root: Dict) -> tuple[str, str] | None:
    optimizer = root.get("optimizer_state_dict")
    if "ds_config" in root and type(optimizer) is Dict and "partition_count" in optimizer:
        return "one process's part of a DeepSpeed ZeRO optimizer, its weights in one row without names", _MERGE
    if "ds_version" not in root or type(root.get("param_shapes")) not in (List, Dict):
        return None
    weights = root.get("module")
    entries = [value for _, value in weights.items if type(value) is Entry] if type(weights) is Dict else []
    empty = sum(not entry.numel for entry in entries)
    if weights is None or (empty and empty * 2 >= len(entries)):
        what = f"{empty} of {len(entries)} tensors have no elements" if entries else "there are no weights"
        return f"{what}: DeepSpeed ZeRO 3 keeps the parts of the weights in the files zero_pp_rank_*", _MERGE
    return None


def _of_megatron(root: Dict) -> tuple[str, str] | None:
    arguments = root.get("args")
    state = attributes(arguments) if type(arguments) is Object and "checkpoint_version" in root else None
    if state is None:
        return None
    sizes = [state.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    counts = [size if type(size) is int else 1 for size in sizes]
    if counts[0] * counts[1] < 2:
        return None
    found = f"one of {counts[0]} x {counts[1]} parts (tensor x pipeline parallel) of a Megatron-LM checkpoint"
    return found, "Megatron-LM's tools/checkpoint/convert.py writes it for one process."
