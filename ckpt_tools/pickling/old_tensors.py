"""Tensors, Variables and Parameters as PyTorch pickled them up to 0.4: an object of the class, and a state.

    torch.FloatTensor()               state (storage, offset, size, stride)
    torch.nn.parameter.Parameter(t)   state (requires_grad, volatile, hooks)
                                      in 0.1 (tensor, gradient, hooks, requires_grad, volatile)
    torch.autograd.variable.Variable(t)   the same

The state comes after the object is in the memo, so they are exchanged once the pickle is read.

Source: torch/_tensor.py, `Tensor.__setstate__`; torch/_weights_only_unpickler.py, BUILD.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpt_tools.errors import TensorError
from ckpt_tools.pickling.torch_objects import extras_of, rebuild_tensor
from ckpt_tools.tree import exchange, visit
from ckpt_tools.tree.dtypes import BY_STORAGE, DType
from ckpt_tools.tree.nodes import Build, Entry, Global, Node, Object, Storage

_PARAMETER = Global("torch.nn.parameter", "Parameter")
VARIABLE = Global("torch.autograd.variable", "Variable")
TENSOR_CLASSES: dict[Global, DType] = {
    Global(module, storage.removesuffix("Storage") + "Tensor"): dtype
    for module in ("torch", "torch.cuda")
    for storage, dtype in BY_STORAGE.items()
    if dtype.family in ("float", "int", "bool")
}
_OF_VALUES = frozenset((
    Global("torch", "Tensor"),
    *(Global(f"{name.module}.sparse", name.name) for name in TENSOR_CLASSES),
))  # fmt: skip
_CLASSES = frozenset((*TENSOR_CLASSES, *_OF_VALUES, _PARAMETER, VARIABLE))


def modernise(root: Node, names: Iterable[Global]) -> Node:
    """The tree with such objects as entries; anything of another shape stays an object."""
    if _CLASSES.isdisjoint(names) or not any(type(node) is Object and _is_old(node) for node in visit.reachable(root)):
        return root
    return exchange.replace(root, _modern)


def _is_old(node: Object) -> bool:
    return type(node.function) is Global and node.function in _CLASSES


def _modern(node: Node) -> Node:
    if type(node) is not Object or node.call == "none" or not _is_old(node):
        return node
    function = node.function
    assert type(function) is Global
    if function in _OF_VALUES:
        raise _of_values(node)
    if function not in TENSOR_CLASSES:
        return _variable(node)
    state = _state(node)
    if node.args or len(state) != 4 or type(state[0]) is not Storage or state[0].dtype is not TENSOR_CLASSES[function]:
        raise _of_values(node)
    return rebuild_tensor(state)


def _of_values(node: Object) -> TensorError:
    return TensorError(f"The pickle makes a {node.name} in a way that torch does not write.")


def _variable(node: Object) -> Node:
    state = _state(node)
    if len(state) == 5:
        data, _, hooks, requires_grad, _ = state
    elif len(state) in (0, 3) and type(node.args) is tuple and 1 <= len(node.args) <= 2:
        data, is_parameter = node.args[0], node.function == _PARAMETER
        grad = node.args[1] if len(node.args) == 2 else is_parameter
        requires_grad, _, hooks = state or (grad, False, None)
    elif node.function == _PARAMETER:
        raise _of_values(node)
    else:
        return node
    if node.steps and not state:
        raise _of_values(node)
    if type(data) is Object and _is_old(data) and data.function in TENSOR_CLASSES:
        data = _modern(data)
    if type(data) is not Entry or data.extras is not None or type(requires_grad) is not bool:
        if node.function == _PARAMETER:
            raise _of_values(node)
        return node
    kind = data.kind if node.function == VARIABLE else "parameter"
    return replace(data, requires_grad=requires_grad, kind=kind, extras=extras_of(hooks))


def _state(node: Object) -> tuple[Node, ...]:
    """The state that is set, where nothing else happens to the object and it is a tuple; else an empty one."""
    step = node.steps[0] if len(node.steps) == 1 else None
    return step.state if type(step) is Build and type(step.state) is tuple else ()
