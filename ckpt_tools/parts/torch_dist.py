"""torch_dist: what Megatron-core adds to a distributed checkpoint. `common.pt` beside it, and layers that are one tensor.

    .metadata, __0_0.distcp ...   a dcp; `decoder.layers.mlp.linear_fc1.weight` holds all layers, the layer its first dimension
    common.pt                     what every rank has: `args`, `iteration`, parameter groups of the optimizer

The tree stays what `.metadata` says. `--select model` makes the model's own state dict of it: layers under their numbers, the
halves of a gated matrix that were saved apart (`_w`, `_v`) as one, no optimizer and no `_extra_state`. How many layers there
are is taken from `args` alone.

Source: megatron/core/dist_checkpointing/strategies/common.py, megatron/core/transformer/transformer_block.py
(`sharded_state_dict`), megatron/core/transformer/mlp.py (`apply_swiglu_sharded_factory`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from ckpt_tools.errors import CkptError, PartError
from ckpt_tools.formats.base import Decoded, Keys, Warned
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.merge import Merger, Piece
from ckpt_tools.parts.names import COMMON
from ckpt_tools.tree.modules import attributes
from ckpt_tools.tree.nodes import Dict, Entry, Node, as_dict

_STACKED = re.compile(r"(?P<head>(?:.+\.)?layers)\.(?!\d+\.)(?P<rest>.+)")
_HALF = re.compile(r"(?P<name>.+\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])")
_NO_MODEL = ("optimizer", "rng_state", "opt_param_scheduler", "rerun_state_machine_state")
_EXTRA = "._extra_state"
_MOST_LAYERS = 100_000


def complete(decoded: Decoded, files: Files) -> Decoded:
    """A dcp with the `common.pt` beside it, if that tells of a job of Megatron-LM."""
    try:
        common = decode_file(files.open(COMMON)).root
    except CkptError as error:
        decoded.warnings = [*decoded.warnings, Warned("unread-member", f"{COMMON} is not read: {error.what.rstrip('.')}")]
        return decoded
    if type(common) is not Dict or not ("args" in common or "iteration" in common):
        return decoded
    decoded.beside = {"common": common}
    layers = _layers(common)
    stacked = [key for key, _ in _tensors(decoded.root) if _STACKED.fullmatch(key)]
    if stacked and layers is not None:
        decoded.others = {**decoded.others, "model": lambda: model_of(decoded.root, layers)}
        fix = f"ckpt convert {shlex.quote(str(files.path))} model.safetensors --select model"
        text = f"{len(stacked)} tensors each hold all {layers} layers; --select model numbers the layers"
        decoded.warnings = [*decoded.warnings, Warned("stacked-layers", text, "", "info", fix)]
    return decoded


def _layers(common: Dict) -> int | None:
    arguments = common.get("args")
    state = arguments if type(arguments) is Dict else attributes(arguments)
    layers = state.get("num_layers") if state is not None else None
    return layers if type(layers) is int and 0 < layers <= _MOST_LAYERS else None


def _tensors(root: Node) -> Iterator[tuple[str, Entry]]:
    for key, value in root.items if type(root) is Dict else ():
        if type(key) is str and type(value) is Entry and key.partition(".")[0] not in _NO_MODEL and _EXTRA not in key:
            yield key, value


def model_of(root: Node, layers: int) -> Dict:
    """The model's state dict, in the order of its layers."""
    stacks: dict[str, dict[str, Entry]] = {}  # by where the layers are: what each of them has
    plain: list[tuple[str, Entry | None]] = []  # in order; None where layers stand
    for key, entry in _tensors(root):
        match = _STACKED.fullmatch(key)
        if match is None:
            plain.append((key, entry))
            continue
        if not entry.shape or entry.shape[0] != layers:
            raise PartError(f"{key!r} is of shape {list(entry.shape)}, and args say that there are {layers} layers.")
        if match["head"] not in stacks:
            stacks[match["head"]] = {}
            plain.append((match["head"], None))
        stacks[match["head"]][match["rest"]] = entry
    numbered: dict[str, Entry] = {}
    for name, one in plain:
        if one is not None:
            numbered[name] = one
            continue
        for number in range(layers):
            numbered |= {f"{name}.{number}.{rest}": _layer(stack, number) for rest, stack in stacks[name].items()}
    return as_dict(Keys().renew(Dict(list(_whole(numbered)), ordered=True)))


def _layer(entry: Entry, number: int) -> Entry:
    return replace(
        entry, shape=entry.shape[1:], stride=entry.stride[1:], offset=entry.offset + number * entry.stride[0]
    )  # fmt: skip


def _whole(entries: dict[str, Entry]) -> Iterator[tuple[str, Node]]:
    """Every tensor; the two halves of a gated matrix as one, where the first of them stands."""
    merger = Merger(Keys())
    for key, entry in entries.items():
        match = _HALF.fullmatch(key)
        if match is None:
            yield key, entry
        elif match["half"] == "w":
            yield match["name"], _joined(merger, match["name"], entry, entries.get(f"{match['name']}_v"))
        elif f"{match['name']}_w" not in entries:
            raise PartError(f"{key!r} is one half of a matrix, and the other is missing.")


def _joined(merger: Merger, name: str, first: Entry, second: Entry | None) -> Entry:
    if second is None or (second.shape, second.dtype.name) != (first.shape, first.dtype.name):
        raise PartError(f"{name + '_w'!r} is one half of a matrix, and the other is missing or of another shape.")
    rows, *rest = first.shape
    start = (rows, *(0 for _ in rest))
    pieces = [Piece((0,) * len(first.shape), first), Piece(start, second, 1)]
    return merger.tensor(name, first.dtype, (2 * rows, *rest), pieces)
