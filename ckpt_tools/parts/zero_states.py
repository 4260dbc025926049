"""What the files of a DeepSpeed ZeRO checkpoint say: facts by name out of the trees of their pickles.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`); `state_dict` in deepspeed/runtime/zero/stage_1_and_2.py and
stage3.py, and in deepspeed/runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ckpt_tools.errors import PartError
from ckpt_tools.pickling.torch_objects import sizes_of
from ckpt_tools.tree.nodes import MAX_ELEMENTS, Dict, Entry, List, Node
from ckpt_tools.values.boxes import Sizes

_STAGE_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """What a model file says."""

    file: str
    root: Dict
    module: Dict
    buffers: frozenset[str]
    shapes: tuple[dict[str, Sizes], ...]
    frozen: dict[str, Sizes]
    fragments: dict[str, Entry]
    shared: dict[str, str]
    world: int | None
    step: int | None
    rules: Dict | None

    @property
    def names(self) -> list[str]:
        """The parameters in the optimizer."""
        return [name for group in self.shapes for name in group]


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """What one rank's optimizer file says."""

    file: str
    is_stage_3: bool
    flat: tuple[Entry, ...]
    world: int
    counts: tuple[int, ...]
    paddings: tuple[Sizes, ...] | None
    states: dict[int, Dict]
    groups: tuple[Dict, ...]


def read_model(file: str, root: Node, *, in_layers: bool = False) -> ModelState:
    """The facts of a model file."""
    module = root.get("module") if type(root) is Dict else None
    module = Dict(ordered=True) if module is None and in_layers else module
    if type(root) is not Dict or type(module) is not Dict:
        raise _malformed(file, "it has no weights (`module`)")
    shapes = tuple(_shapes(file, group) for group in _listed(root.get("param_shapes")))
    names = [name for group in shapes for name in group]
    if len(names) != len(set(names)):
        raise _malformed(file, "a parameter is in two groups")
    fragments = {name: value for name, value in _items(root.get("frozen_param_fragments")) if type(value) is Entry}
    world, step, rules = root.get("dp_world_size"), root.get("global_steps"), root.get("universal_checkpoint_info")
    return ModelState(
        file, root, module, frozenset(name for name in _listed(root.get("buffer_names")) if type(name) is str),
        shapes, _shapes(file, root.get("frozen_param_shapes")), fragments,
        {name: holder for name, holder in _items(root.get("shared_params")) if type(holder) is str},
        world if type(world) is int else None, step if type(step) is int else None, rules if type(rules) is Dict else None,
    )  # fmt: skip


def read_optimizer(file: str, root: Node) -> OptimizerState:
    """The facts of a rank's optimizer file."""
    state = root.get("optimizer_state_dict") if type(root) is Dict else None
    if type(state) is not Dict or (_STAGE_2 not in state and _STAGE_3 not in state):
        raise _malformed(file, "it has no part of the weights (single_partition_of_fp32_groups, fp32_flat_groups)")
    if "ds_zero_partition_groups" in state:
        raise _malformed(file, "its experts are cut among other ranks than the rest under stage 3, which is not read")
    is_stage_3 = _STAGE_3 in state
    counts = tuple(count for count in _listed(state.get("partition_count")) if type(count) is int)
    if not counts or min(counts) < 1:
        raise _malformed(file, "it has no partition_count")
    rows = _listed(state.get(_STAGE_3 if is_stage_3 else _STAGE_2))
    flat = tuple(entry for entry in rows if type(entry) is Entry and len(entry.shape) == 1 and entry.is_contiguous)
    if len(flat) != len(rows):
        raise _malformed(file, "its weights are not rows")
    world = max(counts)
    counts = counts if len(counts) == len(flat) else (world,) * len(flat)
    inner = state.get("optimizer_state_dict" if is_stage_3 else "base_optimizer_state")
    groups = inner.get("param_groups") if type(inner) is Dict else None
    return OptimizerState(
        file, is_stage_3, flat, world, counts, _paddings(file, state.get("param_alignment_paddings")),
        dict(_states(inner)), tuple(group for group in _listed(groups) if type(group) is Dict),
    )  # fmt: skip


def _states(inner: Node) -> Iterator[tuple[int, Dict]]:
    """The states by the number of their row; an elastic checkpoint of old versions has a list of them."""
    found = enumerate(inner.items) if type(inner) is List else _pairs(inner.get("state") if type(inner) is Dict else None)
    return ((number, state) for number, state in found if type(number) is int and type(state) is Dict)


def _paddings(file: str, node: Node) -> tuple[Sizes, ...] | None:
    if node is None:
        return None
    found = [sizes_of(group) for group in _listed(node)]
    if any(group is None or min(group, default=0) < 0 for group in found):
        raise _malformed(file, "its param_alignment_paddings are not numbers")
    return tuple(group for group in found if group is not None)


def _shapes(file: str, node: Node) -> dict[str, Sizes]:
    shapes = {name: sizes_of(value) for name, value in _items(node)}
    for name, shape in shapes.items():
        if shape is None or min(shape, default=0) < 0 or prod(shape) > MAX_ELEMENTS:
            raise _malformed(file, f"the shape of {name!r} is not one")
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _listed(node: Node) -> Sequence[Node]:
    """The elements of a list; of anything else but None, that alone."""
    if type(node) is List:
        return node.items
    return node if type(node) is tuple else () if node is None else (node,)


def _pairs(node: Node) -> Sequence[tuple[Node, Node]]:
    return node.items if type(node) is Dict else ()


def _items(node: Node) -> Iterator[tuple[str, Node]]:
    return ((name, value) for name, value in _pairs(node) if type(name) is str)


def _malformed(file: str, why: str) -> PartError:
    return PartError(f"{file} cannot be joined with the others: {why}.")
