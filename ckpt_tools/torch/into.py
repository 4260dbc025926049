"""Load a checkpoint into a live model: everything is checked first, then bytes go from the file to where they are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch

from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.fit.targets import names_of, read_target
from ckpt_tools.formats.open import (
    collector_paused,
)
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.io.member_paths import File
from ckpt_tools.operations.options import LoadOptions
from ckpt_tools.text import listed
from ckpt_tools.torch.copying import copy_all
from ckpt_tools.torch.gathering import is_dtensor, own_box
from ckpt_tools.torch.hooks import load_hooks, load_with_hooks
from ckpt_tools.torch.load_plan import Copy, LoadPlan, Planner
from ckpt_tools.torch.loading import choose
from ckpt_tools.torch.report import LoadReport
from ckpt_tools.torch.slots import Slot, Slots, find_slots
from ckpt_tools.tree.arguments import natural
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.tree.options import as_keywords
from ckpt_tools.values.numeric import torch_dtype


@as_keywords(LoadOptions)
@natural
def load_into(model: torch.nn.Module, path: File, options: LoadOptions) -> LoadReport:
    """Load a checkpoint into a model. Executes nothing in the file.

    Tensors go straight into the parameters' and buffers' own memory, on their device and in their dtype; there is no second
    copy of the model. The model may be wrapped by DP, DDP, FSDP1 names or compile, or not, and the file too: names decide,
    without wrappers, unless `match` says otherwise. Parameters on the meta device are made on the default device (the CPU,
    unless `torch.set_default_device` says another). Every rank of a DDP job may call this at once. Load hooks of modules are
    not called, except `set_extra_state`; the report's notes name those that the model has.

    Where parameters are DTensors (FSDP2, HSDP, tensor parallelism) every rank calls it, and each reads its own part, of
    rows nothing else; nothing is sent between them.

    When it raises, nothing in the model has changed, unless the disk fails or the file changes under the reading. Where a
    module's `set_extra_state` raises, it and those before it get back the state that they had, no more can be undone.

    Args:
        model: the model.
        path: a checkpoint in any container that ckpt reads.
        options: those of `LoadOptions`, as keywords.

    Returns:
        What happened to every name; true when all of the model and of the file was loaded.

    Raises:
        MatchError: tensors are left over, and no choice covers them; all are listed. ConvertError: the model has parameters
        that cannot be written into. UsageError: an argument that cannot be read. CkptError: the file cannot be read.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"load_into takes a torch.nn.Module, not a {type(model).__name__}.")
    if options.hooks:
        return load_with_hooks(
            model, path, select=options.select, assign=options.assign, allow_missing=options.allow_missing,
            allow_unexpected=options.allow_unexpected,
        )  # fmt: skip
    slots = find_slots(model)
    _check_assign(model, slots, options.assign)
    with open_whole(path, names=lambda: names_of(read_target(model))) as checkpoint:
        if options.stages == "values":
            checkpoint.locate()
        with collector_paused(), _naming_hooks(model):
            plan = Planner(checkpoint, choose(checkpoint, options.select), slots, model, options).plan()
        _carry_out(plan)
        if unrun := load_hooks(model):
            plan.report.notes.append(f"load hooks that were not run: {listed(unrun)}; hooks=True runs them")
        checkpoint.decoded.source.check_unchanged()
    return plan.report


@contextlib.contextmanager
def _naming_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Where a checkpoint does not fit, the model's own hooks may be what makes it fit."""
    try:
        yield
    except MatchError as error:
        if unrun := load_hooks(model):
            error.fix += f"\nThe model has load hooks of its own, which were not run: {listed(unrun)}. hooks=True runs them."
        raise


def _check_assign(model: torch.nn.Module, slots: Slots, assign: bool) -> None:
    """DDP holds on to the parameters that it was given."""
    new = assign or any(slot.tensor.is_meta for slot in slots.tensors.values())
    if new and any(is_dtensor(slot.tensor) for slot in slots.tensors.values()):
        raise UsageError(
            "Parameters that are DTensors are filled, not exchanged: FSDP2 holds on to them.",
            fix="On the meta device give them memory first, model.to_empty(device=...); and leave assign=True out.",
        )
    if new and any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise UsageError(
            "Parameters of a DistributedDataParallel model cannot be exchanged.", fix="Load into the model before wrapping it."
        )


def _carry_out(plan: LoadPlan) -> None:
    """Give modules their extra state, copy, and put new tensors in place."""
    tensors = [_new_tensor(copy, plan.assign) if copy.into is None else copy.into for copy in plan.copies]
    _set_extra_state(plan.extra_state)
    with torch.no_grad():
        pairs = [(copy.entry, tensor) for copy, tensor in zip(plan.copies, tensors, strict=True)]
        copy_all(pair for pair in pairs if not is_dtensor(pair[1]))
        for entry, tensor in pairs:
            if is_dtensor(tensor):
                _fill_part(entry, tensor)
            else:
                torch.autograd.graph.increment_version(tensor)  # autograd has not seen what was read into its memory
    slots = [copy.slot for copy in plan.copies]
    made = [(slot, _in_kind(slot, tensor)) for slot, tensor in zip(slots, tensors, strict=True) if tensor is not slot.tensor]
    for slot, tensor in made:
        _put(slot, tensor)


def _set_extra_state(states: Sequence[tuple[torch.nn.Module, Any]]) -> None:
    """Give modules their extra state; when one of them refuses, all have what they had."""
    before: list[tuple[torch.nn.Module, Any]] = []
    for module, state in states:
        try:
            before.append((module, _copied(module.get_extra_state())))
            module.set_extra_state(state)
        except Exception as error:
            _put_back(before)
            raise ConvertError(
                f"A {type(module).__name__} of the model does not take its extra state.",
                why=f"set_extra_state raised {type(error).__name__}: {error}",
            ) from error


def _put_back(before: Sequence[tuple[torch.nn.Module, Any]]) -> None:
    for module, state in reversed(before):
        with contextlib.suppress(Exception):  # the module's own code, which has just raised
            module.set_extra_state(state)


def _copied(state: Any) -> Any:
    """A copy that the module cannot change; the state itself where it cannot be copied."""
    try:
        return deepcopy(state)
    except Exception:
        return state


def _new_tensor(copy: Copy, assign: bool) -> torch.Tensor:
    """Memory for a parameter that has none yet, or that is exchanged."""
    old = copy.slot.tensor
    device = torch.get_default_device() if old.is_meta else old.device
    dtype = torch_dtype(copy.entry.dtype) if assign else old.dtype
    return torch.empty(old.shape, dtype=dtype, device=device)


def _fill_part(entry: Entry, tensor: Any) -> None:
    """This rank's part of a tensor: of rows, and of any run of elements, nothing else is read."""
    box = own_box(tensor)
    if box is not None and tensor._local_tensor.numel():
        at, sizes = box
        start = entry.offset + sum(place * step for place, step in zip(at, entry.stride, strict=True))
        copy_all([(Entry(entry.storage, entry.dtype, tuple(sizes), entry.stride, start), tensor._local_tensor)])
        torch.autograd.graph.increment_version(tensor)


def _in_kind(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor as what the old one is: a Parameter with all that was put on it, or a buffer."""
    old = slot.tensor
    if isinstance(old, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
        vars(tensor).update(vars(old))
    return tensor


def _put(slot: Slot, tensor: torch.Tensor) -> None:
    """Put a new tensor wherever the old one is."""
    for module, own in slot.owners:
        held: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
        held[own] = tensor
