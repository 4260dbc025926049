"""Why two partners give other numbers: their settings, their weights, what their own code does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from ckpt_tools.text import listed
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall, Numbers

_SHOWN = 6
_PASSIVE = frozenset({"training", "inplace", "p", "track_running_stats"})  # nothing of these is seen when a model is evaluated

Tensors = Mapping[str, torch.Tensor]


def of_module(old: ModuleCall, new: ModuleCall, old_tensors: Tensors, tolerance: float) -> list[str]:
    """Of two modules with equal inputs and other outputs; `old_tensors` are those of the whole old model."""
    return _of_what_they_hold(old, new, old_tensors, tolerance) or list(values(old.outputs, new.outputs, tolerance))


def of_code(
    pair: CallPair, after: CallPair | None, before: CallPair | None, orders: tuple[Sequence[str], Sequence[str]],
    old_tensors: Tensors, tolerance: float,
) -> list[str]:  # fmt: skip
    """Of the code of two modules, between two calls in them; `orders` are the new paths of what is called in each."""
    begin = [call.outputs for call in after] if after else [call.inputs for call in pair]
    end = [call.inputs for call in before] if before else [call.outputs for call in pair]
    found = list(_orders(*orders)) or list(_activations(begin, end, tolerance)) or list(values(end[0], end[1], tolerance))
    return found + _of_what_they_hold(*pair, old_tensors, tolerance)


def _of_what_they_hold(old: ModuleCall, new: ModuleCall, old_tensors: Tensors, tolerance: float) -> list[str]:
    found = list(_weights(old.module, new.module, old_tensors, tolerance))
    for name, (left, right) in different_settings(old.module, new.module).items():
        if name not in _PASSIVE:
            found.append(f"{name} {left}, and {right} in the new one")
    if old.kind != new.kind:
        word = "activation" if _is_activation(old.module) and _is_activation(new.module) else "class"
        found.append(f"another {word}: {old.kind}, and {new.kind} in the new one")
    return found


# --- settings


def different_settings(old: torch.nn.Module, new: torch.nn.Module) -> dict[str, tuple[str, str]]:
    left, right = _settings(old), _settings(new)
    shared = [name for name in left if name in right and name != "training"]
    return {name: (left[name], right[name]) for name in shared if left[name] != right[name]}


def _settings(module: torch.nn.Module) -> dict[str, str]:
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


def _is_activation(module: torch.nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "activation" in type(module).__module__ or "act" in name or name.endswith("lu")


# --- weights


def _weights(old: torch.nn.Module, new: torch.nn.Module, old_tensors: Tensors, tolerance: float) -> Iterator[str]:
    left, right = _own(old), _own(new)
    if len(left) == len(right) == 1:  # a norm's `scale` and `weight`
        right = dict(zip(left, right.values(), strict=True))
    for name in left:
        if name in right and name != "num_batches_tracked" and not _same(left[name], right[name], tolerance):
            how = _relation(left[name], right[name], tolerance) or _elsewhere(right[name], old_tensors, tolerance)
            yield f"{name} {how or 'has other numbers'}"


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor.detach() for name, tensor in held.items() if tensor is not None}


def _same(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal, each number by itself."""
    if left.shape != right.shape:
        return False
    common = torch.promote_types(left.dtype, right.dtype)
    return torch.allclose(left.to(common), right.to(common), rtol=tolerance, atol=0, equal_nan=True)


def _relation(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> str | None:
    """How a new weight comes of the old one, as the end of a sentence about it; None where that is not known."""
    if left.dim() > 1 and _same(left.transpose(0, 1), right, tolerance):
        return f"is transposed ({'square' if left.shape[0] == left.shape[1] else 'x'.join(map(str, left.shape))})"
    if left.shape != right.shape or not left.is_floating_point():
        return None
    if _same(left, right, 2 * torch.finfo(torch.float32).eps):
        return "is the old one, but for float32's rounding"
    for half in (torch.bfloat16, torch.float16):
        if _same(left.to(half).to(left.dtype), right, tolerance):
            return f"is the old one, rounded to {str(half).removeprefix('torch.')}"
    times = float((left * right).sum() / (left * left).sum()) if left.any() else 0.0
    if _same(left * times, right, tolerance):
        return f"is {times:.6g} times the old one"
    more = right - left
    if left.numel() > 1 and torch.allclose(more, more.mean(), rtol=0, atol=1e-6 * float(right.abs().max())):
        return f"is the old one plus {float(more.mean()):.6g}"
    for dim, word in enumerate(("rows are", "columns are")[: left.dim()]):
        if _permuted(left, right, dim, tolerance):
            return f"{word} in another order"
    return None


def _permuted(left: torch.Tensor, right: torch.Tensor, dim: int, tolerance: float) -> bool:
    """Whether the slices along a dimension are the same ones in another order."""
    one, other = (value.movedim(dim, 0).reshape(value.shape[dim], -1) for value in (left, right))
    weights = torch.linspace(1, 2, one.shape[1], dtype=one.dtype)
    keys = [(value * weights).sum(1).sort() for value in (one, other)]
    return _same(one[keys[0].indices], other[keys[1].indices], tolerance)


def _elsewhere(value: torch.Tensor, old_tensors: Tensors, tolerance: float) -> str | None:
    return next((f"is the old model's {name}" for name, other in old_tensors.items() if _same(other, value, tolerance)), None)


# --- what the code between two calls does


def _orders(left: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    if left != right and sorted(left) == sorted(right):
        own = [listed([path.rpartition(".")[2] for path in order], _SHOWN) for order in (left, right)]
        yield f"modules are called in another order: {own[0]}; {own[1]} in the new one"


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu(tanh)": lambda x: functional.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": functional.leaky_relu,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
}


def _activations(begin: Sequence[Sequence[Numbers]], end: Sequence[Sequence[Numbers]], tolerance: float) -> Iterator[str]:
    """The function between two calls, where it is one that works on each number alone."""
    names = []
    for outputs, inputs in zip(begin, end, strict=True):
        if not outputs or not inputs or outputs[0].numel != inputs[0].numel:
            return
        taken, made, room = outputs[0].taken, inputs[0].taken, tolerance * inputs[0].size
        fits = (name for name, work in ACTIVATIONS.items() if torch.allclose(work(taken), made, rtol=0, atol=room))
        names.append(next(fits, None))
    if names[0] != names[1] and any(name not in (None, "identity") for name in names):
        yield f"another activation: {names[0] or 'an unknown one'}, and {names[1] or 'an unknown one'} in the new one"


def values(old: Sequence[Numbers], new: Sequence[Numbers], tolerance: float) -> Iterator[str]:
    """What makes the first of the new tensors that differs of the old one."""
    for left, right in zip(old, new, strict=False):
        if left.is_equal(right, tolerance):
            continue
        if left.holds_those_of(right, tolerance):
            yield "the same numbers in another order (of positions, heads or channels)"
        elif left.numel != right.numel:
            yield f"a tensor of {'x'.join(map(str, left.shape))}, and {'x'.join(map(str, right.shape))} in the new one"
        else:
            square = float((left.taken * left.taken).sum())
            times = float((left.taken * right.taken).sum()) / (square or 1.0)
            if torch.allclose(left.taken * times, right.taken, rtol=0, atol=tolerance * right.size):
                yield f"{times:.6g} times the old numbers"
        return
