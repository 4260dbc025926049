"""Load a checkpoint into a live model: everything is checked first, then bytes go from the file to where they are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ckpt_tools.edit import casts
from ckpt_tools.edit.account import Account
from ckpt_tools.edit.parametrized import fold_for, told_fold
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.fit.fit import Choices, Fitted, Wanted, fit, left_out
from ckpt_tools.fit.initialisers import Blank, Rules, blank_in
from ckpt_tools.fit.partners import look_at
from ckpt_tools.fit.plans import plan_of
from ckpt_tools.fit.targets import Target
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, is_extra, tensors_by_name
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.content import Deflated, chunks, made_of
from ckpt_tools.io.source import File
from ckpt_tools.matching import Matching
from ckpt_tools.matching import match as find_partners
from ckpt_tools.matching.records import Param
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import dotted, listed, some
from ckpt_tools.torch.building import Builder
from ckpt_tools.torch.copying import copy_all
from ckpt_tools.torch.gathering import is_dtensor, own_box
from ckpt_tools.torch.hooks import load_hooks, load_with_hooks
from ckpt_tools.torch.loading import choose, loadable
from ckpt_tools.torch.report import LoadOptions, LoadReport
from ckpt_tools.torch.slots import Slot, Slots, find_slots
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.nodes import Dict, Entry, as_dict
from ckpt_tools.tree.options import as_keywords
from ckpt_tools.values.numeric import CastCount, torch_dtype

# --- what `load_into` will do


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor on its way: from an entry into a tensor, the slot's own or a new one."""

    entry: Entry
    slot: Slot
    into: torch.Tensor | None


ExtraState: TypeAlias = tuple[torch.nn.Module, Any]


