"""Load a checkpoint into a live model: everything is checked first, then bytes go from the file to where they are wanted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from ckpt_tools.edit import casts
from ckpt_tools.errors import ConvertError, MatchError, TargetError, UsageError
from ckpt_tools.fit.choices import Choices, Rows
from ckpt_tools.fit.fit import Fitted, Wanted, fit
from ckpt_tools.fit.initialisers import Blank, Rules, blank_in
from ckpt_tools.fit.options import OnMismatch, RowChoice
from ckpt_tools.fit.plans import plan_of
from ckpt_tools.fit.targets import params_of
from ckpt_tools.formats.open import (
    Checkpoint,
    StateDict,
    collector_paused,
    is_extra,
    tensors_by_name,
)
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.io.content import (
    Computed,
    Content,
    Deflated,
    Joined,
    chunks,
    read,
)
from ckpt_tools.matching import Matching, Stages
from ckpt_tools.matching import match as find_partners
from ckpt_tools.matching.params import Param
from ckpt_tools.torch.building import Builder
from ckpt_tools.torch.copying import copy_all
from ckpt_tools.torch.gathering import fill, is_dtensor
from ckpt_tools.torch.loading import choose, loadable
from ckpt_tools.torch.report import LoadReport
from ckpt_tools.torch.slots import Slot, Slots, find_slots
from ckpt_tools.tree.arguments import Renames, natural
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Entry, as_dict
from ckpt_tools.values.numeric import row_major, torch_dtype


@natural
def load_into(
    model: torch.nn.Module, path: str | os.PathLike[str], *, match: Stages = "exact+wrappers", rename: Renames = (),
    reinit: str | Sequence[str] | Mapping[str, str] | None = None, on_mismatch: OnMismatch = "error", rows: RowChoice = None,
    adapt: bool = False, allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = (), assign: bool = False,
    select: str | None = None, seed: int = 0,
) -> LoadReport:  # fmt: skip
    """Load a checkpoint into a model. Executes nothing in the file.

    Tensors go straight into the parameters' and buffers' own memory, on their device and in their dtype; there is no second
    copy of the model. The model may be wrapped by DP, DDP, FSDP1 names or compile, or not, and the file too. Parameters on
    the meta device are made on the default device (the CPU, unless `torch.set_default_device` says another). Every
    rank of a DDP job may call this at once. Load hooks of modules are not called, except `set_extra_state`.

    Where parameters are DTensors (FSDP2, HSDP, tensor parallelism) every rank calls it, and each takes its part of what it
    reads; nothing is sent between them.

    When it raises, nothing in the model has changed, unless the disk fails or the file changes under the reading. Where a
    module's `set_extra_state` raises, it and those before it get back the state that they had, no more can be undone.

    Args:
        model: the model.
        path: a checkpoint in any container that ckpt reads.
        match: how partners are found: "exact+wrappers", "names", "structure" or "position"; see `ckpt match`.
        rename: `REGEX=REPLACEMENT` rules for names of the file.
        reinit: a scheme for weights that get initial values (biases get zeros, norms ones), `GLOB=SCHEME` texts, or a mapping
            of them, which are literal; `ckpt convert --help` lists the schemes. "target" leaves the model's own value.
        on_mismatch: for a tensor of another shape: "error"; "reinit"; "overlap" keeps what fits and initialises the
            rest; "skip" leaves the model's.
        rows: with "overlap": which rows of the file's tensors, in which order; for one name by a mapping from globs.
        adapt: fit a first convolution to other input channels, and position embeddings to another grid.
        allow_missing, allow_unexpected: globs on names that may be left over.
        assign: put new tensors with the file's dtypes in place of the parameters.
        select: the dotted path of the state dict, where the file holds several.
        seed: for initial values; one seed gives the same bytes on every machine.

    Returns:
        What happened to every name; true when all of the model and of the file was loaded.

    Raises:
        MatchError: tensors are left over, and no choice covers them; all are listed. TargetError: the model has parameters that
        cannot be written into. UsageError: an argument that cannot be read. CkptError: the file cannot be read.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"load_into takes a torch.nn.Module, not a {type(model).__name__}.")
    rules = [rename] if isinstance(rename, str) else list(rename.items() if isinstance(rename, Mapping) else rename)
    choices = Choices(Rules(reinit), on_mismatch, Rows(rows), adapt, seed, allow_missing, allow_unexpected, in_code=True)
    slots = find_slots(model)
    _check_assign(model, slots, assign)
    with open_whole(path) as checkpoint:
        with collector_paused():
            loading = _Loading(checkpoint, choose(checkpoint, select), slots, choices, assign)
            loading.plan(match, rules)
        loading.run()
        checkpoint.decoded.source.check_unchanged()
    return loading.report


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


