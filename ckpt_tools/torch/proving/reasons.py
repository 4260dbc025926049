"""Why two partners give other numbers: their settings, their weights, what their own code does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional

from ckpt_tools.text import listed
from ckpt_tools.torch.proving import relations
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall, Numbers, shown_calls

_SHOWN = 6
_ENDINGS = ("lu", "sigmoid", "tanh", "swish", "mish")
_PASSIVE = frozenset({"training", "inplace", "p", "track_running_stats"})  # nothing of these is seen when a model is evaluated


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
    left, right = settings(old), settings(new)
    shared = [name for name in left if name in right and name != "training"]
    return {name: (left[name], right[name]) for name in shared if left[name] != right[name]}


def _different_configs(old: torch.nn.Module, new: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """What two modules that keep their model's configuration, as transformers' do, have there with other values."""
    configs = [getattr(module, "config", None) for module in (old, new)]
    left, right = (_plain(getattr(config, "__dict__", {}), "config.") for config in configs)
    found = {name: (left[name], right[name]) for name in left if name in right and left[name] != right[name]}
    return dict(list(found.items())[:_SHOWN])


def _plain(values: Mapping[str, Any], prefix: str, depth: int = 1) -> dict[str, str]:
    """The plain values in a configuration, and in its dicts, as text."""
    found = {}
    for key, value in values.items():
        if isinstance(value, bool | int | float | str) or value is None:
            found[f"{prefix}{key}"] = repr(value)
        elif isinstance(value, dict) and depth:
            found |= _plain(value, f"{prefix}{key}.", depth - 1)
    return found


class Reasons:
    """Looks for reasons in two models; `tolerance`: what counts as equal."""

    def __init__(self, old: torch.nn.Module, new: torch.nn.Module, pairs: Mapping[str, str], tolerance: float) -> None:
        self.old, self.new, self.pairs, self.tolerance = old, new, pairs, tolerance

    def of_modules(self, old: ModuleCall, new: ModuleCall) -> list[str]:
        found = list(self._weights(old, new))
        kinds = type(old.module).__name__, type(new.module).__name__
        differ = different_settings(old.module, new.module) or _different_configs(old.module, new.module)
        for name, (left, right) in differ.items():
            if name not in _PASSIVE:
                found.append(f"{name} {left}, and {right} in the new one")
        if kinds[0] != kinds[1]:
            word = "activation" if _is_activation(old.module) and _is_activation(new.module) else "class"
            found.append(f"another {word}: {kinds[0]}, and {kinds[1]} in the new one")
        return found or list(self._of_numbers(old, new))

    def _of_numbers(self, old: ModuleCall, new: ModuleCall) -> Iterator[str]:
        """By what comes out alone."""
        for one, other, word in ((old, new, "new"), (new, old, "old")):
            if gives_back(other, self.tolerance) and not gives_back(one, self.tolerance):
                yield f"the {word} one gives back what it is given"
        for name, tensor in _own(old.module).items():
            if (sign := added(old.outputs, new.outputs, tensor, self.tolerance)) is not None:
                yield f"{name} is {'added once more' if sign > 0 else 'not added'} in the new one"
        yield from values(old.outputs, new.outputs, self.tolerance)

    def of_code(self, old: ModuleCall, new: ModuleCall, after: CallPair | None, before: CallPair | None) -> list[str]:
        """Of the code of two modules, between two calls in them."""
        begin = [call.outputs for call in after] if after else [old.inputs, new.inputs]
        end = [call.inputs for call in before] if before else [old.outputs, new.outputs]
        found = list(self._orders(old, new)) or list(activations(begin, end, self.tolerance))
        found = found or list(shortcut(old.inputs, end, self.tolerance))
        found = found or list(values(end[0], end[1], self.tolerance))
        return found + self.of_modules(ModuleCall("", old.module), ModuleCall("", new.module))

    def _orders(self, old: ModuleCall, new: ModuleCall) -> Iterator[str]:
        partners = set(self.pairs.values())
        left = [self.pairs[call.path] for call in shown_calls(old, self.pairs) if call.path in self.pairs]
        right = [call.path for call in shown_calls(new, partners) if call.path in partners]
        if left != right and sorted(left) == sorted(right):
            own = [listed([path.rpartition(".")[2] for path in order], _SHOWN) for order in (left, right)]
            yield f"modules are called in another order: {own[0]}; {own[1]} in the new one"

    def _weights(self, old: ModuleCall, new: ModuleCall) -> Iterator[str]:
        left, right = _own(old.module), _own(new.module)
        for name in left:
            if name in right and name != "num_batches_tracked":
                yield from self._weight(name, left[name], right[name])
        if len(left) == len(right) == 1 and left.keys() != right.keys():
            yield from self._weight(next(iter(left)), *left.values(), *right.values())

    def _weight(self, name: str, left: torch.Tensor, right: torch.Tensor) -> Iterator[str]:
        if relations.same(left, right, self.tolerance):
            return
        how = relations.relation(left, right, self.tolerance)
        if how is None and (other := self._elsewhere(right)) is not None:
            how = f"is the old model's {other}"
        yield f"{name} {how or 'has other numbers'}"

    def _elsewhere(self, value: torch.Tensor) -> str | None:
        for name, other in self.old.state_dict().items():
            if other.shape == value.shape and relations.same(other, value, self.tolerance):
                return name
        return None


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor.detach() for name, tensor in held.items() if tensor is not None}


def _is_activation(module: torch.nn.Module) -> bool:
    kind = type(module)
    return "activation" in kind.__module__ or "act" in kind.__name__.lower() or kind.__name__.lower().endswith(_ENDINGS)


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


def equal(old: Sequence[Numbers], new: Sequence[Numbers], tolerance: float) -> bool:
    """Whether two lists of tensors are equal; where they are not equally long, their first ones count."""
    if len(old) != len(new):
        old, new = old[:1], new[:1]
    return len(old) == len(new) and all(_is_equal(*pair, tolerance) for pair in zip(old, new, strict=True))


def _is_equal(old: Numbers, new: Numbers, tolerance: float) -> bool:
    """Row-major, whatever their shapes are."""
    if old.numel != new.numel:
        return False
    scale = size(old, new)
    if not torch.allclose(old.taken, new.taken, rtol=0, atol=tolerance * scale, equal_nan=True):
        return False
    sums = abs(float(old.moments[0] - new.moments[0]))
    return not sums > tolerance * scale * max(old.numel, 1)  # NaN: the numbers that were taken have decided


def size(*several: Numbers) -> float:
    """The largest magnitude, never 0."""
    return max((float(one.moments[2:].abs().nan_to_num(0).max()) for one in several), default=0.0) or 1e-300


def same_in_another_order(old: Numbers, new: Numbers, tolerance: float) -> bool:
    """Whether two tensors hold the same numbers at other places."""
    if old.numel != new.numel or not old.numel or _is_equal(old, new, tolerance):
        return False
    if old.numel == old.taken.numel():
        left, right = old.taken.sort().values, new.taken.sort().values
        return bool(torch.allclose(left, right, rtol=0, atol=tolerance * size(old, new), equal_nan=True))
    scale = size(old, new)
    rooms = torch.tensor([scale * old.numel, scale * scale * old.numel, scale, scale], dtype=torch.float64) * tolerance
    return bool(((old.moments - new.moments).abs() <= rooms).all())


def factor(old: Numbers, new: Numbers, tolerance: float) -> float | None:
    """The one number that makes the old tensor the new one, if there is one."""
    if old.numel != new.numel or not old.numel:
        return None
    square = float((old.taken * old.taken).sum())
    if not square:
        return None
    found = float((old.taken * new.taken).sum()) / square
    same = torch.allclose(old.taken * found, new.taken, rtol=0, atol=max(tolerance, 1e-12) * size(new))
    return found if same and abs(found - 1) > tolerance else None


def values(old: Sequence[Numbers], new: Sequence[Numbers], tolerance: float) -> Iterator[str]:
    for left, right in zip(old, new, strict=False):
        if same_in_another_order(left, right, tolerance):
            yield "the same numbers in another order (of positions, heads or channels)"
        elif (times := factor(left, right, tolerance)) is not None:
            yield f"{times:.6g} times the old numbers"
        elif left.numel != right.numel:
            yield f"a tensor of {'x'.join(map(str, left.shape))}, and {'x'.join(map(str, right.shape))} in the new one"
        else:
            continue
        return


def gives_back(call: ModuleCall, tolerance: float) -> bool:
    return bool(call.inputs and call.outputs) and _is_equal(call.inputs[0], call.outputs[0], tolerance)


def added(old: Sequence[Numbers], new: Sequence[Numbers], tensor: torch.Tensor, tolerance: float) -> int | None:
    """1 where this tensor, one number for each channel, is what the new outputs have more; -1: less; None: neither."""
    if not old or not new or old[0].numel != new[0].numel or tensor.dim() != 1 or not old[0].numel or not tensor.any():
        return None
    shape, count = old[0].shape, old[0].numel
    places = torch.linspace(0, count - 1, len(old[0].taken), dtype=torch.float64).long()
    if shape and shape[-1] == len(tensor):
        spread = tensor[places % len(tensor)]
    elif len(shape) > 1 and shape[1] == len(tensor):
        spread = tensor[places // prod(shape[2:]) % len(tensor)]
    else:
        return None
    room = tolerance * size(old[0], new[0])
    more = new[0].taken - old[0].taken
    return next((sign for sign in (1, -1) if torch.allclose(more, sign * spread.double(), rtol=0, atol=room)), None)


def shortcut(given: Sequence[Numbers], end: Sequence[Sequence[Numbers]], tolerance: float) -> Iterator[str]:
    """Whether two values are apart by what their module is given."""
    first = [numbers[0] for numbers in (given, *end) if numbers]
    if len(first) < 3 or len({numbers.numel for numbers in first}) > 1:
        return
    less = first[1].taken - first[2].taken
    for sign, word in ((1, "not added"), (-1, "added once more")):
        if torch.allclose(sign * less, first[0].taken, rtol=0, atol=tolerance * size(*first)):
            yield f"the module's input is {word} in the new one (a shortcut)"


def activations(begin: Sequence[Sequence[Numbers]], end: Sequence[Sequence[Numbers]], tolerance: float) -> Iterator[str]:
    """The function between two calls, where it is one that works on each number alone."""
    names = []
    for outputs, inputs in zip(begin, end, strict=True):
        if not outputs or not inputs or outputs[0].numel != inputs[0].numel:
            return
        room = tolerance * size(inputs[0])
        taken = outputs[0].taken
        fits = (name for name, work in ACTIVATIONS.items() if torch.allclose(work(taken), inputs[0].taken, rtol=0, atol=room))
        names.append(next(fits, None))
    if len(names) == 2 and names[0] != names[1] and any(name not in (None, "identity") for name in names):
        yield f"another activation: {names[0] or 'an unknown one'}, and {names[1] or 'an unknown one'} in the new one"
