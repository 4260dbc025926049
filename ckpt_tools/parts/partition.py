"""Files that hold one process's part of a model: named as what they are, and never taken for the model.

Source: deepspeed/runtime/engine.py, deepspeed/runtime/pipe/module.py, Megatron-LM's megatron/training/checkpointing.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeAlias

from ckpt_tools.errors import TensorError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.parts.names import CONSOLIDATED, ITEM, ITEM_METADATA, zero_kind
from ckpt_tools.text import dotted
from ckpt_tools.tree.findings import Finding
from ckpt_tools.tree.modules import attributes
from ckpt_tools.tree.nodes import Dict, Entry, List, Node

Files: TypeAlias = Callable[[], int]  # how many files of the checkpoint are there, this one among them
_GATHER = (
    "Load them where they were saved, on as many processes, and save the whole there: ckpt_tools.torch.save(model, OUT), or "
    "torch's get_model_state_dict with full_state_dict=True."
)
SAVE_ZERO = "Load the folder with DeepSpeed, on as many processes, and save the whole there: engine.save_16bit_model(FOLDER)."


@dataclass(slots=True, eq=False, repr=False)
class Partition:
    """What part of what a checkpoint is, and how to get the whole."""

    found: str
    fix: str
    family: str
    rank: int | None = None
    world: int | None = None
    parts: int | None = None
    tensors: int | None = None


def names_parts(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint names the classes of distributed tensors: without them it has none."""
    names = checkpoint.globals
    return any(name.module.startswith("torch.distributed.") and name.name in ("DTensor", "ShardedTensor") for name in names)


