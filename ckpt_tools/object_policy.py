"""What `convert` does with objects: --objects, and the weights that pickled modules and averages hold."""

from __future__ import annotations

from typing import Any

from ckpt_tools import plain, tree
from ckpt_tools.checkpoint import Checkpoint, find_tensors
from ckpt_tools.containers.base import PROGRAMS
from ckpt_tools.converted import Converted, Note, ObjectFate
from ckpt_tools.errors import NothingMatchedError, ObjectsError
from ckpt_tools.modules import is_module
from ckpt_tools.names import dotted
from ckpt_tools.tree import DROP, Entry, Node, Where


def modules_first(root: Node, report: Converted) -> Node:
    """Pickled modules as their state dicts, since their weights are wanted whatever becomes of other objects."""
    from ckpt_tools.slimming import modules_as_state_dicts

    seen: set[int] = set()
    for where, module in tree.walk(root, stop=is_module, plain=False):
        if is_module(module) and id(module) not in seen:
            seen.add(id(module))
            report.objects.append(ObjectFate(list(where), module.name, "dict"))
            inner = [(below, name) for below, name in plain.find_unknown(module) if below]
            report.objects += [ObjectFate([*where, *below], name, plain.WITH_OUTER) for below, name in inner]
    return modules_as_state_dicts(root)


def averaged_alone(root: Node, report: Converted) -> Node:
    """The averaged weights alone."""
    from ckpt_tools.slimming import averaged

    root, where = averaged(root)
    report.notes.append(Note("ema", f"The averaged weights were in {dotted(where) or 'the root'}."))
    return root


def apply_objects(root: Node, checkpoint: Checkpoint, policy: str | None, report: Converted, *, selected: bool) -> Node:
    decoded = checkpoint.decoded
    if checkpoint.container in PROGRAMS:
        _check_program(checkpoint, policy, report)
    simple = all(map(plain.is_known, decoded.globals)) and not decoded.unusual  # then nothing can be unknown
    unknown = [] if simple else plain.find_unknown(root)
    present = {name for _, name in unknown}
    hidden = [] if selected else [g for g in decoded.globals if not plain.is_resolved(g) and str(g) not in present]
    if policy is None and (unknown or hidden):
        raise _objects_error(checkpoint, unknown, [str(name) for name in hidden])
    told = {fate.name for fate in report.objects}
    for name in (name for name in hidden if str(name) not in told):
        report.objects.append(ObjectFate([], str(name), "dropped"))
    if policy in (None, "keep"):
        return root
    before = {_view(tensor.node): tensor.where for tensor in find_tensors(root)}
    root, fates = plain.make_plain(root, oldest=True) if policy == "plain" else plain.drop_unknown(root)
    report.objects += [ObjectFate(list(fate.where), fate.name, fate.became) for fate in fates]
    left = {_view(tensor.node) for tensor in find_tensors(root)}
    lost = [where for view, where in before.items() if view not in left]
    report.dropped += [(dotted(where), "a tensor that its object's plain form does not hold") for where in lost]
    if policy == "plain" and (newer := plain.newer_dtypes(root)):
        text = f"weights_only takes {', '.join(newer)} since torch 2.5; torch 2.4 refuses the file."
        report.notes.append(Note("newer-dtypes", text))
    if root is None or root is DROP:
        raise NothingMatchedError("Nothing would be left.", why="The whole checkpoint is one object that has no plain form.")
    return root


def _check_program(checkpoint: Checkpoint, policy: str | None, report: Converted) -> None:
    """A program cannot be kept: its state dict can be taken out, when that is asked for."""
    if policy != "plain":
        raise ObjectsError(
            f"{checkpoint.path} is {PROGRAMS[checkpoint.container][1]}, not a plain checkpoint.", why="convert keeps no code.",
            fix="Take its state dict out: --objects plain",
        )  # fmt: skip
    report.dropped.append(("code", "a state dict holds no program"))


def _view(node: Node) -> tuple[Any, ...]:
    """What makes a tensor the same before and after its object was made plain: the storage and the view on it."""
    return (id(node.storage), node.offset, node.shape, node.stride, node.dtype) if type(node) is Entry else (id(node),)


def _objects_error(checkpoint: Checkpoint, unknown: list[tuple[Where, str]], hidden: list[str]) -> ObjectsError:
    lines = [f"{dotted(where) or 'the root'}: {name}" for where, name in unknown]
    lines += [f"{name} (named by the pickle, not part of what it makes)" for name in hidden]
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return ObjectsError(
        f"{checkpoint.path} holds objects that are not plain data.", why="; ".join(lines[:8]) + more + ".",
        fix="Choose with --objects: 'plain' makes data of them, 'drop' leaves them out, 'keep' keeps them as they are.",
    )  # fmt: skip
