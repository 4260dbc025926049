"""What became of each tensor of a model, told by names, and by a few elements before the load, after it and in the files."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from ckpt_tools.torch.copying import is_freed, memory_of
from ckpt_tools.torch.guarding.fates import Fate, Word
from ckpt_tools.torch.guarding.files import Library, Runs, Stored, cast, runs_of
from ckpt_tools.tree.dtypes import DTYPES, DType

_COUNTER = "num_batches_tracked"
_HALVES = ("bfloat16", "float16")


class Before(NamedTuple):
    """A tensor as it was: where it lay, how often it had been written to, its dtype and the ends of its sample."""

    place: int
    version: int
    dtype: DType | None
    ends: bytes | None


def as_they_are(model: torch.nn.Module) -> dict[str, Before]:
    """What is to be remembered of a model's tensors, by name."""
    tensors = {held.name: held.tensor for held in _held(model)}
    taken = _samples(tensors, lambda numel: runs_of(numel)[:: max(1, len(runs_of(numel)) - 1)])
    return {
        name: Before(_place(tensor, name in taken), _version(tensor), dtype_of(tensor.dtype), taken.get(name))
        for name, tensor in tensors.items()
    }


class _Held(NamedTuple):
    """What a module holds: a parameter or a buffer, under one of its names; and whether a state dict holds it."""

    name: str
    tensor: torch.Tensor
    kind: str
    saved: bool


def _held(model: torch.nn.Module) -> Iterator[_Held]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield _Held(prefix + own, parameter, "parameter", True)
        unsaved = module._non_persistent_buffers_set
        for own, buffer in module._buffers.items():
            if buffer is not None:
                yield _Held(prefix + own, buffer, "buffer", own not in unsaved)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _place(tensor: torch.Tensor, sampled: bool) -> int:
    return tensor.data_ptr() if sampled else id(tensor)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that can be looked at here: not meta, not lazy, not cut among ranks, not freed."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or dtype_of(tensor.dtype) is None:
        return False
    is_one = type(tensor) in (torch.nn.Parameter, torch.Tensor)
    return (is_one or (not _is_lazy(tensor) and type(tensor.data) is torch.Tensor)) and not is_freed(tensor)


@cache
def dtype_of(dtype: torch.dtype) -> DType | None:
    """torch's dtype as ours; None where files have none like it."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


def _samples(tensors: Mapping[str, torch.Tensor], wanted: Callable[[int], Runs] = runs_of) -> dict[str, bytes]:
    """The samples of the plain ones; those on another device come in one transfer for each dtype, not one by one."""
    found: dict[str, bytes] = {}
    waiting: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if not _is_plain(tensor):
            continue
        runs, size = wanted(tensor.numel()), tensor.itemsize
        if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            at = tensor.data_ptr()
            found[name] = b"".join([ctypes.string_at(at + start * size, length * size) for start, length in runs])
        elif runs:
            waiting.setdefault((tensor.device, tensor.dtype), []).append(name)
        else:
            found[name] = b""
    for names in waiting.values():
        taken = [_taken(tensors[name], wanted(tensors[name].numel())) for name in names]
        together = torch.cat(taken).cpu()
        found |= zip(names, map(bytes, map(memory_of, together.split([len(one) for one in taken]))), strict=True)
    return found


def _taken(tensor: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The elements of the runs, in a row; one-byte types as uint8: torch takes from no float8."""
    held = tensor.detach().resolve_conj().resolve_neg()
    held = held.view(torch.uint8) if held.itemsize == 1 else held
    places = [place for start, length in runs for place in range(start, start + length)]
    return torch.take(held, torch.tensor(places, dtype=torch.int64, device=held.device))


