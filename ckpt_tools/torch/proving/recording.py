"""What goes into and comes out of every module while a model runs: a few thousand numbers of each tensor, not the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ckpt_tools.errors import ConvertError
from ckpt_tools.values.running import tensors_in

_MOST = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Numbers of a tensor, in float64: up to 4096 of them in their order, and what all of them add up to."""

    shape: tuple[int, ...]
    taken: torch.Tensor
    moments: torch.Tensor

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(slots=True, eq=False)
class ModuleCall:
    path: str
    module: torch.nn.Module
    inputs: list[Numbers] = field(default_factory=list)
    outputs: list[Numbers] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)


CallPair: TypeAlias = tuple[ModuleCall, ModuleCall]  # of the old model and of the new one


def numbers(tensor: torch.Tensor) -> Numbers:
    held = plain(tensor)
    flat = held.reshape(-1).to(torch.float64)
    count = flat.numel()
    if not count:
        return Numbers(tuple(held.shape), flat, flat.new_zeros(4))
    taken = flat if count <= _MOST else flat[torch.linspace(0, count - 1, _MOST, dtype=torch.float64).long()]
    return Numbers(tuple(held.shape), taken.clone(), torch.stack([flat.sum(), (flat * flat).sum(), flat.min(), flat.max()]))


def shown_calls(call: ModuleCall, known: Mapping[str, str] | set[str]) -> Iterator[ModuleCall]:
    """The calls inside a call that can have partners: of paired modules, and of leaves; others stand for what is inside."""
    for inner in call.calls:
        if inner.path in known or not inner.calls:
            yield inner
        else:
            yield from shown_calls(inner, known)


class Recorder:
    def __init__(self, model: torch.nn.Module) -> None:
        self.root: ModuleCall | None = None
        self._open: list[ModuleCall] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))

    @property
    def inside(self) -> ModuleCall | None:
        """The call that has begun last and has not ended."""
        return self._open[-1] if self._open else None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str) -> Any:
        def begin(module: torch.nn.Module, given: Any, named: Any) -> None:
            call = ModuleCall(path, module, [numbers(tensor) for tensor in tensors_in((given, named))])
            if self._open:
                self._open[-1].calls.append(call)
            else:
                self.root = call
            self._open.append(call)

        return begin

    def _after(self, module: torch.nn.Module, given: Any, named: Any, made: Any) -> None:
        self._open.pop().outputs = [numbers(tensor) for tensor in tensors_in(made)]


Named = dict[str, torch.Tensor]
_DEEPEST = 8


class Gap(NamedTuple):
    """How far two runs are apart."""

    largest: float
    relative: float
    numbers: int = 0
    nan: int = 0


def named(value: Any) -> Named:
    """The tensors and numbers in what a model gives, each by the path to it: `logits`, `[0]`, `states[2]`."""
    return {path: plain(tensor).clone() for path, tensor in walk(value)}


def walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of everything in what a model gives, as they are."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, bool | int | float | complex):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    elif hasattr(value, "__array_interface__"):
        yield path, torch.as_tensor(value)
    elif depth < _DEEPEST:
        for step, item in _items(value):
            yield from walk(item, f"{path}{step}".removeprefix("."), depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type | torch.nn.Module):
        said = getattr(value, "_fields", [each.name for each in fields(value)] if is_dataclass(value) else None)
        held = (name for name in getattr(value, "__dict__", ()) if not name.startswith("_"))
        yield from ((f".{name}", getattr(value, name)) for name in (held if said is None else said))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that can be subtracted."""
    held = tensor.detach()
    if held.is_quantized:
        held = held.dequantize()
    elif held.is_nested:
        held = torch.nested.to_padded_tensor(held, 0.0)
    elif held.layout != torch.strided:
        held = held.to_dense()
    return torch.view_as_real(held.resolve_conj()) if held.is_complex() else held


class Paired(NamedTuple):
    """The outputs of two models that are the same thing: pairs of their paths; and those that only one of them has."""

    pairs: list[tuple[str, str]]
    left_out: list[str]


def pair(old: Named, new: Named) -> Paired:
    """Outputs by their paths; by their order, where none is called alike; one alone is the first of several."""
    for side, found in (("OLD", old), ("NEW", new)):
        if not found:
            raise ConvertError(f"The model of {side} gives no numbers.", why="There is nothing to compare.")
    shared = [path for path in old if path in new]
    if shared:
        pairs = [(path, path) for path in shared]
    elif len(old) == len(new) or 1 in (len(old), len(new)):
        pairs = list(zip(old, new, strict=False))
    else:
        raise ConvertError(
            f"The models have no output in common: {len(old)} of OLD ({', '.join(old)}), {len(new)} of NEW ({', '.join(new)}).",
            why="They are paired by their names, or by their order where there are equally many.",
        )  # fmt: skip
    taken = [set(column) for column in zip(*pairs, strict=True)]
    left = [f"{path or 'the output'} of the {word} model" for word, found, seen in
            (("old", old, taken[0]), ("new", new, taken[1])) for path in found if path not in seen]  # fmt: skip
    return Paired(pairs, left)


def gap(old: Named, new: Named, paired: Paired) -> Gap:
    found = [_one(old[left], new[right]) for left, right in paired.pairs]
    return Gap(max(one.largest for one in found), max(one.relative for one in found),
               sum(one.numbers for one in found), sum(one.nan for one in found))  # fmt: skip


def _one(left: torch.Tensor, right: torch.Tensor) -> Gap:
    """Numbers that are NaN or infinite alike do not differ; integers that differ do so by themselves, not by the largest."""
    if left.shape != right.shape:
        return Gap(float("inf"), float("inf"))
    if not left.numel():
        return Gap(0.0, 0.0)
    nan = left.isnan() & right.isnan()
    old, new = left.double(), right.double()
    apart = torch.where((left == right) | nan, 0.0, (old - new).abs().nan_to_num(torch.inf, torch.inf, torch.inf))
    if not (left.is_floating_point() or right.is_floating_point()):
        different = float(torch.where(left != right, apart.clamp(min=1.0), 0.0).max())  # float64 cannot tell all integers apart
        return Gap(different, different, left.numel())
    largest = float(apart.max())
    scale = float(old.abs().nan_to_num(0, 0, 0).max()) or 1e-300
    return Gap(largest, largest / scale if largest else 0.0, left.numel(), int(nan.sum()))