def without_advice(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings about a part, without commands that would be refused for it."""
    return (finding if not finding.fix.startswith("ckpt convert ") else replace(finding, fix="") for finding in findings)


# --- DTensor and ShardedTensor


def of_tensors(checkpoint: Checkpoint) -> Partition | None:
    """By the tensors of which only a part is here."""
    if not names_parts(checkpoint):
        return None
    from ckpt_tools.parts.rank_parts import Part, PartReader

    reader, parts, count = PartReader(), list[Part](), 0
    for count, tensor in enumerate(find_tensors(checkpoint.root), 1):  # noqa: B007  how many there were
        try:
            part = reader.read(tensor.node)
        except TensorError as error:
            text = str(error).replace("\n", " ").rstrip(".")
            return Partition(f"{dotted(tensor.where)!r} is distributed, and cannot be placed: {text}", _GATHER, "DTensor")
        parts += [part] if part is not None and not part.is_whole else []
    if not parts:
        return None
    world, rank = max(part.world for part in parts), next((part.rank for part in parts if part.rank is not None), None)
    one = f"one of {world} ranks" if rank is None else f"rank {rank} of {world}"
    found = f"{one}: 1/{max(part.shares for part in parts)} of {len(parts)} tensors"
    found += f", {count - len(parts)} are whole" if len(parts) < count else ""
    found += "; sums that the ranks have not added up (Partial)" if any(part.is_partial for part in parts) else ""
    family = "DTensor" if parts[0].kind == "dtensor" else "ShardedTensor"
    return Partition(found, _GATHER, family, rank, world, len(parts), count)


# --- by names and keys; patterns are compiled where one may be: most files are no part


def of_item(checkpoint: Checkpoint, files: Files) -> Partition | None:
    """A file of torch_checkpointing: by its name, and by the metadata.pkl beside it, which alone says how tensors were cut."""
    described = checkpoint.path.parent / ITEM_METADATA
    is_one = isinstance(described, Path) and described.is_file() and re.fullmatch(ITEM, checkpoint.path.name)
    count = files() - 1 if is_one else 0  # without the metadata
    if count < 1 or (count == 1 and names_parts(checkpoint)):  # a DTensor in a world of one is whole
        return None
    found = f"one of {count} ranks' files of an item that torch_checkpointing saved"
    return Partition(found, _GATHER, "torch_checkpointing", None, count)


# What these hold is plain tensors under names: only their own names say that the rest is elsewhere.
_ROWS = {"partition_count", "single_partition_of_fp32_groups", "fp32_flat_groups"}


def of_zero(checkpoint: Checkpoint, files: Files) -> Partition | None:
    """By what DeepSpeed calls what is in it, or by its name where that alone says it."""
    said, kind = named_in(checkpoint.root), zero_kind(checkpoint.name)[0]
    optimizer, size, shapes = named_in(said.get("optimizer_state_dict")), said.get("mp_world_size"), said.get("param_shapes")
    has_version, world = "ds_version" in said, _count(said.get("dp_world_size"))
    in_16_bits = bool(kind) and "param_shapes" in said
    if _ROWS & optimizer.keys():
        found = "one process's part of a DeepSpeed ZeRO optimizer, its weights in one row without names"
        world = _count(optimizer.get("partition_count"))
    elif has_version and type(size) is int and size > 1:
        found = f"one of {size} parts (tensor parallel ranks, or stages of a pipeline) of a DeepSpeed checkpoint"
        world = size
    elif has_version and type(shapes) in (List, Dict) and _is_zero_3(said.get("module")):
        found = "the names of a DeepSpeed ZeRO 3 checkpoint, which keeps the parts of the weights in the files zero_pp_rank_*"
    elif kind in ("expert", "layer") or (in_16_bits and (listed_in(said.get("num_experts")) or files() > 1)):
        found, world = "16-bit weights of a DeepSpeed checkpoint, the rest of which is in other files", None
    else:  # under stages 0 to 2 a model file is whole, in 16 bits
        return None
    return Partition(found, SAVE_ZERO, "DeepSpeed", None, world)


def named_in(node: Node) -> dict[str, Node]:
    return node.named if type(node) is Dict else {}


def listed_in(node: Node) -> Sequence[Node]:
    """The elements of a list; of anything else but None, that alone."""
    return node.items if type(node) is List else node if type(node) is tuple else () if node is None else (node,)


def _count(node: Node) -> int | None:
    return max((count for count in listed_in(node) if type(count) is int), default=None)


def _is_zero_3(weights: Node) -> bool:
    entries = [value for value in named_in(weights).values() if type(value) is Entry]
    empty = sum(not entry.numel for entry in entries)
    return weights is None or bool(empty and empty * 2 >= len(entries))


def of_consolidated(checkpoint: Checkpoint, files: Files) -> Partition | None:
    """Meta's Llama: by its name, and by the files beside it or what its shapes say."""
    match = re.fullmatch(CONSOLIDATED, checkpoint.name) if checkpoint.name.startswith("consolidated.") else None
    if match is None or type(checkpoint.root) is not Dict:
        return None
    if (world := max(files(), _parts_by_shape(checkpoint.root))) == 1:
        return None
    found = f"rank {int(match[1])} of {world} of Meta's model parallelism"
    return Partition(found, "Get all consolidated.*.pth of the model into one folder.", "Meta", int(match[1]), world)


def _parts_by_shape(root: Dict) -> int:
    """Of how many parts a rank's file is one, by the shapes in it; 1 for a whole model, and for what does not tell."""
    norm = root.get("norm.weight")
    rows = next((node for name, node in root.items if str(name).endswith("attention.wo.weight")), None)
    if type(norm) is not Entry or type(rows) is not Entry or len(norm.shape) != 1 or len(rows.shape) != 2:
        return 1
    whole, held = norm.shape[0], rows.shape[1]
    return whole // held if held and rows.shape[0] == whole and whole % held == 0 else 1


# NeMo's folders of ranks in a .nemo; a model of one rank has none. Source: nemo/collections/nlp/parts/nlp_overrides.py.
_NEMO_RANK = r"(?:.+/)?(?:mp_rank_\d+|tp_rank_\d+_pp_rank_\d+)/model_weights\.ckpt"


def arguments_of(root: Dict) -> Dict | None:
    """Megatron-LM's `args` in a checkpoint; a dict where they were made plain."""
    arguments = root.get("args")
    return arguments if type(arguments) is Dict else attributes(arguments)


def of_megatron(checkpoint: Checkpoint, _: Files) -> Partition | None:
    """Megatron-LM's: by its arguments; a member of a .nemo by its folder."""
    root = checkpoint.root
    if type(root) is not Dict:
        return None
    if checkpoint.packed is not None and re.fullmatch(_NEMO_RANK, checkpoint.packed.member):
        fix = "NeMo's own scripts write it for one rank (tensor_model_parallel_size=1)."
        return Partition("one rank's part of a model of NeMo", fix, "Megatron-LM")
    state = arguments_of(root) if "checkpoint_version" in root else None
    sizes = {kind: state.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")} if state else {}
    cut = {kind: size for kind, size in sizes.items() if type(size) is int and size > 1}
    if not cut:
        return None
    shown, world = " x ".join(f"{size} {kind}" for kind, size in cut.items()), prod(cut.values())
    found = f"one of {world} parts ({shown} parallel) of a Megatron-LM checkpoint"
    return Partition(found, "Megatron-LM's tools/checkpoint/convert.py writes it for one process.", "Megatron-LM", None, world)
