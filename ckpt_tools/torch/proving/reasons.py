"""Why two partners give other numbers: their settings, their weights, what their own code does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch.nn import functional

from ckpt_tools.text import listed
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall, Numbers, shown_calls

_SHOWN = 6
_EPS = torch.finfo(torch.float32).eps
_FEW = 0.25  # of the numbers of a weight
_ENDINGS = ("lu", "sigmoid", "tanh", "swish", "mish")
_PASSIVE = frozenset({"training", "inplace", "p", "track_running_stats"})  # nothing of these is seen when a model is evaluated


def settings(module: torch.nn.Module) -> dict[str, str]:
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
    sides = []
    for module in (old, new):
        values = dict(getattr(getattr(module, "config", None), "__dict__", {}))
        inner = {
            f"{key}.{name}": item for key, value in values.items() if isinstance(value, dict) for name, item in value.items()
        }
        plain = {
            key: value
            for key, value in (values | inner).items()
            if value is None or isinstance(value, bool | int | float | str)
        }
        sides.append({f"config.{key}": repr(value) for key, value in plain.items()})
    left, right = sides
    found = {name: (left[name], right[name]) for name in left if name in right and left[name] != right[name]}
    return dict(list(found.items())[:_SHOWN])


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
        for one, other, word in ((old, new, "new"), (new, old, "old")):
            if gives_back(other, self.tolerance) and not gives_back(one, self.tolerance):
                yield f"the {word} one gives back what it is given"
        yield from values(old.outputs, new.outputs, self.tolerance)

    def of_code(self, old: ModuleCall, new: ModuleCall, after: CallPair | None, before: CallPair | None) -> list[str]:
        """Of the code of two modules, between two calls in them."""
        begin = [call.outputs for call in after] if after else [old.inputs, new.inputs]
        end = [call.inputs for call in before] if before else [old.outputs, new.outputs]
        found = list(self._orders(old, new)) or list(activations(begin, end, self.tolerance))
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
        if same(left, right, self.tolerance):
            return
        how = relation(left, right, self.tolerance)
        if how is None and (other := self._elsewhere(right)) is not None:
            how = f"is the old model's {other}"
        yield f"{name} {how or 'has other numbers'}"

    def _elsewhere(self, value: torch.Tensor) -> str | None:
        for name, other in self.old.state_dict().items():
            if other.shape == value.shape and same(other, value, self.tolerance):
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


# --- what makes one weight the other


def same(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal, each number by itself."""
    return left.shape == right.shape and bool(torch.allclose(left, right, rtol=tolerance, atol=0, equal_nan=True))


def relation(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> str | None:
    """How a new weight comes of the old one, as the end of a sentence about it; None where that is not known."""
    if left.dim() == 2 and left.shape == right.shape[::-1] and same(left.t(), right, tolerance):
        return f"is transposed ({'square' if left.shape[0] == left.shape[1] else 'x'.join(map(str, left.shape))})"
    if left.shape != right.shape or left.dtype.is_complex or not left.is_floating_point():
        return None
    if same(left, right, 2 * _EPS):
        return "is the old one, but for float32's rounding"
    for how, made in _made_of(left, right):
        if same(made, right, tolerance):
            return how
    more = right - left
    if left.numel() > 1 and torch.allclose(more, more.mean(), rtol=0, atol=4 * _EPS * float(right.abs().max())):
        return f"is the old one plus {float(more.mean()):.6g}"
    for dim, word in enumerate(("rows are", "columns are")[: left.dim()]):
        if permuted(left, right, dim, tolerance):
            return f"{word} in another order"
    count = int((~torch.isclose(left, right, rtol=tolerance, atol=0, equal_nan=True)).sum())
    return f"has {count} other numbers, of {left.numel()}" if count <= _FEW * left.numel() else None


def _made_of(left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for half in (torch.bfloat16, torch.float16):
        yield f"is the old one, rounded to {str(half).removeprefix('torch.')}", left.to(half).to(left.dtype)
    yield "is all zeros", torch.zeros_like(left)
    yield "is negated", -left
    times = float((left * right).sum() / (left * left).sum()) if left.any() else 0.0
    yield f"is {times:.6g} times the old one", left * times
    for one, other in combinations(range(left.dim()), 2):
        yield f"is transposed (dimensions {one} and {other})", left.transpose(one, other)
    for dim in range(2, left.dim()):
        yield f"is flipped along dimension {dim}", left.flip(dim)


def permuted(left: torch.Tensor, right: torch.Tensor, dim: int, tolerance: float) -> bool:
    """Whether the slices along a dimension are the same ones in another order."""
    one, other = (value.movedim(dim, 0).reshape(value.shape[dim], -1) for value in (left, right))
    weights = torch.linspace(1, 2, one.shape[1], dtype=one.dtype)
    keys = [(value * weights).sum(1).sort() for value in (one, other)]
    return same(one[keys[0].indices], other[keys[1].indices], tolerance)
