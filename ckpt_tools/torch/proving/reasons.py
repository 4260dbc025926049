"""Why two partners give other numbers: their settings, their weights, what their own code does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from ckpt_tools.torch.proving import comparing
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall, Numbers

_PASSIVE = frozenset({"training", "inplace", "p", "track_running_stats"})  # nothing of these is seen when a model is evaluated
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu(tanh)": lambda x: functional.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": functional.elu,
    "leaky_relu": functional.leaky_relu,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "mish": functional.mish,
    "softplus": functional.softplus,
}


def settings(module: torch.nn.Module) -> dict[str, str]:
    """What a module was set to: its plain public attributes and functions, as text."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        key = "eps" if "eps" in name.lower() else name
        if isinstance(value, bool | int | float | str) or value is None or type(value) is tuple:
            found[key] = repr(value)
        elif inspect.isroutine(value):
            found[key] = getattr(value, "__name__", repr(value))
    return found


def different_settings(old: torch.nn.Module, new: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """Settings that both have, with other values."""
    left, right = settings(old), settings(new)
    shared = [name for name in left if name in right and name != "training"]
    return {name: (left[name], right[name]) for name in shared if left[name] != right[name]}


class Reasons:
    """Looks for reasons in two models; `tolerance`: what counts as equal."""

    def __init__(self, old: torch.nn.Module, new: torch.nn.Module, pairs: Mapping[str, str], tolerance: float) -> None:
        self.old, self.new, self.pairs, self.tolerance = old, new, pairs, tolerance

    def of_modules(self, old: ModuleCall, new: ModuleCall) -> list[str]:
        """Of two modules that make other numbers of the same."""
        found = list(self._weights(old, new))
        kinds = type(old.module).__name__, type(new.module).__name__
        for name, (left, right) in different_settings(old.module, new.module).items():
            if name not in _PASSIVE:
                found.append(f"{name} {left}, and {right} in the new one")
        if kinds[0] != kinds[1]:
            word = "activation" if _is_activation(old.module) and _is_activation(new.module) else "class"
            found.append(f"another {word}: {kinds[0]}, and {kinds[1]} in the new one")
        if not found:
            found += self._values(old.outputs, new.outputs)
        return found

    def of_code(
        self,
        old: ModuleCall,
        new: ModuleCall,
        after: CallPair | None,
        before: CallPair | None,
    ) -> list[str]:
        """Of the code of two modules, between two calls in them."""
        begin = [call.outputs for call in after] if after else [old.inputs, new.inputs]
        end = [call.inputs for call in before] if before else [old.outputs, new.outputs]
        found = list(_activations(begin, end, self.tolerance)) or self._values(*end)
        return found + self.of_modules(ModuleCall("", old.module), ModuleCall("", new.module))

    def _values(self, old: Sequence[Numbers], new: Sequence[Numbers]) -> list[str]:
        for left, right in zip(old, new, strict=False):
            if comparing.same_in_another_order(left, right, self.tolerance):
                return ["the same numbers in another order (of positions, heads or channels)"]
            times = comparing.factor(left, right, self.tolerance)
            if times is not None:
                return [f"{times:.6g} times the old numbers"]
            if left.numel != right.numel:
                return [f"a tensor of {'x'.join(map(str, left.shape))}, and {'x'.join(map(str, right.shape))} in the new one"]
        return []

    def _weights(self, old: ModuleCall, new: ModuleCall) -> Iterator[str]:
        left, right = _own(old.module), _own(new.module)
        for name in left:
            if name in right and name != "num_batches_tracked":
                yield from self._weight(name, left[name], right[name])
        if len(left) == len(right) == 1 and left.keys() != right.keys():
            yield from self._weight(next(iter(left)), *left.values(), *right.values())

    def _weight(self, name: str, left: torch.Tensor, right: torch.Tensor) -> Iterator[str]:
        if left.shape == right.shape and self._same(left, right):
            return
        how = self._relation(left, right)
        if how is None and (other := self._elsewhere(right)) is not None:
            how = f"is the old model's {other}"
        yield f"{name} {how or 'has other numbers'}"

    def _same(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        return left.shape == right.shape and bool(torch.allclose(left, right, rtol=self.tolerance, atol=0, equal_nan=True))

    def _relation(self, left: torch.Tensor, right: torch.Tensor) -> str | None:
        """What makes one weight the other."""
        if left.dim() == 2 and left.shape == right.shape[::-1] and self._same(left.t(), right):
            return f"is transposed ({'square' if left.shape[0] == left.shape[1] else 'x'.join(map(str, left.shape))})"
        if left.shape != right.shape or left.dtype.is_complex or not left.is_floating_point():
            return None
        if torch.allclose(left, right, rtol=2 * torch.finfo(torch.float32).eps, atol=0):
            return "is the old one, but for float32's rounding"
        if self._same(-left, right):
            return "is negated"
        for dim, word in enumerate(("rows are", "columns are")[: left.dim()]):
            if self._permuted(left, right, dim):
                return f"{word} in another order"
        times = float((left * right).sum() / (left * left).sum()) if left.any() else 0.0
        return f"is {times:.6g} times the old one" if times and self._same(left * times, right) else None

    def _permuted(self, left: torch.Tensor, right: torch.Tensor, dim: int) -> bool:
        """Whether the slices along a dimension are the same ones in another order."""
        one, other = (value.movedim(dim, 0).reshape(value.shape[dim], -1) for value in (left, right))
        weights = torch.linspace(1, 2, one.shape[1], dtype=one.dtype)
        keys = [(value * weights).sum(1).sort() for value in (one, other)]
        return self._same(one[keys[0].indices], other[keys[1].indices])

    def _elsewhere(self, value: torch.Tensor) -> str | None:
        for name, other in self.old.state_dict().items():
            if other.shape == value.shape and self._same(other, value):
                return name
        return None


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor.detach() for name, tensor in held.items() if tensor is not None}


def _is_activation(module: torch.nn.Module) -> bool:
    return type(module).__module__ == "torch.nn.modules.activation" or "act" in type(module).__name__.lower()


def _activations(begin: Sequence[Sequence[Numbers]], end: Sequence[Sequence[Numbers]], tolerance: float) -> Iterator[str]:
    """The function between two calls, where it is one that works on each number alone."""
    names = []
    for outputs, inputs in zip(begin, end, strict=True):
        if not outputs or not inputs or outputs[0].numel != inputs[0].numel:
            return
        room = tolerance * comparing.size(inputs[0])
        taken = outputs[0].taken
        fits = (name for name, work in ACTIVATIONS.items() if torch.allclose(work(taken), inputs[0].taken, rtol=0, atol=room))
        names.append(next(fits, None))
    if len(names) == 2 and names[0] != names[1] and any(names):
        yield f"another activation: {names[0] or 'an unknown one'}, and {names[1] or 'an unknown one'} in the new one"