class Planner:
    """Decides what becomes of every name of a checkpoint and of a model, and changes nothing in the model."""

    def __init__(
        self, checkpoint: Checkpoint, state_dict: StateDict, slots: Slots, model: torch.nn.Module, options: LoadOptions
    ) -> None:
        self.checkpoint, self.slots, self.model, self.options = checkpoint, slots, model, options
        self.choices = Choices(
            Rules(options.reinit), options.on_mismatch, options.adapt, options.seed, options.allow_missing,
            options.allow_unexpected, in_code=True,
        )  # fmt: skip
        root = loadable(state_dict.node, checkpoint.path)
        self.node = as_dict(casts.to_little_endian(root, checkpoint.byteorder))
        # may be tensors, and are not among these
        self.extras = {name: value for name, value in self.node.named.items() if is_extra(name)}
        self.node.items[:] = [(key, value) for key, value in self.node.items if not is_extra(key)]
        folded = fold_for(self.node, slots.tensors)
        self.source = tensors_by_name(self.node)
        self.report = LoadReport(str(checkpoint.path))
        self.report.notes += [text for _, text in told_fold(folded)]

    def plan(self) -> tuple[list[Copy], list[ExtraState]]:
        slots = self.slots.tensors
        params = tuple(
            Param(slot.name, slot.shape, slot.dtype, slot.place, type(slot.module).__name__) for slot in slots.values()
        )
        tensors = {name: slot.tensor for name, slot in slots.items()}
        options, target = self.options, Target("the model", params, self.model, tensors=tensors)
        sides = look_at(self.node, self.checkpoint, target, options)
        found = sides.match(
            options, options.stages or "exact+wrappers", rename=options.rename, allow_reshape=options.allow_reshape
        )
        matching = self._tolerate(found)
        label = f"{self.checkpoint.path} does not fit the model"
        first: dict[object, str] = {}
        firsts = {name: first.setdefault(slot.place, name) for name, slot in slots.items()}
        wanted = Wanted(list(slots), self._blank, None, firsts, label)
        account, plan = Account(), plan_of(replace(matching, offers=()))
        account.open(str(self.checkpoint.path), self.node)
        fitted = fit(self.node, plan, wanted, self.choices)
        account.leave_out(self.source[name] for name in left_out(plan, fitted))
        account.close(Dict([*fitted.tensors.items()]), ())
        copies = self._copies(fitted)
        self._fill_report(matching, fitted, copies)
        return copies, self._extra_state()

    def _tolerate(self, matching: Matching) -> Matching:
        """Files from before torch 0.4.1 have no `num_batches_tracked`; as torch does, the model keeps its own."""
        old = [
            name for name in matching.missing
            if name.endswith("num_batches_tracked") and self.choices.reinit.of(name) is None
            and not self.slots.tensors[name].tensor.is_meta
        ]  # fmt: skip
        has_any = any(name.endswith("num_batches_tracked") for name in self.source)
        if not old or has_any:
            return matching
        self.report.notes.append(f"{len(old)} num_batches_tracked are not in a file this old; they stay as they are.")
        return replace(matching, missing=tuple(name for name in matching.missing if name not in set(old)))

    def _blank(self, name: str) -> Blank:
        slot = self.slots.tensors[name]
        return blank_in(slot.module, name, slot.shape, DTYPES[slot.dtype])

    def _copies(self, fitted: Fitted) -> list[Copy]:
        copies = []
        taken = set[object]()
        for name, node in fitted.tensors.items():
            slot = self.slots.tensors[name]
            if type(node) is not Entry:
                raise ConvertError(f"{name!r} is a sparse, quantised, nested or meta tensor in {self.checkpoint.path}.",
                                   why="It cannot be copied into a plain parameter.")  # fmt: skip
            if self.options.assign:
                _check_assignable(name, node, slot)
            else:
                _check_castable(name, node, slot)
            for one in made_of(node.storage.content):  # inflated once, so that damage is found before the model changes
                for _ in chunks(one) if isinstance(one, Deflated) else ():
                    pass
            if slot.place in taken:
                continue
            taken.add(slot.place)
            fresh = self.options.assign or slot.tensor.is_meta
            copies.append(Copy(node, slot, None if fresh else slot.tensor))
        for name in fitted.kept_own:
            if self.slots.tensors[name].tensor.is_meta:
                raise ConvertError(f"{name!r} is on the meta device: it has no value of its own to keep.",
                                   fix='Choose another scheme than "target".')  # fmt: skip
        return copies

    def _fill_report(self, matching: Matching, fitted: Fitted, copies: Sequence[Copy]) -> None:
        report = self.report
        initialised = {row.name for row in fitted.initialised}
        report.loaded = [name for name in fitted.tensors if name not in initialised]
        loaded, kept_own = set(report.loaded), set(fitted.kept_own)
        report.loaded += [name for name in fitted.adapted if name not in loaded]
        report.renamed = {row.old: (row.new, row.reason) for row in matching.matched if row.old != row.new}
        adapted = (row for row in matching.mismatched if row.new in fitted.adapted and row.old != row.new)
        report.renamed.update((row.old, (row.new, row.reason)) for row in adapted)
        report.missing, report.unexpected = fitted.missing, fitted.unexpected
        report.mismatched, report.adapted = fitted.skipped, fitted.adapted
        report.reinitialised = {
            row.name: "the model's own value" if row.name in kept_own else f"{row.scheme} (seed {row.seed})"
            for row in fitted.initialised
        }
        for copy in copies:
            if copy.into is not None and copy.entry.dtype.name != copy.slot.dtype:
                move = f"{copy.entry.dtype.name} -> {copy.slot.dtype}"
                report.cast[move] = report.cast.get(move, 0) + 1
        if self.slots.meta_buffers:
            names = ", ".join(self.slots.meta_buffers[:4])
            report.notes.append(
                f"{names}: buffers that no checkpoint holds are still on the meta device; the model must make them."
            )

    def _extra_state(self) -> list[ExtraState]:
        """What modules keep beside tensors, found by name; the wrappers of neither side count."""
        states = dict(self.extras)
        found = find_partners([Param(key, ()) for key in states], [Param(name, ()) for name in self.slots.extra_state])
        partners = {row.new: row.old for row in found.matched}
        builder = Builder(self.checkpoint, "cpu")
        given = []
        for name, module in self.slots.extra_state.items():
            if name in partners:
                given.append((module, builder.build(states.pop(partners[name]))))
                self.report.loaded.append(name)
            elif not Globs(self.choices.allow_missing).matching(name):
                raise MatchError(f"{self.checkpoint.path} does not fit the model.", why=f"It has no {name!r}.",
                                 fix="Allow that: allow_missing=['*_extra_state'].")  # fmt: skip
            else:
                self.report.missing.append(name)
        self.report.unexpected += states
        return given


def _check_assignable(name: str, entry: Entry, slot: Slot) -> None:
    """A new Parameter takes any dtype that torch has, but one that needs a gradient takes floats only."""
    packed = entry.dtype.packed > 1 and entry.dtype.name != slot.dtype
    if not entry.dtype.in_torch or packed:
        raise ConvertError(f"{name!r} is {entry.dtype.name}, which cannot stand in for {slot.dtype}.")
    needs = isinstance(slot.tensor, torch.nn.Parameter) and slot.tensor.requires_grad
    if needs and entry.dtype.family not in ("float", "complex"):
        raise ConvertError(
            f"{name!r} is {entry.dtype.name}, and a parameter in the model that needs a gradient; only floats have one.",
            fix="Turn that off first: parameter.requires_grad_(False).",
        )


