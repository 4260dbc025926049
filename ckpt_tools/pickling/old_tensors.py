"""Tensors, Variables and Parameters as PyTorch pickled them up to 0.4: an object of the class, and a state.

`torch.FloatTensor()` has the state (storage, offset, size, stride); `Parameter(t)` and `Variable(t)` have (requires_grad,
volatile, hooks), in 0.1 (tensor, gradient, hooks, requires_grad, volatile). Source: torch/_tensor.py, `Tensor.__setstate__`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpt_tools.errors import TensorError
from ckpt_tools.pickling.torch_objects import Untaken, extras_of, need, rebuild_tensor
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
_OF_VALUES = {Global("torch", "Tensor"), *(Global(f"{name.module}.sparse", name.name) for name in TENSOR_CLASSES)}
_CLASSES = frozenset((*TENSOR_CLASSES, *_OF_VALUES, _PARAMETER, VARIABLE))


def modernise(root: Node, names: Iterable[Global]) -> Node:
    """The tree with such objects as entries; a Variable of another shape stays an object."""
    if _CLASSES.isdisjoint(names) or not any(type(node) is Object and _is_old(node) for node in visit.reachable(root)):
        return root
    return exchange.replace(root, _modern)


def _is_old(node: Object) -> bool:
    return type(node.function) is Global and node.function in _CLASSES and node.call != "none"


def _modern(node: Node) -> Node:
    if type(node) is not Object or not _is_old(node):
        return node
    step = node.steps[0] if len(node.steps) == 1 else None
    state = step.state if type(step) is Build and type(step.state) is tuple else ()
    try:
        need(bool(state) or not node.steps)
        dtype = TENSOR_CLASSES.get(node.function) if type(node.function) is Global else None
        if dtype is None:
            return _variable(node, state)
        need(not node.args and len(state) == 4 and type(state[0]) is Storage and state[0].dtype is dtype)
        return rebuild_tensor(state)
    except Untaken:
        if node.function == VARIABLE:
            return node
        raise TensorError(f"The pickle makes a {node.name} in a way that torch does not write.") from None


def _variable(node: Object, state: tuple[Node, ...]) -> Node:
    need(node.function in (VARIABLE, _PARAMETER))
    if len(state) == 5:
        data, _, hooks, requires_grad, _ = state
    else:
        given = node.args if type(node.args) is tuple else ()
        need(len(state) in (0, 3) and 1 <= len(given) <= 2)
        data, grad = given[0], given[1] if len(given) == 2 else node.function == _PARAMETER
        requires_grad, _, hooks = state or (grad, False, None)
    data = _modern(data) if type(data) is Object and data.function in TENSOR_CLASSES else data
    if type(data) is not Entry or data.extras is not None or type(requires_grad) is not bool:
        raise Untaken
    kind = data.kind if node.function == VARIABLE else "parameter"
    return replace(data, requires_grad=requires_grad, kind=kind, extras=extras_of(hooks))
