"""The files of a pipeline's layers: the 16-bit weights, without the names that they have in the model.

    layer_03-model_states.pt              MUST  the state dict of the layer, of each that has one
    layer_03-model_00-model_states.pt     the same where there are tensor parallel ranks

The model calls a layer by its number (`3.weight`), and one that several stages share `tied_modules.KEY`.

Source: deepspeed/runtime/pipe/module.py (`save_state_dict`, `_build`, `ckpt_layer_path`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.errors import PartError
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.values.boxes import Sizes

_TIED = "tied_modules."


def module_of(roots: Mapping[str, tuple[int, Node]], shapes: Mapping[str, Sizes]) -> Dict:
    """The 16-bit weights by their names in the model.

    Args:
        roots: what the files hold, with the number of the layer, by name. shapes: of all weights in the optimizer.

    Raises:
        PartError: a file holds something else than tensors by name; a layer may be one of several that are tied.
    """
    tied: dict[str, dict[str, Sizes]] = {}
    for name, shape in shapes.items():
        key, found, rest = name.removeprefix(_TIED).partition(".")
        if name.startswith(_TIED) and found:
            tied.setdefault(key, {})[rest] = shape
    known = {name.partition(".")[0] for name in shapes}
    made: dict[str, Node] = {}
    for file, (number, root) in roots.items():
        if type(root) is not Dict or any(type(name) is not str for name, _ in root.items):
            raise PartError(f"{file} holds something else than the weights of a layer by name.")
        prefix = f"{number}." if str(number) in known else _prefix_of_tied(file, number, root, tied)
        for name, value in root.named.items():
            made.setdefault(f"{prefix}{name}", value)
    return Dict(list(made.items()), ordered=True)


def _prefix_of_tied(file: str, number: int, root: Dict, tied: Mapping[str, Mapping[str, Sizes]]) -> str:
    """What a layer is called of which the optimizer has no weight under its number: a tied one, or one that is not trained."""
    own = {name: value.shape for name, value in root.named.items() if type(value) is Entry}
    fitting = [key for key, shapes in tied.items() if all(own.get(name) == shape for name, shape in shapes.items())]
    if len(fitting) > 1:
        raise PartError(f"{file} may be each of several layers that stages share: {', '.join(sorted(fitting)[:5])}.")
    return f"{_TIED}{fitting[0]}." if fitting else f"{number}."