@dataclass(slots=True)
class _Live:
    """A live tensor under all its names, and what it is in a file, once that is found."""

    names: Sequence[str]
    tensor: torch.Tensor
    sample: bytes
    dtype: DType
    stored: Stored | None = None
    how: str = ""

    @property
    def is_telling(self) -> bool:
        """Whether its sample could hardly be another's too: four elements and more that are not all one number."""
        size = self.dtype.itemsize
        return len(self.sample) >= 4 * size and self.sample != self.sample[:size] * (len(self.sample) // size)


class Judge:
    """Says what became of each tensor of a model. Names are looked for first: numbers that are found so are taken."""

    def __init__(self, model: torch.nn.Module, before: Mapping[str, Before], library: Library) -> None:
        self.before, self.library = before, library
        self.held = list(_held(model))
        taken = _samples({held.name: held.tensor for held in self.held})
        self.groups = _tied(self.held, taken)
        self.lives: dict[str, _Live] = {}
        for first, *others in self.groups:
            dtype = dtype_of(first.tensor.dtype)
            if first.name in taken and dtype is not None:
                names = [first.name, *(held.name for held in others)]
                self.lives[first.name] = _Live(names, first.tensor, taken[first.name], dtype)
        self.claimed: set[int] = set()

    def fates(self) -> list[Fate]:
        """A fate for every name, in the model's order."""
        for live in self.lives.values():
            self._by_name(live)
        for live in self.lives.values():
            if live.stored is None:
                self._by_numbers(live)
        crossed = self._swapped()
        judged: dict[str, Fate] = {}
        for first, *others in self.groups:
            fate = judged[first.name] = self._fate(first, crossed)
            for held in others:
                judged[held.name] = replace(fate, name=held.name)
                if fate.is_right and fate.fate != "unsaved":
                    judged[held.name] = Fate(held.name, fate.kind, "tied", how=f"to {first.name}")
        return [judged[held.name] for held in self.held]

    def _take(self, live: _Live, stored: Stored, how: str) -> None:
        live.stored, live.how = stored, how
        self.claimed.add(id(stored))

    def _by_name(self, live: _Live) -> None:
        """The tensor in a file under one of the live tensor's names, if its numbers are the same."""
        for stored in (stored for name in live.names for stored in self.library.named(name)):
            how = _how(stored, live)
            if how is not None:
                self._take(live, stored, how)
                return

    def _by_numbers(self, live: _Live) -> None:
        """A tensor under any other name with the same numbers."""
        found = self.library.same(live.sample, live.dtype, live.tensor.numel())
        if not live.is_telling:
            found = [stored for stored in found if id(stored) not in self.claimed and self._is_changed(live)]
        if found:
            self._take(live, found[0], _how(found[0], live) or "")

    def _swapped(self) -> dict[str, str]:
        """Names in rings that were loaded from one another's, and from where."""
        owners = {id(stored): live.names[0] for live in self.lives.values() for stored in self._own(live)}
        moved = {
            first: owners.get(id(live.stored), "")
            for first, live in self.lives.items()
            if live.stored is not None and owners.get(id(live.stored)) != first
        }
        found: dict[str, str] = {}
        seen: set[str] = set()
        for name in moved:
            path: list[str] = []
            while name in moved and name not in seen:
                seen.add(name)
                path.append(name)
                name = moved[name]
            for one in path[path.index(name) :] if name in path else ():
                stored = self.lives[one].stored
                found[one] = f"from {stored.where}" if stored is not None else ""
        return found

    def _own(self, live: _Live) -> Iterator[Stored]:
        return (stored for name in live.names for stored in self.library.named(name))

    def _fate(self, held: _Held, crossed: Mapping[str, str]) -> Fate:
        name, tensor, kind, saved = held
        live = self.lives.get(name)
        if live is None:
            return self._unsampled(held)
        if live.stored is not None:
            word: Word = "swapped" if name in crossed else "loaded"
            return Fate(name, kind, word, live.stored.path, live.stored.where, crossed.get(name, live.how))
        if not saved or not tensor.numel() or self._is_young(name):
            return Fate(name, kind, "unsaved")
        return Fate(name, kind, "untouched" if self._is_initial(live) else "changed")

    def _is_written(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether anything was written to it, told by autograd's counter and by its place in memory."""
        old = self.before.get(name)
        return old is None or (old.place, old.version) != (_place(tensor, name in self.lives), _version(tensor))

    def _is_changed(self, live: _Live) -> bool:
        """Whether anything was written to it, told by what it holds too: `.data` is written to without a trace."""
        return self._is_written(live.names[0], live.tensor) or not self._is_initial(live)

    def _is_initial(self, live: _Live) -> bool:
        """Whether it has the numbers that it was made with, moved or cast or not."""
        old = self.before.get(live.names[0])
        if old is None or old.ends is None or old.dtype is None:
            return False
        half = len(old.ends) // old.dtype.itemsize // 2 * live.dtype.itemsize
        whole = len(runs_of(live.tensor.numel())) < 2
        return cast(old.ends, old.dtype, live.dtype) == (live.sample if whole else live.sample[:half] + live.sample[-half:])

    def _is_young(self, name: str) -> bool:
        """Whether it counts batches of a norm that is in the files without it: before torch 0.4.1 there was no such buffer."""
        named = self.library.named
        return name.endswith(_COUNTER) and not named(name) and bool(named(name.removesuffix(_COUNTER) + "running_mean"))

    def _unsampled(self, held: _Held) -> Fate:
        """The fate of a tensor whose elements cannot be looked at."""
        name, tensor, kind, _ = held
        if _is_lazy(tensor):
            return Fate(name, kind, "untouched", how="lazy, without a shape")
        if tensor.is_meta:
            return Fate(name, kind, "untouched", how="on the meta device")
        how = "its memory has been freed" if is_freed(tensor) else f"a {type(tensor).__name__}"
        return Fate(name, kind, "unexamined" if self._is_written(name, tensor) else "untouched", how=how)


def _tied(all_held: Sequence[_Held], taken: Mapping[str, bytes]) -> list[list[_Held]]:
    """Those that are the same elements in memory, together."""
    places = Counter(held.tensor.data_ptr() for held in all_held if held.name in taken)
    groups: dict[object, list[_Held]] = {}
    for held in all_held:
        tensor = held.tensor
        shared = held.name in taken and tensor.numel() and places[tensor.data_ptr()] > 1
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device) if shared else id(tensor)
        groups.setdefault(key, []).append(held)
    return list(groups.values())


def _how(stored: Stored, live: _Live) -> str | None:
    """What was done to a file's tensor to make the live one; the empty text where they are equal, None where they are not."""
    entry, shape = stored.entry, tuple(live.tensor.shape)
    if entry.shape == shape and entry.dtype is live.dtype and stored.sample == live.sample:
        return ""  # as most
    if entry.numel != live.tensor.numel():
        return None
    moves = [f"{len(entry.shape)} -> {len(shape)} dimensions"] if entry.shape != shape else []
    if entry.dtype is not live.dtype:
        moves.append(f"{entry.dtype.name} -> {live.dtype.name}")
    if cast(stored.sample, entry.dtype, live.dtype) == live.sample:
        return ", ".join(moves)
    for half in _HALVES if entry.dtype.family == live.dtype.family == "float" else ():
        rounded = cast(stored.sample, entry.dtype, DTYPES[half])
        if rounded is not None and cast(rounded, DTYPES[half], live.dtype) == live.sample:
            return f"{entry.dtype.name} -> {half} -> {live.dtype.name}"
    if len(shape) == 2 and entry.shape == shape[::-1]:
        places = [at for start, length in runs_of(entry.numel) for at in range(start, start + length)]
        turned = stored.at(tuple((at % shape[1] * shape[0] + at // shape[1], 1) for at in places))
        if cast(turned, entry.dtype, live.dtype) == live.sample:
            return "transposed"
    return None
