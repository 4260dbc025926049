"""What `convert` does with objects: --objects, and the weights that pickled modules and averages hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckpt_tools.edit.objects import losses, plain
from ckpt_tools.edit.objects.known import WITH_OUTER, ObjectFate, is_known, tensor_attributes
from ckpt_tools.errors import NothingMatchedError, ObjectsError
from ckpt_tools.formats.base import PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_state_dicts, find_tensors, tensors_by_name
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.operations.safety import danger_in
from ckpt_tools.text import dotted, listed
from ckpt_tools.tree import visit
from ckpt_tools.tree.findings import mending
from ckpt_tools.tree.modules import is_module
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Dict, Node, Where

WRAPPER_CLASSES = ("torch.nn.parallel.data_parallel.DataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")


def modules_first(root: Node, report: Converted) -> Node:
    """Pickled modules as their state dicts, since their weights are wanted whatever becomes of other objects."""
    from ckpt_tools.edit.slimming import modules_as_state_dicts

    seen: set[int] = set()
    for where, module in visit.walk(root, stop=is_module, plain=False):
        if is_module(module) and id(module) not in seen:
            seen.add(id(module))
            report.objects.append(ObjectFate(list(where), module.name, "dict"))
            inner = [(below, name) for below, name in plain.find_unknown(module) if below]
            report.objects += [ObjectFate([*where, *below], name, WITH_OUTER) for below, name in inner]
    return modules_as_state_dicts(root)


def averaged_alone(root: Node, report: Converted) -> tuple[Node, Where]:
    """The averaged weights alone, and where they were."""
    from ckpt_tools.edit.slimming import averaged, has_mmcvs

    before = find_state_dicts(root)
    root, where = averaged(root)
    if any(has_mmcvs(state_dict.names) for state_dict in before if state_dict.where == where):
        text = (
            "mmcv's EMAHook exchanges both copies before it evaluates: where it ran ahead of the CheckpointHook, the averages"
        )
        report.note("ema-exchanged", f"{text} are under the plain names, which `drop='ema_*'` takes without `ema`.")
    report.note("ema", f"The averaged weights were in {dotted(where) or 'the root'}.")
    names = set(tensors_by_name(root)) if type(root) is Dict else set()
    for state_dict in before:
        trained = dict.fromkeys(map(unwrap, state_dict.names))
        if state_dict.where != where and names < trained.keys():
            more = [repr(name) for name in trained if name not in names]
            text = f"Tensors of {dotted(state_dict.where)!r} that were not averaged, and are not in OUT: {listed(more, 3)}."
            report.note("ema-lacks", text)
    return root, where


def weights_alone(
    root: Node, checkpoint: Checkpoint, drop: Sequence[str], report: Converted, *, ema: bool, slim: bool
) -> tuple[Node, frozenset[str]]:
    """State dicts in the place of modules, then the averaged weights, or no objects; and the globs of --drop that this used."""
    packed, outside = losses.packed_tensors(root), losses.outside_state(root) if checkpoint.has_modules else set()
    every = losses.Held(find_tensors(root) if slim and not ema else ())
    unsaved = {tensor.where for tensor in every.tensors if id(tensor.node) in outside}
    inside: Where = ()
    root = modules_first(root, report)
    if ema:
        root, inside = averaged_alone(root, report)
    before = losses.Held(losses.in_state_dicts(root))
    if slim:
        attributes = tensor_attributes(root)
        root, fates = plain.drop_unknown(root)
        report.objects += fates
        _tell_attributes(attributes, root, report, "`slim`")
        for where in every.lost(root):
            why = losses.OUTSIDE if where in unsaved else "`slim`: a tensor outside state dicts"
            report.dropped.append((dotted(where), why))
    lost = [where for where in packed if where[: len(inside)] == inside] + before.lost(root)
    return root, _drop_lost(checkpoint, lost, drop, report)


def _drop_lost(
    checkpoint: Checkpoint, lost: Sequence[Where], drop: Sequence[str], report: Converted, *, are_numpys: bool = False
) -> frozenset[str]:
    """Tell of the lost tensors that --drop names; returns the globs that do. The others are an error."""
    globs = losses.check_lost(checkpoint.path, lost, drop, are_numpys=are_numpys)
    report.dropped += [(dotted(where), "`drop`") for where in lost]
    return globs


def apply_objects(
    root: Node, checkpoint: Checkpoint, policy: str | None, report: Converted, *, selected: bool, drop: Sequence[str] = (),
    read: Collection[str] = (),
) -> tuple[Node, frozenset[str]]:  # fmt: skip
    """What --objects says, done, but for classes in `read`; and the globs of --drop that name tensors lost with objects."""
    if checkpoint.container in PROGRAMS:  # cannot be kept: its state dict can be taken out, when that is asked for
        if policy != "plain":
            raise ObjectsError(
                f"{checkpoint.path} is {PROGRAMS[checkpoint.container][1]}, not a plain checkpoint.",
                why="convert keeps no code.", fix="Take its state dict out: `objects='plain'`",
            )  # fmt: skip
        report.dropped.append(("code", "a state dict holds no program"))
    simple = all(map(is_known, checkpoint.globals)) and not checkpoint.unusual  # then nothing can be unknown
    unknown = [] if simple else [row for row in plain.find_unknown(root) if row[1] not in read]
    present = {name for _, name in unknown}
    known = present.union(read)
    hidden = [] if selected else [g for g in checkpoint.globals if not plain.is_resolved(g) and str(g) not in known]
    if policy is None and (unknown or hidden):
        raise _objects_error(checkpoint, unknown, [str(name) for name in hidden])
    told = {fate.name for fate in report.objects}
    for name in (name for name in hidden if str(name) not in told):
        report.objects.append(ObjectFate([], str(name), "dropped"))
    if policy in (None, "keep"):
        return root, frozenset()
    root, used = _without_objects(root, checkpoint, policy, unknown, drop, report)
    if policy == "plain" and (newer := plain.newer_dtypes(root)):
        report.note("newer-dtypes", f"weights_only takes {', '.join(newer)} since torch 2.5; torch 2.4 refuses the file.")
    if root is None:
        raise NothingMatchedError("Nothing would be left.", why="The whole checkpoint is one object that has no plain form.")
    return root, used


def check_plain(root: Node, checkpoint: Checkpoint) -> None:
    """Refuse objects that are left."""
    if unknown := plain.find_unknown(root):
        raise _objects_error(checkpoint, unknown, [])


def _without_objects(
    root: Node, checkpoint: Checkpoint, policy: str, unknown: Sequence[tuple[Where, str]], drop: Sequence[str],
    report: Converted,
) -> tuple[Node, frozenset[str]]:  # fmt: skip
    """Objects made plain or left out; and the globs of --drop that name tensors which go with them."""
    attributes = tensor_attributes(root) if policy == "drop" else {}
    outside = losses.outside_state(root) if checkpoint.has_modules else set()
    before = losses.Held(find_tensors(root))
    known = {tensor.where for tensor in before.tensors if id(tensor.node) in outside}
    if policy == "plain":
        root, fates = plain.make_plain(root, oldest=True, file_bytes=checkpoint.file_bytes, unknown=unknown)
    else:
        root, fates = plain.drop_unknown(root)
    report.objects += fates
    lost = before.lost(root)
    if policy == "drop":
        _tell_attributes(attributes, root, report, "`objects='drop'`")
        report.dropped += [(dotted(where), "`objects='drop'`") for where in lost]
        return root, frozenset()
    report.dropped += [(dotted(where), losses.OUTSIDE) for where in lost if where in known]
    used = _drop_lost(checkpoint, plain.lost_numbers(fates), drop, report, are_numpys=True)
    return root, used | _drop_lost(checkpoint, [where for where in lost if where not in known], drop, report)


def _tell_attributes(before: Mapping[Where, Node], root: Node, report: Converted, why: str) -> None:
    """Attributes that tensors lost with objects among them; what was dropped with its tensor is told by that."""
    if before:
        left, kept = tensor_attributes(root), {tensor.where for tensor in find_tensors(root)}
        lost = (where for where in before if where not in left and where[:-1] in kept)
        report.dropped += [(dotted(where), f"{why}: an attribute of a tensor") for where in lost]


def _objects_error(checkpoint: Checkpoint, unknown: list[tuple[Where, str]], hidden: list[str]) -> ObjectsError:
    lines = [f"{dotted(where) or 'the root'}: {name}" for where, name in unknown]
    lines += [f"{name} (named by the pickle, not part of what it makes)" for name in hidden]
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    fix = "Choose with `objects`: 'plain' makes data of them, 'drop' leaves them out, 'keep' keeps them as they are."
    if any(name in WRAPPER_CLASSES for _, name in unknown):
        mended = mending("convert", str(checkpoint.path), "--strip-module --objects plain")
        fix = f"A model was saved whole, inside its wrapper; its weights, by their plain names: {mended}"
    if any(name.startswith("torchao.") for _, name in unknown):
        fix = f"torchao has quantised weights here; `dequantize='bf16'` makes plain ones of them. {fix}"
    what = danger_in(checkpoint, str(checkpoint.path)) or f"{checkpoint.path} holds objects that are not plain data."
    return ObjectsError(what, why="; ".join(lines[:8]) + more + ".", fix=fix)