@dataclass(frozen=True, slots=True)
class _Copy:
    """One tensor on its way: from an entry into a tensor, the slot's own or a new one."""

    entry: Entry
    slot: Slot
    into: torch.Tensor | None


class _Loading:
    """One `load_into` under way: `plan` reads and checks, `run` changes the model."""

    def __init__(self, checkpoint: Checkpoint, state_dict: StateDict, slots: Slots, choices: Choices, assign: bool) -> None:
        self.checkpoint, self.slots, self.choices, self.assign = checkpoint, slots, choices, assign
        root = loadable(state_dict.node, checkpoint.path)
        self.node = as_dict(casts.to_little_endian(root, checkpoint.decoded.byteorder))
        # may be tensors, and are not among these
        self.extras = {name: value for name, value in self.node.named.items() if is_extra(name)}
        self.node.items[:] = [(key, value) for key, value in self.node.items if not is_extra(key)]
        self.source = tensors_by_name(self.node)
        self.report = LoadReport(str(checkpoint.path))
        self.copies: list[_Copy] = []
        self.extra_state: list[tuple[torch.nn.Module, Any]] = []

    # --- checking

    def plan(self, stages: Stages, rename: Sequence[str | tuple[str, str]]) -> None:
        """Decide the fate of every name; nothing in the model changes."""
        slots = self.slots.tensors
        params = [Param(slot.name, slot.shape, slot.dtype, slot.place, type(slot.module).__name__) for slot in slots.values()]
        matching = self._tolerate(find_partners(params_of(self.node), params, stages=stages, rename=rename))
        label = f"{self.checkpoint.path} does not fit the model"
        wanted = Wanted(list(slots), self._blank, None, _first_names(self.slots), label)
        fitted = fit(self.node, plan_of(replace(matching, offers=())), wanted, self.choices)
        self._plan_copies(fitted)
        self._fill_report(matching, fitted)
        self._plan_extra_state()

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

    def _plan_copies(self, fitted: Fitted) -> None:
        taken: dict[object, tuple[str, Entry]] = {}
        for name, node in fitted.tensors.items():
            slot = self.slots.tensors[name]
            if type(node) is not Entry:
                raise ConvertError(f"{name!r} is a sparse, quantised, nested or meta tensor in {self.checkpoint.path}.",
                                   why="It cannot be copied into a plain parameter.")  # fmt: skip
            if self.assign:
                _check_assignable(name, node, slot)
            else:
                _check_castable(name, node, slot)
            _check_readable(node.storage.content)
            if slot.place in taken:
                self._check_same(name, node, *taken[slot.place])
                continue
            taken[slot.place] = (name, node)
            fresh = self.assign or slot.tensor.is_meta
            self.copies.append(_Copy(node, slot, None if fresh else slot.tensor))
        for name in fitted.kept_own:
            if self.slots.tensors[name].tensor.is_meta:
                raise ConvertError(f"{name!r} is on the meta device: it has no value of its own to keep.",
                                   fix='Choose another scheme than "target".')  # fmt: skip

    def _check_same(self, name: str, node: Entry, first: str, other: Entry) -> None:
        """One tensor of the model under two names takes one value."""
        view, seen = ((e.storage, e.offset, e.shape, e.stride) for e in (node, other))
        if view != seen and _bytes_of(node) != _bytes_of(other):
            raise ConvertError(
                f"{first!r} and {name!r} are one tensor in the model, and two different ones in {self.checkpoint.path}.",
                fix="Untie them in the model, or choose one in the file: ckpt convert --drop.",
            )

    def _fill_report(self, matching: Matching, fitted: Fitted) -> None:
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
        for copy in self.copies:
            if copy.into is not None and copy.entry.dtype.name != copy.slot.dtype:
                move = f"{copy.entry.dtype.name} -> {copy.slot.dtype}"
                report.cast[move] = report.cast.get(move, 0) + 1
        if self.slots.meta_buffers:
            names = ", ".join(self.slots.meta_buffers[:4])
            report.notes.append(
                f"{names}: buffers that no checkpoint holds are still on the meta device; the model must make them."
            )

    def _plan_extra_state(self) -> None:
        """What modules keep beside tensors, found by name; the wrappers of neither side count."""
        states = dict(self.extras)
        found = find_partners([Param(key, ()) for key in states], [Param(name, ()) for name in self.slots.extra_state])
        partners = {row.new: row.old for row in found.matched}
        builder = Builder(self.checkpoint, "cpu")
        for name, module in self.slots.extra_state.items():
            if name in partners:
                self.extra_state.append((module, builder.build(states.pop(partners[name]))))
                self.report.loaded.append(name)
            elif not any(fnmatchcase(name, glob) for glob in self.choices.allow_missing):
                raise MatchError(f"{self.checkpoint.path} does not fit the model.", why=f"It has no {name!r}.",
                                 fix="Allow that: allow_missing=['*_extra_state'].")  # fmt: skip
            else:
                self.report.missing.append(name)
        self.report.unexpected += states

    # --- changing the model

    def run(self) -> None:
        """Give modules their extra state, copy, and put new tensors in place."""
        tensors = [_new_tensor(copy, self.assign) if copy.into is None else copy.into for copy in self.copies]
        _set_extra_state(self.extra_state)
        with torch.no_grad():
            pairs = [(copy.entry, tensor) for copy, tensor in zip(self.copies, tensors, strict=True)]
            copy_all(pair for pair in pairs if not is_dtensor(pair[1]))
            for entry, tensor in pairs:
                if is_dtensor(tensor):
                    _fill_part(entry, tensor)
                else:
                    torch.autograd.graph.increment_version(tensor)  # autograd has not seen what was read into its memory
        slots = [copy.slot for copy in self.copies]
        made = [
            (slot, _in_kind(slot, tensor)) for slot, tensor in zip(slots, tensors, strict=True) if tensor is not slot.tensor
        ]
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
            for other, old in reversed(before):
                with contextlib.suppress(Exception):  # the module's own code, which has just raised
                    other.set_extra_state(old)
            raise TargetError(
                f"A {type(module).__name__} of the model does not take its extra state.",
                why=f"set_extra_state raised {type(error).__name__}: {error}",
            ) from error


def _copied(state: Any) -> Any:
    """A copy that the module cannot change; the state itself where it cannot be copied."""
    try:
        return deepcopy(state)
    except Exception:
        return state


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


def _new_tensor(copy: _Copy, assign: bool) -> torch.Tensor:
    """Memory for a parameter that has none yet, or that is exchanged."""
    old = copy.slot.tensor
    device = torch.get_default_device() if old.is_meta else old.device
    dtype = torch_dtype(copy.entry.dtype) if assign else old.dtype
    return torch.empty(old.shape, dtype=dtype, device=device)


def _fill_part(entry: Entry, tensor: torch.Tensor) -> None:
    """This rank's part of a tensor; the whole is in memory meanwhile, on the CPU, one tensor at a time."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    copy_all([(entry, whole)])
    fill(tensor, whole)


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
