"""Load a checkpoint into a live model: everything is checked first, then bytes go from the file to where they are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from ckpt_tools.errors import MatchError, TargetError, UsageError
from ckpt_tools.fit.choices import Choices, Rows
from ckpt_tools.fit.initialisers import Rules
from ckpt_tools.fit.options import OnMismatch, RowChoice
from ckpt_tools.fit.targets import names_of, read_target
from ckpt_tools.formats.open import (
    collector_paused,
)
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.io.member_paths import File
from ckpt_tools.matching import Stages
from ckpt_tools.text import listed
from ckpt_tools.torch.copying import copy_all
from ckpt_tools.torch.gathering import is_dtensor, own_box
from ckpt_tools.torch.hooks import load_hooks, load_with_hooks
from ckpt_tools.torch.load_plan import Copy, LoadPlan, Planner
from ckpt_tools.torch.loading import choose
from ckpt_tools.torch.report import LoadReport
from ckpt_tools.torch.slots import Slot, Slots, find_slots
from ckpt_tools.tree.arguments import Renames, natural
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import torch_dtype


@natural
def load_into(
    model: torch.nn.Module, path: File, *, match: Stages = "exact+wrappers", rename: Renames = (),
    reinit: str | Sequence[str] | Mapping[str, str] | None = None, on_mismatch: OnMismatch = "error", rows: RowChoice = None,
    adapt: bool = False, allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = (), assign: bool = False,
    select: str | None = None, seed: int = 0, hooks: bool = False,
) -> LoadReport:  # fmt: skip
    """Load a checkpoint into a model. Executes nothing in the file.

    Tensors go straight into the parameters' and buffers' own memory, on their device and in their dtype; there is no second
    copy of the model. The model may be wrapped by DP, DDP, FSDP1 names or compile, or not, and the file too. Parameters on
    the meta device are made on the default device (the CPU, unless `torch.set_default_device` says another). Every
    rank of a DDP job may call this at once. Load hooks of modules are not called, except `set_extra_state`; the report's notes
    name those that the model has.

    Where parameters are DTensors (FSDP2, HSDP, tensor parallelism) every rank calls it, and each reads its own part, of
    rows nothing else; nothing is sent between them.

    When it raises, nothing in the model has changed, unless the disk fails or the file changes under the reading. Where a
    module's `set_extra_state` raises, it and those before it get back the state that they had, no more can be undone.

    Args:
        model: the model.
        path: a checkpoint in any container that ckpt reads.
        match: how partners are found: "exact+wrappers", "names", "structure" or "position"; see `ckpt match`.
        rename: `REGEX=REPLACEMENT` rules for names of the file.
        reinit: a scheme for weights that get initial values (biases get zeros, norms ones), `GLOB=SCHEME` texts, or a mapping
            of them, which are literal; `ckpt convert --help` lists the schemes. "target" leaves the model's own value.
        on_mismatch: for a tensor of another shape: "error"; "reinit" (where `reinit` has no scheme for it as
            "default"); "overlap" keeps what fits and initialises the rest; "skip" leaves the model's.
        rows: with "overlap": which rows of the file's tensors, in which order; for one name by a mapping from globs.
        adapt: fit a first convolution to other input channels, and position embeddings to another grid.
        allow_missing, allow_unexpected: globs on names that may be left over.
        assign: put new tensors with the file's dtypes in place of the parameters.
        select: the dotted path of the state dict, where the file holds several.
        seed: for initial values; one seed gives the same bytes on every machine.
        hooks: run the model's own load hooks: its `load_state_dict` does the loading then, with the file's tensors under the
            model's names. Of the other arguments it goes with `select`, `assign`, `allow_missing` and `allow_unexpected`
            alone. What a hook has changed before something raises stays changed.

    Returns:
        What happened to every name; true when all of the model and of the file was loaded.

    Raises:
        MatchError: tensors are left over, and no choice covers them; all are listed. TargetError: the model has parameters that
        cannot be written into. UsageError: an argument that cannot be read. CkptError: the file cannot be read.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"load_into takes a torch.nn.Module, not a {type(model).__name__}.")
    rules = [rename] if isinstance(rename, str) else list(rename.items() if isinstance(rename, Mapping) else rename)
    if hooks:
        _check_hooked(match=match != "exact+wrappers", rename=rules, reinit=reinit, rows=rows is not None, adapt=adapt,
                      on_mismatch=on_mismatch != "error")  # fmt: skip
        return load_with_hooks(
            model, path, select=select, assign=assign, allow_missing=allow_missing, allow_unexpected=allow_unexpected
        )
    choices = Choices(Rules(reinit), on_mismatch, Rows(rows), adapt, seed, allow_missing, allow_unexpected, in_code=True)
    slots = find_slots(model)
    _check_assign(model, slots, assign)
    with open_whole(path, names=lambda: names_of(read_target(model))) as checkpoint:
        with collector_paused(), _naming_hooks(model):
            plan = Planner(checkpoint, choose(checkpoint, select), slots, choices, assign).plan(match, rules)
        _carry_out(plan)
        if unrun := load_hooks(model):
            plan.report.notes.append(f"load hooks that were not run: {listed(unrun)}; hooks=True runs them")
        checkpoint.decoded.source.check_unchanged()
    return plan.report


def _check_hooked(**given: Any) -> None:
    """With hooks the model's own `load_state_dict` decides."""
    if wrong := [name for name, value in given.items() if value]:
        raise UsageError(f"`{wrong[0]}` does not go with `hooks=True`: the model's own load_state_dict decides then.")


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
    """Give modules their extra state; when one of them refuses, all have what they had.

    Raises:
        TargetError: a module's own `set_extra_state` or `get_extra_state` raised.
    """
    before: list[tuple[torch.nn.Module, Any]] = []
    for module, state in states:
        try:
            before.append((module, _copied(module.get_extra_state())))
            module.set_extra_state(state)
        except Exception as error:
            _put_back(before)
            raise TargetError(
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
