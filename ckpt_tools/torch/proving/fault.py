"""Where two runs part: modules are paired by their tensors and names, and their calls are compared from the outside in."""

from __future__ import annotations

import posixpath
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch

from ckpt_tools.fit.targets import read_target
from ckpt_tools.matching import match
from ckpt_tools.operations.proved import Fault
from ckpt_tools.torch.proving.reasons import of_code, of_module
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall, are_equal

# --- which module of the old model is which of the new one


def pair_tensors(old: torch.nn.Module, new: torch.nn.Module) -> dict[str, str]:
    """Name of a tensor in the old model -> its partner's name in the new one."""
    matching = match(read_target(old).params, read_target(new).params, stages="structure")
    found = {row.old: row.new for row in matching.matched}
    return found | {offer.old[0]: offer.new[0] for offer in matching.offers if offer.step == "transpose"}


def pair_modules(old: torch.nn.Module, new: torch.nn.Module, tensors: Mapping[str, str]) -> dict[str, str]:
    """Path of a module in the old model -> that of the closest one around the partners of all tensors in it."""
    there, back = _around(tensors.items()), _around((name, other) for other, name in tensors.items())
    found = {"": ""} | {path: other for path, other in there.items() if back.get(other) == path}
    names, taken = dict(new.named_modules()), set(found.values())
    for path, _ in old.named_modules():  # those without tensors, by their names in what is around them
        parent, _, own = path.rpartition(".")
        other = f"{found.get(parent)}.{own}".removeprefix(".")
        if path not in found and parent in found and other in names and other not in taken:
            found[path] = other
            taken.add(other)
    return found


def _around(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Path of each module -> the closest module around the partners of all tensors in it."""
    partners: dict[str, list[str]] = {}
    for name, other in pairs:
        parts = name.split(".")
        for length in range(1, len(parts)):
            partners.setdefault(".".join(parts[:length]), []).append(other.rpartition(".")[0].replace(".", "/"))
    return {path: posixpath.commonpath(others).replace("/", ".") for path, others in partners.items()}


def in_both(pairs: Mapping[str, str], old: ModuleCall, new: ModuleCall) -> dict[str, str]:
    """The pairs of modules that ran in both: a list of modules has no call of its own."""
    left, right = set(_paths(old)), set(_paths(new))
    return {path: other for path, other in pairs.items() if path in left and other in right}


def _paths(call: ModuleCall) -> Iterator[str]:
    yield call.path
    for inner in call.calls:
        yield from _paths(inner)


# --- the first place where they part


class Search:
    """Looks for the fault; `pairs`: the modules that ran in both. `old_tensors`: names and tensors of the old model."""

    def __init__(self, pairs: Mapping[str, str], old_tensors: Mapping[str, torch.Tensor], tolerance: float) -> None:
        self.pairs, self.old_tensors, self.tolerance = pairs, old_tensors, tolerance

    def count(self, old: ModuleCall, new: ModuleCall) -> int:
        """How many pairs of calls there are."""
        return 1 + sum(self.count(*both) for both in self._calls(old, new))

    def find(self, old: ModuleCall, new: ModuleCall) -> Fault:
        """Where two calls with equal inputs and other outputs part."""
        last: CallPair | None = None
        for left, right in self._calls(old, new):
            if are_equal(left.inputs, right.inputs, self.tolerance):
                if not are_equal(left.outputs, right.outputs, self.tolerance):
                    return self.find(left, right)
            elif not self._are_moved(left, right):
                return self._in_code(old, new, last, (left, right))
            last = left, right
        if last is not None:
            return self._in_code(old, new, last, None)
        reasons = of_module(old, new, self.old_tensors, self.tolerance)
        return Fault(old.path, new.path, old.kind, new.kind, "module", reasons=tuple(reasons))

    def _are_moved(self, left: ModuleCall, right: ModuleCall) -> bool:
        """Whether two calls differ in the order of their numbers alone, as where channels come last in one of the models."""
        pairs = [*zip(left.inputs[:1], right.inputs[:1], strict=False), *zip(left.outputs, right.outputs, strict=False)]
        return bool(pairs) and all(one.holds_those_of(other, self.tolerance) for one, other in pairs)

    def _in_code(self, old: ModuleCall, new: ModuleCall, after: CallPair | None, before: CallPair | None) -> Fault:
        left = [self.pairs[call.path] for call in _shown(old, self.pairs) if call.path in self.pairs]
        right = [call.path for call in _shown(new, self._partners) if call.path in self._partners]
        reasons = of_code((old, new), after, before, (left, right), self.old_tensors, self.tolerance)
        places = after[0].path if after else "", before[0].path if before else ""
        return Fault(old.path, new.path, old.kind, new.kind, "code", *places, tuple(reasons))

    @property
    def _partners(self) -> set[str]:
        return set(self.pairs.values())

    def _calls(self, old: ModuleCall, new: ModuleCall) -> list[CallPair]:
        """The calls inside two partners that are partners, in the old order; between those, others by their places."""
        right = list(_shown(new, self._partners))
        places: dict[str, list[int]] = {}
        for at, call in enumerate(right):
            places.setdefault(call.path, []).append(at)
        found: list[CallPair] = []
        free: list[ModuleCall] = []
        start = 0
        for call in _shown(old, self.pairs):
            if waiting := call.path in self.pairs and places.get(self.pairs[call.path]):
                at = waiting.pop(0)
                found += [*self._by_place(free, right[start:at]), (call, right[at])]
                start, free = at + 1, []
            else:
                free.append(call)
        return found + self._by_place(free, right[start:])

    def _by_place(self, old: Sequence[ModuleCall], new: Sequence[ModuleCall]) -> list[CallPair]:
        left = [call for call in old if call.path not in self.pairs]
        right = [call for call in new if call.path not in self._partners]
        return list(zip(left, right, strict=True)) if len(left) == len(right) else []


def _shown(call: ModuleCall, known: Container[str]) -> Iterator[ModuleCall]:
    """The calls inside a call that can have partners: other modules stand for what is inside them."""
    for inner in call.calls:
        if inner.path in known or not inner.calls:
            yield inner
        else:
            yield from _shown(inner, known)


def first_apart(one: ModuleCall, other: ModuleCall) -> ModuleCall:
    """The module in which two runs of one model part."""
    for left, right in zip(one.calls, other.calls, strict=False):
        if left.path != right.path or not are_equal(left.inputs, right.inputs, 0):
            break
        if not are_equal(left.outputs, right.outputs, 0):
            return first_apart(left, right)
    return one
