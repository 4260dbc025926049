"""Tensors that an edit would lose although no option asked for it: --drop has to name them, or they are an error."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path

from ckpt_tools.errors import ObjectsError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, Tensor, find_state_dicts, find_tensors, is_extra, is_tensor
from ckpt_tools.text import dotted, listed
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.modules import SAVED, attributes, hidden_names, is_module, mapping
from ckpt_tools.tree.nodes import Dict, Entry, Global, Node, Object, Storage, Where
from ckpt_tools.tree.quantised_modules import in_text, is_saved_by_code
from ckpt_tools.tree.visit import reachable, walk
from ckpt_tools.values.numeric import view_of

OUTSIDE = "no part of the state dict: a buffer with persistent=False, or computed from a parameter"
_SCRIPT_CLASSES = ("torch.ScriptObject", "__torch__.torch.classes.")


class Held:
    """Tensors that a tree holds before an edit, to be found again after it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)  # which keeps the ids of their storages in use
        self.storages = {id(tensor): _storages(tensor.node) for tensor in self.tensors if type(tensor.node) is not Entry}

    def lost(self, root: Node) -> list[Where]:
        left = list(find_tensors(root))
        views = {view_of(tensor.node) for tensor in left if type(tensor.node) is Entry}
        wheres = {tensor.where for tensor in left}
        storages = _storages(root) if self.storages else frozenset()

        def is_left(tensor: Tensor) -> bool:
            if type(tensor.node) is Entry:
                return view_of(tensor.node) in views
            own = self.storages[id(tensor)]
            return own <= storages if own else tensor.where in wheres  # a meta tensor has none

        return [tensor.where for tensor in self.tensors if not is_left(tensor)]


def _storages(node: Node) -> frozenset[int]:
    found = (below.storage if type(below) is Entry else below for below in reachable(node))
    return frozenset(id(below) for below in found if type(below) is Storage)


def model_parts(state_dict: StateDict) -> Iterator[tuple[str, Node]]:
    """What of a state dict belongs to the model: its tensors, and values under a name (packed weights, extra state)."""
    for key, value in state_dict.node.items:
        if type(key) is str and (is_tensor(value) or "." in key or is_extra(key)):
            yield key, value


def in_state_dicts(root: Node) -> Iterator[Tensor]:
    for state_dict in find_state_dicts(root):
        for key, value in model_parts(state_dict):
            for tensor in find_tensors(value):
                yield Tensor((*state_dict.where, key, *tensor.where), tensor.node)


def outside_state(root: Node) -> set[int]:
    """The ids of the tensors that modules below `root` keep out of their state dicts, and make anew."""
    found: set[int] = set()
    for module, state in _modules(root):
        hidden, names = hidden_names(state), {name for name, _ in mapping(state.get("_parameters"))}
        found |= {id(in_text(state))} if is_saved_by_code(module) else set()
        found |= {id(value) for name, value in mapping(state.get("_buffers")) if name in hidden}
        found |= {id(value) for name, value in state.items if type(name) is str and names & {f"{name}_orig", f"{name}_g"}}
    return found


def _modules(root: Node) -> Iterator[tuple[Object, Dict]]:
    for node in reachable(root, bare=False):
        if is_module(node) and type(node) is Object and (state := attributes(node)) is not None:
            yield node, state


def packed_tensors(root: Node) -> list[Where]:
    """The tensors of modules that only their own code puts into a state dict: quantised layers pack their weights."""
    packed: set[int] = set()
    for module, state in _modules(root):
        packed |= {id(child) for _, child in mapping(state.get("_modules")) if type(child) is Object and not is_module(child)}
        if not is_saved_by_code(module):
            packed |= {id(value) for name, value in state.items if name == SAVED or _is_script_object(value)}
    if not packed:
        return []
    found = walk(root, stop=lambda node: id(node) in packed, plain=False)
    return [(*where, *tensor.where) for where, node in found if id(node) in packed for tensor in find_tensors(node)]


def _is_script_object(node: Node) -> bool:
    return type(node) is Object and type(node.function) is Global and node.name.startswith(_SCRIPT_CLASSES)


def check_lost(path: Path, lost: Sequence[Where], drop: Sequence[str] = (), *, are_numpys: bool = False) -> frozenset[str]:
    """The globs of --drop that name what would be lost, or what it lies in; ObjectsError unless they name all of it."""
    globs = Globs(drop)
    unnamed = [where for where in lost if not globs.matching(*(dotted(where[:end]) for end in range(1, len(where) + 1)))]
    if unnamed:
        kind, why = "tensor", "They are in objects whose plain form has no place for them."
        fix = "torch.load gives them back where their classes are: save a state dict there."
        if are_numpys:
            kind, why = "value", "torch has no dates, structures, numbers wider than float64, or tables of objects."
            leave = f"Leave it out: `drop={dotted(unnamed[0])!r}`. " if unnamed[0] else ""
            fix = f"{leave}`objects='keep'` keeps it as it is, in a .pth."
        shown = listed([dotted(where) or "the root" for where in unnamed], 8)
        raise ObjectsError(f"{tensors_of(path, unnamed, kind)} would be lost: {shown}.", why=why, fix=fix)
    return frozenset(glob for glob in globs if glob not in globs.unused)


def tensors_of(path: str | os.PathLike[str], lost: Sized, kind: str = "tensor") -> str:
    return f"{f'A {kind}' if len(lost) == 1 else f'{len(lost)} {kind}s'} of {path}"


def check_state_dict(checkpoint: Checkpoint, state_dict: StateDict) -> None:
    """Make sure that load code gets every tensor of a state dict, or of the module that gave it."""
    lost: list[Where] = [
        (key, *tensor.where) for key, value in model_parts(state_dict)
        if not is_tensor(value) and not is_extra(key) and type(value) is not Dict for tensor in find_tensors(value)
    ]  # fmt: skip
    where = state_dict.where
    if checkpoint.has_modules and not any(node is state_dict.node for node in reachable(checkpoint.root)):
        lost += [path for path in packed_tensors(checkpoint.root) if path[: len(where)] == where]
    if lost:
        raise ObjectsError(
            f"{tensors_of(checkpoint.path, lost)} would be missing: {listed([dotted(path) for path in lost], 8)}.",
            why="They are packed into objects, as quantised layers do it; only torch.load with the classes gives those back.",
        )
