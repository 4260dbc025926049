"""Names and values that only damage makes: a legacy file has no checksum, and torch would refuse what a flipped bit left."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tools.edit.devices import is_device
from ckpt_tools.errors import RepairError
from ckpt_tools.formats.open import find_tensors
from ckpt_tools.pickling.torch_objects import MAKERS
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import Entry, Global, Node, Object, Storage
from ckpt_tools.tree.visit import reachable

_REBUILDS = {name.name: str(name) for name in ALLOWED if name.module == "torch._utils"}


def damaged_names(names: Iterable[Global]) -> list[tuple[str, str]]:
    """Each name that torch does not allow, but that differs from an allowed one in one letter; and that one."""
    known: dict[int, list[str]] = {}
    for allowed in map(str, ALLOWED):
        known.setdefault(len(allowed), []).append(allowed)
    found = []
    for name in (str(name) for name in names if name not in ALLOWED and name not in MAKERS):
        near = (allowed for allowed in known.get(len(name), ()) if _one_differs(name, allowed))
        meant = next(near, None) or _REBUILDS.get(name.rpartition(".")[2])
        found += [(name, meant)] if meant is not None else []
    return found


def _one_differs(one: str, other: str) -> bool:
    return sum(a != b for a, b in zip(one, other, strict=True)) == 1


def impossible_values(root: Node) -> list[str]:
    """What torch refuses to make of tensors: a device of no kind that it has, a gradient of whole numbers; a sentence each."""
    found = []
    kinds = {type(node) for node in reachable(root)}
    if Storage in kinds and Object in kinds and next(find_tensors(root), None) is None:
        found.append("it names storages, and makes no tensor of them")
    for tensor in find_tensors(root):
        node, name = tensor.node, dotted(tensor.where)
        if type(node) is Entry and not is_device(node.storage.device or "cpu"):
            found.append(f"{name} lies on {node.storage.device!r}, which is not a device")
        elif type(node) is Entry and node.requires_grad and node.dtype.family not in ("float", "complex"):
            found.append(f"{name} needs a gradient, and holds {node.dtype.name}")
    return found


def impossible_values_error(path: str, found: list[str]) -> RepairError:
    """The error for a pickle with values that only damage makes."""
    return RepairError(
        f"The pickle of {path} is damaged: {found[0]}.",
        why="The file has no checksum by which the damage could be found, and nothing says what else has changed.",
        fix="Get the file again; `keep_damaged` writes it as it is.",
    )


def damaged_names_error(path: str, found: list[tuple[str, str]]) -> RepairError:
    """The error for a pickle with damaged names: nothing would load what it makes."""
    name, near = found[0]
    return RepairError(
        f"The pickle of {path} is damaged: it names {name!r}, where {near!r} is meant.",
        why="The file has no checksum by which the damage could be found, and nothing says what else has changed.",
        fix="Get the file again; `keep_damaged` writes it as it is.",
    )
