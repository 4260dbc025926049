"""What `load_into` will do: decided and checked before anything in the model changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt_tools.edit import casts
from ckpt_tools.edit.account import Account
from ckpt_tools.edit.parametrized import fold_for, told_fold
from ckpt_tools.errors import ConvertError, MatchError
from ckpt_tools.fit.choices import Choices
from ckpt_tools.fit.fit import Fitted, Wanted, fit, left_out
from ckpt_tools.fit.initialisers import Blank, Rules, blank_in
from ckpt_tools.fit.partners import look_at
from ckpt_tools.fit.plans import plan_of
from ckpt_tools.fit.targets import Target
from ckpt_tools.formats.open import (
    Checkpoint,
    StateDict,
    is_extra,
    tensors_by_name,
)
from ckpt_tools.io.content import (
    Computed,
    Content,
    Deflated,
    Joined,
    chunks,
    read,
)
from ckpt_tools.matching import Matching
from ckpt_tools.matching import match as find_partners
from ckpt_tools.matching.records import Param
from ckpt_tools.operations.options import LoadOptions
from ckpt_tools.torch.building import Builder
from ckpt_tools.torch.loading import loadable
from ckpt_tools.torch.report import LoadReport
from ckpt_tools.torch.slots import Slot, Slots
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.nodes import Dict, Entry, as_dict
from ckpt_tools.values.numeric import row_major


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor on its way: from an entry into a tensor, the slot's own or a new one."""

    entry: Entry
    slot: Slot
    into: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is to happen to a model, all of it checked."""

    copies: tuple[Copy, ...]
    extra_state: tuple[tuple[torch.nn.Module, Any], ...]
    assign: bool
    report: LoadReport


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
        self.node = as_dict(casts.to_little_endian(root, checkpoint.decoded.byteorder))
        # may be tensors, and are not among these
        self.extras = {name: value for name, value in self.node.named.items() if is_extra(name)}
        self.node.items[:] = [(key, value) for key, value in self.node.items if not is_extra(key)]
        folded = fold_for(self.node, slots.tensors)
        self.source = tensors_by_name(self.node)
        self.report = LoadReport(str(checkpoint.path))
        self.report.notes += [text for _, text in told_fold(folded)]

    def plan(self) -> LoadPlan:
        """The fate of every name."""
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
        wanted = Wanted(list(slots), self._blank, None, _first_names(self.slots), label)
        account, plan = Account(), plan_of(replace(matching, offers=()))
        account.open(str(self.checkpoint.path), self.node)
        fitted = fit(self.node, plan, wanted, self.choices)
        account.leave_out(self.source[name] for name in left_out(plan, fitted))
        account.close(Dict([*fitted.tensors.items()]), ())
        copies = self._copies(fitted)
        self._fill_report(matching, fitted, copies)
        return LoadPlan(copies, self._extra_state(), options.assign, self.report)

    def _tolerate(self, matching: Matching) -> Matching:
        """Files from before torch 0.4.1 have no `num_batches_tracked`; as torch does, the model keeps its own."""
        old = [name for name in matching.missing if name.endswith("num_batches_tracked") and not self._is_chosen(name)]
        has_any = any(name.endswith("num_batches_tracked") for name in self.source)
        if not old or has_any:
            return matching
        self.report.notes.append(f"{len(old)} num_batches_tracked are not in a file this old; they stay as they are.")
        return replace(matching, missing=tuple(name for name in matching.missing if name not in set(old)))

    def _is_chosen(self, name: str) -> bool:
        return self.choices.reinit.of(name) is not None or self.slots.tensors[name].tensor.is_meta

    def _blank(self, name: str) -> Blank:
        slot = self.slots.tensors[name]
        return blank_in(slot.module, name, slot.shape, DTYPES[slot.dtype])

    def _copies(self, fitted: Fitted) -> tuple[Copy, ...]:
        """A copy for each tensor of the model that gets a value, checked."""
        copies = []
        taken: dict[object, tuple[str, Entry]] = {}
        for name, node in fitted.tensors.items():
            slot = self.slots.tensors[name]
            if type(node) is not Entry:
                raise ConvertError(f"{name!r} is a sparse, quantised, nested or meta tensor in {self.checkpoint.path}.",
                                   why="It cannot be copied into a plain parameter.")  # fmt: skip
            if self.options.assign:
                _check_assignable(name, node, slot)
            else:
                _check_castable(name, node, slot)
            _check_readable(node.storage.content)
            if slot.place in taken:
                self._check_same(name, node, *taken[slot.place])
                continue
            taken[slot.place] = (name, node)
            fresh = self.options.assign or slot.tensor.is_meta
            copies.append(Copy(node, slot, None if fresh else slot.tensor))
        for name in fitted.kept_own:
            if self.slots.tensors[name].tensor.is_meta:
                raise ConvertError(f"{name!r} is on the meta device: it has no value of its own to keep.",
                                   fix='Choose another scheme than "target".')  # fmt: skip
        return tuple(copies)

    def _check_same(self, name: str, node: Entry, first: str, other: Entry) -> None:
        """One tensor of the model under two names takes one value."""
        view, seen = ((e.storage, e.offset, e.shape, e.stride) for e in (node, other))
        if view != seen and _bytes_of(node) != _bytes_of(other):
            raise ConvertError(
                f"{first!r} and {name!r} are one tensor in the model, and two different ones in {self.checkpoint.path}.",
                fix="Untie them in the model, or choose one in the file: ckpt convert --drop.",
            )

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

    def _extra_state(self) -> tuple[tuple[torch.nn.Module, Any], ...]:
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
        return tuple(given)


def _first_names(slots: Slots) -> dict[str, str]:
    first: dict[object, str] = {}
    return {name: first.setdefault(slot.place, name) for name, slot in slots.tensors.items()}


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


def _check_readable(content: Content) -> None:
    """Inflate what is deflated once, so that damage is found before the model changes."""
    if isinstance(content, Computed) and content.of is not None:
        for source in content.of if isinstance(content.of, tuple) else (content.of,):
            _check_readable(source)
    elif isinstance(content, Joined):
        for part in content.parts:
            _check_readable(part)
    if isinstance(content, Deflated):
        for _ in chunks(content):
            pass


def _bytes_of(entry: Entry) -> bytes:
    return read(row_major(entry))
