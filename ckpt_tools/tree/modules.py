"""Pickled `nn.Module`s and TorchScript programs, read off their records: what `state_dict()` would give, without the class.

Source: torch/nn/modules/module.py, `Module.state_dict` and `_save_to_state_dict`: parameters, then persistent buffers, then
the children, in order. What a class adds by code (`get_extra_state`, hooks, `_save_to_state_dict` of its own) is not there:
nothing is run. But the names that torch's own wrappers make are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from ckpt_tools import limits
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Object, Where
from ckpt_tools.tree.visit import component

# In one state dict: modules that hold themselves, or one another twice, would have endless names.
_MAX_DEPTH = 900
_TABLES = ("_parameters", "_buffers", "_modules")
SAVED = "<saved>"  # the attribute of a module that holds what its own code makes its tensors from
_COMPILED = (Global("torch._dynamo.eval_frame", "OptimizedModule"),)
_ORIGINAL = "_orig_mod"
_TRACED = Global("torch.fx.graph_module", "reduce_graph_module")
# torch.distributed's CheckpointWrapper takes this name out of state dicts, by a hook.
_TRANSPARENT = "_checkpoint_wrapped_module"


def attributes(node: Node) -> Dict | None:
    """The attributes of an instance, from the state that its pickle sets: a dict, or a pair of dict and slots."""
    if type(node) is not Object:
        return None
    state = node.state
    if state is None and type(node.args) is tuple and type(node.function) is Global and node.args:
        if node.function in _COMPILED and is_module(node.args[0]):
            return Dict([("_parameters", Dict()), ("_buffers", Dict()), ("_modules", Dict([(_ORIGINAL, node.args[0])]))])
        return node.args[0] if node.function == _TRACED and type(node.args[0]) is Dict else None
    if type(state) is tuple and len(state) == 2 and {type(part) for part in state} <= {Dict, type(None)}:
        return Dict([pair for part in state if type(part) is Dict for pair in part.items])
    return state if type(state) is Dict else None


def mapping(node: Node) -> list[tuple[Node, Node]]:
    """The items of a dict or of an object that behaves like one."""
    if type(node) is Dict:
        return node.items
    return node.pairs if type(node) is Object else []


def is_lightning(root: Node) -> bool:
    """Whether a checkpoint is a run that Lightning saved."""
    return type(root) is Dict and root.get("pytorch-lightning_version") is not None


def is_module(node: Node) -> TypeGuard[Object]:
    """Whether an object is an `nn.Module`: it has the three tables that every module has."""
    if type(node) is not Object:
        return False
    state = attributes(node)
    return state is not None and all(type(state.get(table)) in (Dict, Object) for table in _TABLES)


def submodules(module: Object) -> Iterator[tuple[str, Object, Dict]]:
    """Every module with the prefix of its names ("", "conv1.") and its attributes, in the order of `state_dict()`."""
    todo: list[tuple[str, int, Node]] = [("", 0, module)]
    spare = limits.MEMORY.value
    while todo:
        prefix, depth, node = todo.pop()
        state = attributes(node)
        if type(node) is not Object or state is None:
            continue
        own = sum(len(mapping(state.get(table))) for table in _TABLES)
        spare -= (len(prefix) + 16) * (own + 1)
        if spare < 0 or depth > _MAX_DEPTH:
            raise limits.MEMORY.error("A pickled module has more sub-modules than a model has: they may hold one another.")
        yield prefix, node, state
        children = mapping(state.get("_modules"))
        inside = [(name, child) for name, child in reversed(children) if child is not None]
        paths = (prefix if name == _TRANSPARENT else f"{prefix}{component(name)}." for name, _ in inside)
        todo.extend((path, depth + 1, child) for path, (_, child) in zip(paths, inside, strict=True))


def named_tensors(module: Object) -> Iterator[tuple[str, Node]]:
    """Names and values in the order of `state_dict()`, Parameters as they are."""
    from ckpt_tools.tree.quantised_modules import plain_weight, saved_by_code  # few files need it

    for prefix, node, state in submodules(module):
        hidden = hidden_names(state)
        buffers = [pair for pair in mapping(state.get("_buffers")) if pair[0] not in hidden]
        for name, value in (*mapping(state.get("_parameters")), *buffers):
            if value is not None:
                yield f"{prefix}{component(name)}", plain_weight(value)
        yield from ((f"{prefix}{name}", value) for name, value in saved_by_code(module, node.name, state, prefix))


def hidden_names(state: Dict) -> frozenset[str]:
    """The names of the buffers that a module keeps out of its state dict, from its attributes."""
    return _set_items(state.get("_non_persistent_buffers_set"))


def module_state_dict(module: Object) -> Dict:
    """What `state_dict()` of a pickled module would give: tensors without gradients, ties kept."""
    return Dict([(name, _detached(value)) for name, value in named_tensors(module)], ordered=True)


def settings(module: Object) -> Iterator[tuple[Where, Node]]:
    """The attributes of a module and of its sub-modules that its author set: no tables, hooks and other private things."""
    for prefix, _, state in submodules(module):
        path = tuple(prefix.split(".")[:-1])
        for name, value in state.items:
            if type(name) is str and name != "training" and not name.startswith("_"):
                yield (*path, name), value


def classes(module: Object) -> Iterator[tuple[Where, str]]:
    """The class of a module and of its sub-modules, by their paths in it."""
    for prefix, node, _ in submodules(module):
        yield tuple(prefix.split(".")[:-1]), node.name


def _detached(node: Node) -> Node:
    """A Parameter as `state_dict()` shows it: the tensor in it."""
    return replace(node, requires_grad=False, kind="tensor") if type(node) is Entry else node


def _set_items(node: Node) -> frozenset[str]:
    if type(node) is Object and type(node.args) is tuple and node.args and type(node.args[0]) is List:
        return frozenset(item for item in node.args[0].items if type(item) is str)
    return frozenset()