def _check_castable(name: str, entry: Entry, slot: Slot) -> None:
    old, new = entry.dtype, DTYPES[slot.dtype]
    if not old.in_torch or (old is not new and (old.packed > 1 or new.packed > 1)):
        raise ConvertError(f"{name!r} is {old.name}, which torch cannot cast to {new.name}.")
    ranks = {"bool": 0, "int": 1, "float": 2, "complex": 3}
    if old is not new and ranks.get(old.family, 9) > ranks.get(new.family, -1):
        raise ConvertError(f"{name!r} is {old.name} in the file and {new.name} in the model; it would lose part of its values.")


@as_keywords(LoadOptions)
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
    with open_whole(path) as checkpoint:
        if options.stages == "values":
            checkpoint.locate()
        with collector_paused():
            chosen = choose(checkpoint, options.select)
            planner = Planner(checkpoint, chosen, slots, model, options)
            report = planner.report
            try:
                copies, states = planner.plan()
            except MatchError as error:
                if unrun := load_hooks(model):  # they may be what makes it fit
                    error.fix += (
                        f"\nThe model has load hooks of its own, which were not run: {listed(unrun)}. hooks=True runs them."
                    )
                raise
        if beside := [dotted(row.where) for row in checkpoint.tensors if row.where[: len(chosen.where)] != chosen.where]:
            report.notes.append(f"beside {dotted(chosen.where)!r}, and not loaded: {some(beside)}")
        _carry_out(copies, states, report, assign=options.assign)
        if unrun := load_hooks(model):
            report.notes.append(f"load hooks that were not run: {listed(unrun)}; hooks=True runs them")
        checkpoint.source.check_unchanged()
    return report


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


def _carry_out(copies: Sequence[Copy], states: Sequence[ExtraState], report: LoadReport, *, assign: bool) -> None:
    """Give modules their extra state, copy, and put new tensors in place; the report tells what casts lost."""
    tensors = [_new_tensor(copy, assign) if copy.into is None else copy.into for copy in copies]
    _set_extra_state(states)
    with torch.no_grad():
        pairs = list(zip(copies, tensors, strict=True))
        whole = [(copy, tensor) for copy, tensor in pairs if not is_dtensor(tensor)]
        counts = copy_all((copy.entry, tensor) for copy, tensor in whole)
        lost = [(copy.slot.name, count) for (copy, _), count in zip(whole, counts, strict=True)]
        for copy, tensor in pairs:
            if is_dtensor(tensor):
                lost += [(copy.slot.name, count) for count in _fill_part(copy.entry, tensor)]
            else:
                torch.autograd.graph.increment_version(tensor)  # autograd has not seen what was read into its memory
    report.lost = {name: text for name, count in lost if (text := count.told)}
    made = [(copy.slot, _in_kind(copy.slot, new)) for copy, new in zip(copies, tensors, strict=True) if new is not copy.into]
    for slot, tensor in made:
        for module, own in slot.owners:
            held: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
            held[own] = tensor


def _set_extra_state(states: Sequence[ExtraState]) -> None:
    """Give modules their extra state; when one of them refuses, all have what they had."""
    before: list[ExtraState] = []
    for module, state in states:
        try:
            own = module.get_extra_state()
            with contextlib.suppress(Exception):  # what cannot be copied is kept itself
                own = deepcopy(own)
            before.append((module, own))
            module.set_extra_state(state)
        except Exception as error:
            for changed, old in reversed(before):
                with contextlib.suppress(Exception):  # the module's own code, which has just raised
                    changed.set_extra_state(old)
            raise ConvertError(
                f"A {type(module).__name__} of the model does not take its extra state.",
                why=f"set_extra_state raised {type(error).__name__}: {error}",
            ) from error


def _new_tensor(copy: Copy, assign: bool) -> torch.Tensor:
    old = copy.slot.tensor
    device = torch.get_default_device() if old.is_meta else old.device
    dtype = torch_dtype(copy.entry.dtype) if assign else old.dtype
    return torch.empty(old.shape, dtype=dtype, device=device)


def _fill_part(entry: Entry, tensor: Any) -> list[CastCount]:
    """This rank's part of a tensor: of rows, and of any run of elements, nothing else is read."""
    box = own_box(tensor)
    if box is None or not tensor._local_tensor.numel():
        return []
    at, sizes = box
    start = entry.offset + sum(place * step for place, step in zip(at, entry.stride, strict=True))
    part = Entry(entry.storage, entry.dtype, tuple(sizes), entry.stride, start)
    counts = copy_all([(part, tensor._local_tensor)])
    torch.autograd.graph.increment_version(tensor)
    return counts


def _in_kind(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor as what the old one is: a Parameter with all that was put on it, or a buffer."""
    old = slot.tensor
    if isinstance(old, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
        vars(tensor).update(vars(old))
    return tensor
