"""The fate of every tensor of a model: what it was before, what it is now, and what the files have."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ckpt_tools.torch.copying import is_freed
from ckpt_tools.torch.guarding import samples
from ckpt_tools.torch.guarding.fates import Fate
from ckpt_tools.torch.guarding.stored import Library
from ckpt_tools.torch.guarding.tracing import Live, Tracer
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.names import unwrap

_COUNTER = "num_batches_tracked"


class Before(NamedTuple):
    """A tensor as it was: where it lay, how often it had been written to, its dtype and the ends of its sample."""

    place: int
    version: int
    dtype: DType | None
    ends: bytes | None


def as_they_are(model: torch.nn.Module) -> dict[str, Before]:
    """What is to be remembered of a model's tensors, by name."""
    tensors = {held.name: held.tensor for held in _held(model)}
    plain = {name: tensor for name, tensor in tensors.items() if samples.is_plain(tensor)}
    ends = dict(zip(plain, samples.of_all_live(list(plain.values()), samples.ends_of), strict=True))
    return {
        name: Before(
            tensor.data_ptr() if name in ends else id(tensor),
            _version(tensor),
            samples.dtype_of(tensor.dtype),
            ends.get(name),
        )
        for name, tensor in tensors.items()
    }


class Held(NamedTuple):
    """What a module holds: a parameter or a buffer, under one of its names; and whether a state dict holds it."""

    name: str
    tensor: torch.Tensor
    kind: str
    saved: bool


def _held(model: torch.nn.Module) -> Iterator[Held]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield Held(prefix + own, parameter, "parameter", True)
        unsaved = module._non_persistent_buffers_set
        for own, buffer in module._buffers.items():
            if buffer is not None:
                yield Held(prefix + own, buffer, "buffer", own not in unsaved)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Judge:
    """Says what became of each tensor of a model. Names are looked for first: numbers that are found so are taken."""

    def __init__(self, model: torch.nn.Module, before: Mapping[str, Before], library: Library) -> None:
        self.before, self.library, self.tracer = before, library, Tracer(library)
        self.held = list(_held(model))
        plain = [held for held in self.held if samples.is_plain(held.tensor)]
        places = {held.name: held.tensor.data_ptr() for held in plain}
        self.groups = _tied(self.held, places)
        taken = dict(zip(places, samples.of_all_live([held.tensor for held in plain]), strict=True))
        self.lives = {
            first.name: Live([held.name for held in group], first.tensor, taken[first.name])
            for group in self.groups
            if (first := group[0]).name in taken
        }
        self.origins = {first: self.tracer.by_name(live) for first, live in self.lives.items()}

    def fates(self) -> list[Fate]:
        """A fate for every name, in the model's order."""
        judged: dict[str, Fate] = {}
        for first, *others in self.groups:
            fate = judged[first.name] = self._fate(first)
            for held in others:
                right = fate.is_right and fate.fate != "unsaved"
                judged[held.name] = (
                    Fate(held.name, fate.kind, "tied", how=f"to {first.name}") if right else replace(fate, name=held.name)
                )
        fates = [judged[held.name] for held in self.held]
        crossed = swapped(fates)
        return [replace(fate, fate="swapped", how=f"from {fate.source}") if fate.name in crossed else fate for fate in fates]

    def _is_written(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether anything was written to it, told by autograd's counter and by its place in memory."""
        place = tensor.data_ptr() if name in self.lives else id(tensor)
        old = self.before.get(name)
        return old is None or (old.place, old.version) != (place, _version(tensor))

    def _fate(self, held: Held) -> Fate:
        name, tensor, kind, saved = held
        live = self.lives.get(name)
        if live is None:
            return self._unsampled(held)
        origin = self.origins[name] or self.tracer.by_numbers(live, written=self._is_changed(live))
        if origin is not None:
            return Fate(name, kind, "loaded", origin.path, origin.name, origin.how)
        if not saved or not tensor.numel() or self._is_young(name):
            return Fate(name, kind, "unsaved")
        if self._is_changed(live) and (origin := self.tracer.reordered(live)) is not None:
            return Fate(name, kind, "loaded", origin.path, origin.name, origin.how)
        partly = self.tracer.partly(live)
        if partly is not None:
            return Fate(name, kind, "partly", partly.path, partly.name, partly.how)
        return Fate(name, kind, "untouched" if self._is_initial(live) else "changed")

    def _is_changed(self, live: Live) -> bool:
        """Whether anything was written to it, told by what it holds too: `.data` is written to without a trace."""
        return self._is_written(live.names[0], live.tensor) or not self._is_initial(live)

    def _is_initial(self, live: Live) -> bool:
        """Whether it has the numbers that it was made with, moved or cast or not."""
        old = self.before.get(live.names[0])
        if old is None or old.ends is None or old.dtype is None:
            return False
        return samples.cast(old.ends, old.dtype, live.dtype) == samples.ends(live.sample, live.tensor.numel(), live.dtype)

    def _is_young(self, name: str) -> bool:
        """Whether it counts batches of a norm that is in the files without it: before torch 0.4.1 there was no such buffer."""
        named = self.library.named
        return name.endswith(_COUNTER) and not named(name) and bool(named(name.removesuffix(_COUNTER) + "running_mean"))

    def _unsampled(self, held: Held) -> Fate:
        """The fate of a tensor whose elements cannot be looked at."""
        name, tensor, kind, _ = held
        if samples.is_lazy(tensor):
            return Fate(name, kind, "untouched", how="lazy, without a shape")
        if tensor.is_meta:
            return Fate(name, kind, "untouched", how="on the meta device")
        written = self._is_written(name, tensor)
        how = "its memory has been freed" if is_freed(tensor) else f"a {type(tensor).__name__}"
        return Fate(name, kind, "unexamined" if written else "untouched", how=how)


def swapped(fates: Sequence[Fate]) -> set[str]:
    """Names that were loaded from one another's: `a` has what the file calls `b`, and `b` what it calls `a`; longer rings too.

    A chain is not a ring: a small model takes every second layer of a large one.
    """
    moved = [fate for fate in fates if fate.fate == "loaded" and not f".{fate.source}".endswith(f".{fate.name}")]
    if not moved:
        return set()
    names = {unwrap(fate.name): fate.name for fate in fates}
    steps: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # by file and by prefix in it: name -> name in the file
    for fate in moved:
        pieces = unwrap(fate.source).split(".")
        for start in range(len(pieces)):
            if (other := names.get(".".join(pieces[start:]))) is not None:
                steps[fate.path, ".".join(pieces[:start])][fate.name] = other
    found: set[str] = set()
    for taken in steps.values():
        seen: set[str] = set()
        for name in taken:
            path: list[str] = []
            while name in taken and name not in seen:
                seen.add(name)
                path.append(name)
                name = taken[name]
            ring = path[path.index(name) :] if name in path else []
            found.update(ring if len(ring) > 1 else [])
    return found


def _tied(all_held: Sequence[Held], places: Mapping[str, int]) -> list[list[Held]]:
    """Those that are the same elements in memory, together."""
    alone = {place for place, count in Counter(places.values()).items() if count == 1}
    groups: dict[object, list[Held]] = {}
    for held in all_held:
        place, tensor = places.get(held.name), held.tensor
        shared = place and place not in alone and tensor.numel()
        key = (place, tensor.shape, tensor.stride(), tensor.device) if shared else id(tensor)
        groups.setdefault(key, []).append(held)
    return list(groups.values())
