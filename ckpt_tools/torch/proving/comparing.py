"""When numbers count as equal, and what else they may have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch.nn import functional

from ckpt_tools.torch.proving.recording import ModuleCall, Numbers

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
    """What the first numbers that differ have in common."""
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
    """Whether what comes out of a module is what went in."""
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
