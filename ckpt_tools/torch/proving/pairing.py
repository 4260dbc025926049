"""Which module of the old model is which module of the new one: by their tensors, then by their places between those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ckpt_tools.fit.targets import read_target
from ckpt_tools.matching import match
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall, shown_calls


def pair_tensors(old: torch.nn.Module, new: torch.nn.Module) -> dict[str, str]:
    """Name of a tensor in the old model -> its partner's name in the new one."""
    matching = match(read_target(old).params, read_target(new).params, stages="structure")
    found = {row.old: row.new for row in matching.matched}
    return found | {offer.old[0]: offer.new[0] for offer in matching.offers if offer.step == "transpose"}


def pair_modules(old: torch.nn.Module, new: torch.nn.Module, tensors: Mapping[str, str]) -> dict[str, str]:
    """Path of a module in the old model -> its partner's path in the new one."""
    found = _one_to_one((name.rpartition(".")[0], other.rpartition(".")[0]) for name, other in tensors.items())
    found |= {path: other for path, other in _around(found).items() if path not in found}
    found[""] = ""
    _add_same_names(found, dict(old.named_modules()), dict(new.named_modules()))
    return found


def _one_to_one(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The pairs that no other pair contradicts."""
    there: dict[str, set[str]] = {}
    back: dict[str, set[str]] = {}
    for old, new in pairs:
        there.setdefault(old, set()).add(new)
        back.setdefault(new, set()).add(old)
    return {old: next(iter(news)) for old, news in there.items() if len(news) == 1 and len(back[next(iter(news))]) == 1}


def _around(pairs: Mapping[str, str]) -> dict[str, str]:
    """Modules that hold paired ones: two are partners where each is the closest around the other's."""
    there = {path: _common(news) for path, news in _below(pairs.items()).items()}
    back = {path: _common(olds) for path, olds in _below((new, old) for old, new in pairs.items()).items()}
    return {old: new for old, new in there.items() if old and new and back.get(new) == old}


def _below(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, other in pairs:
        parts = path.split(".")
        for length in range(1, len(parts)):
            found.setdefault(".".join(parts[:length]), []).append(other)
    return found


def _common(paths: Sequence[str]) -> str:
    shared: list[str] = []
    for parts in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _add_same_names(pairs: dict[str, str], old: Mapping[str, torch.nn.Module], new: Mapping[str, torch.nn.Module]) -> None:
    """Modules without tensors that are called alike in paired modules."""
    taken = set(pairs.values())
    for path in old:
        around, _, own = path.rpartition(".")
        if path not in pairs and around in pairs:
            other = f"{pairs[around]}.{own}".removeprefix(".")
            if other in new and other not in taken:
                pairs[path] = other
                taken.add(other)


def in_both(pairs: Mapping[str, str], old: ModuleCall, new: ModuleCall) -> dict[str, str]:
    """The pairs of modules that ran in both: a list of modules has no call of its own."""
    left, right = set(_paths(old)), set(_paths(new))
    return {path: other for path, other in pairs.items() if path in left and other in right}


def _paths(call: ModuleCall) -> Iterator[str]:
    yield call.path
    for inner in call.calls:
        yield from _paths(inner)


def pair_calls(old: ModuleCall, new: ModuleCall, pairs: Mapping[str, str]) -> list[CallPair]:
    """The calls inside two partners that are partners, in the old order."""
    left, right = list(shown_calls(old, pairs)), list(shown_calls(new, set(pairs.values())))
    waiting: dict[str, list[int]] = {}
    for index, call in enumerate(right):
        waiting.setdefault(call.path, []).append(index)
    found: list[CallPair] = []
    free: list[ModuleCall] = []
    at = 0
    for call in left:
        places = waiting.get(pairs.get(call.path, "\0"), [])
        if not places:
            free.append(call)
            continue
        index = places.pop(0)
        found += _between(free, right[at:index], pairs)
        found.append((call, right[index]))
        free, at = [], index + 1
    return found + _between(free, right[at:], pairs)


def _between(old: Sequence[ModuleCall], new: Sequence[ModuleCall], pairs: Mapping[str, str]) -> list[CallPair]:
    paired = set(pairs.values())
    left, right = ([call for call in calls if call.path not in known] for calls, known in ((old, pairs), (new, paired)))
    return list(zip(left, right, strict=True)) if len(left) == len(right) else []
