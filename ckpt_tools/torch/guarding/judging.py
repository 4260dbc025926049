"""The fate of every tensor of a model: what it was before, what it is now, and what the files have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ckpt_tools.torch.guarding import samples
from ckpt_tools.torch.guarding.fates import Fate
from ckpt_tools.torch.guarding.stored import Library
from ckpt_tools.torch.guarding.tracing import Live, Tracer
from ckpt_tools.tree.dtypes import DTYPES

_COUNTER = "num_batches_tracked"


class Before(NamedTuple):
    """A tensor as it was: where it lay, how often it had been written to, its dtype and its sample."""

    place: int
    version: int
    dtype: str
    sample: bytes | None


def as_they_are(model: torch.nn.Module) -> dict[str, Before]:
    """What is to be remembered of a model's tensors, by name."""
    tensors = {name: tensor for name, tensor, _ in _tensors(model)}
    taken = _samples(tensors)
    return {
        name: Before(_place(tensor), _version(tensor), samples.dtype_of(tensor), taken.get(name))
        for name, tensor in tensors.items()
    }


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Parameters and buffers, under each of their names; and whether a state dict holds them."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        unsaved = module._non_persistent_buffers_set
        for held in (module._parameters, module._buffers):
            yield from ((prefix + own, tensor, own not in unsaved) for own, tensor in held.items() if tensor is not None)


def _samples(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    plain = {name: tensor for name, tensor in tensors.items() if samples.is_plain(tensor)}
    return dict(zip(plain, samples.of_all_live(list(plain.values())), strict=True))


def _place(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if samples.is_plain(tensor) else id(tensor)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Judge:
    """Says what became of each tensor of a model. Names are looked for first: numbers that are found so are taken."""

    def __init__(self, model: torch.nn.Module, before: Mapping[str, Before], library: Library) -> None:
        found = list(_tensors(model))
        self.before, self.library, self.tracer = before, library, Tracer(library)
        self.tensors = {name: tensor for name, tensor, _ in found}
        self.unsaved = {name for name, _, saved in found if not saved}
        taken = _samples(self.tensors)
        self.groups = self._tied(taken)
        self.lives = {names[0]: self._live(names, taken[names[0]]) for names in self.groups if names[0] in taken}
        self.origins = {first: self.tracer.by_name(live) for first, live in self.lives.items()}

    def fates(self) -> list[Fate]:
        """A fate for every name, in the model's order."""
        judged = {names[0]: self._fate(names[0]) for names in self.groups}
        for first, *others in self.groups:
            of_first = judged[first]
            for name in others:
                right = of_first.is_right and of_first.fate != "unsaved"
                judged[name] = Fate(name, of_first.kind, "tied", how=f"to {first}") if right else replace(of_first, name=name)
        return [judged[name] for name in self.tensors]

    def _tied(self, taken: Mapping[str, bytes]) -> list[list[str]]:
        """Names that are the same elements in memory, together."""
        groups: dict[object, list[str]] = {}
        for name, tensor in self.tensors.items():
            plain = name in taken and tensor.numel()
            shared = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device) if plain else id(tensor)
            groups.setdefault(shared, []).append(name)
        return list(groups.values())

    def _live(self, names: list[str], sample: bytes) -> Live:
        return Live(names, self.tensors[names[0]], sample, self._is_written(names[0]))

    def _is_written(self, name: str) -> bool:
        """Whether anything was written to it, told by autograd's counter and by its place in memory."""
        old, tensor = self.before.get(name), self.tensors[name]
        return old is None or (old.place, old.version) != (_place(tensor), _version(tensor))

    def _fate(self, name: str) -> Fate:
        kind = "parameter" if isinstance(self.tensors[name], torch.nn.Parameter) else "buffer"
        live = self.lives.get(name)
        if live is None:
            return self._unsampled(name, kind)
        origin = self.origins[name] or self.tracer.by_numbers(live)
        if origin is not None:
            return Fate(name, kind, "loaded", origin.path, origin.name, origin.how)
        if name in self.unsaved or not live.tensor.numel() or self._is_young(name):
            return Fate(name, kind, "unsaved")
        if self._is_initial(live):
            return Fate(name, kind, "untouched")
        partly = self.tracer.partly(live)
        if partly is None:
            return Fate(name, kind, "changed")
        return Fate(name, kind, "partly", partly.path, partly.name, partly.how)

    def _is_initial(self, live: Live) -> bool:
        """Whether it has the numbers that it was made with, moved or cast or not."""
        old = self.before.get(live.names[0])
        if old is None or old.sample is None:
            return False
        return samples.cast(old.sample, DTYPES[old.dtype], live.dtype) == live.sample

    def _is_young(self, name: str) -> bool:
        """Whether it counts batches of a norm that is in the files without it: before torch 0.4.1 there was no such buffer."""
        named = self.library.named
        return name.endswith(_COUNTER) and not named(name) and bool(named(name.removesuffix(_COUNTER) + "running_mean"))

    def _unsampled(self, name: str, kind: str) -> Fate:
        """The fate of a tensor whose elements cannot be looked at."""
        tensor = self.tensors[name]
        if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
            return Fate(name, kind, "untouched", how="lazy, without a shape")
        if tensor.is_meta:
            return Fate(name, kind, "untouched", how="on the meta device")
        return Fate(name, kind, "unexamined" if self._is_written(name) else "untouched", how=f"a {type(tensor).__name__}")
