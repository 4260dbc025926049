"""Python attributes that were set on tensors: `torch.save` keeps them, and what has no place for them says so."""

from __future__ import annotations

from ckpt_tools.errors import ContainerLimitError
from ckpt_tools.formats.open import find_tensors
from ckpt_tools.text import dotted, some
from ckpt_tools.tree.nodes import Dict, Entry, Node, Where


def tensor_attributes(root: Node) -> dict[Where, Node]:
    """The attributes of every tensor below `root`, by the tensor's path and their names."""
    found: dict[Where, Node] = {}
    for tensor in find_tensors(root):
        if type(tensor.node) is not Entry or tensor.node.extras is None:
            continue
        state = tensor.node.extras.state
        for part in state if type(state) is tuple else (state,):  # a pair where the class has __slots__
            found.update(((*tensor.where, str(name)), value) for name, value in (part.items if type(part) is Dict else ()))
    return found


def check_no_tensors(attributes: dict[Where, Node], container: str) -> None:
    """Raise ContainerLimitError where attributes hold tensors, which an output of this container would lose."""
    if lost := [dotted(where) for where, value in attributes.items() if next(find_tensors(value), None) is not None]:
        raise ContainerLimitError(
            f"{container} has no place for attributes of tensors, and {some(lost)} hold tensors.",
            fix="Leave them out with `objects='drop'`, or write a .pth, which keeps them.",
        )
