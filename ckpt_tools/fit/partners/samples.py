"""A few numbers of each tensor, for the stage that compares values: in runs from its start to its end, row-major."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.targets import Target, choose_state_dict
from ckpt_tools.formats.open import tensors_by_name
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.matching.params import Param
from ckpt_tools.tree.nodes import Dict, Entry, Node, as_dict
from ckpt_tools.values.numeric import has_numbers, numbers, part, row_major

_RUNS, _LENGTH = 8, 32


def _runs(numel: int) -> list[tuple[int, int]]:
    """The first number of each run, and how many it has; all of them where there are few."""
    if numel <= _RUNS * _LENGTH:
        return [(0, numel)]
    return [((numel - _LENGTH) * run // (_RUNS - 1), _LENGTH) for run in range(_RUNS)]


def sampled(params: Iterable[Param], node: Dict) -> tuple[Param, ...]:
    """The tensors of a state dict node, with samples. Its bytes must be at hand (`Checkpoint.locate`)."""
    nodes = tensors_by_name(node)
    return tuple(replace(param, sample=_of_entry(nodes[param.name])) for param in params)


def sampled_target(target: Target, select: str | None) -> tuple[Param, ...]:
    """The target's tensors, with samples: of a checkpoint's, of a live model's, or of what the callable makes.

    Raises:
        UsageError: it has no values.
    """
    if target.tensors is None:
        with open_whole(target.label) as checkpoint:
            checkpoint.locate()
            return sampled(target.params, as_dict(choose_state_dict(checkpoint, select, "like_select").node))
    tensors = target.tensors
    if target.on_meta and target.build is not None:
        made = target.build()
        tensors = made if isinstance(made, Mapping) else made.state_dict()
    samples = {param.name: _of_live(tensors[param.name]) for param in target.params}
    if not any(samples.values()):
        raise UsageError(f"`match='values'`: {target.label} has no values.", fix="`match='structure'` does without.")
    return tuple(replace(param, sample=samples[param.name]) for param in target.params)


def _of_entry(node: Node) -> tuple[float, ...] | None:
    if type(node) is not Entry or not has_numbers(node.dtype) or node.dtype.packed != 1 or node.dtype.family == "complex":
        return None
    content, size = row_major(node), node.dtype.itemsize
    runs = (part(content, start * size, length * size) for start, length in _runs(node.numel))
    return tuple(value for run in runs for block in numbers(run, node.dtype) for value in block.tolist()) or None


def _of_live(value: Any) -> tuple[float, ...] | None:
    if value.is_meta or value.is_complex() or value.is_sparse or value.is_quantized:
        return None
    flat = value.detach().reshape(-1)
    return (
        tuple(number for start, length in _runs(len(flat)) for number in flat[start : start + length].double().tolist()) or None
    )
