"""What makes one tensor the other: an order, a sign, a factor, a dtype, a few numbers."""

from __future__ import annotations

from itertools import combinations

import torch

_HALVES = (torch.bfloat16, torch.float16)
_FEW = 0.25


def same(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal, each number by itself."""
    return left.shape == right.shape and bool(torch.allclose(left, right, rtol=tolerance, atol=0, equal_nan=True))


def relation(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> str | None:
    """How a new weight comes of the old one, as the end of a sentence about it; None where that is not known."""
    if left.dim() == 2 and left.shape == right.shape[::-1] and same(left.t(), right, tolerance):
        return f"is transposed ({'square' if left.shape[0] == left.shape[1] else 'x'.join(map(str, left.shape))})"
    if left.shape != right.shape or left.dtype.is_complex or not left.is_floating_point():
        return None
    for look in (_rounded, _of_numbers, _ordered):
        if (found := look(left, right, tolerance)) is not None:
            return found
    return None


def _rounded(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> str | None:
    if torch.allclose(left, right, rtol=2 * torch.finfo(torch.float32).eps, atol=0):
        return "is the old one, but for float32's rounding"
    for half in _HALVES:
        name = str(half).removeprefix("torch.")
        for one, other, word in ((left, right, "is the old one"), (right, left, "is what the old one was before it was")):
            if same(one.to(half).to(one.dtype), other, tolerance):
                return f"{word}, rounded to {name}" if one is left else f"{word} rounded to {name}"
    return None


def _of_numbers(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> str | None:
    """By what is done to each number alone."""
    if not right.any():
        return "is all zeros"
    if same(-left, right, tolerance):
        return "is negated"
    times = float((left * right).sum() / (left * left).sum()) if left.any() else 0.0
    if times and same(left * times, right, tolerance):
        return f"is {times:.6g} times the old one"
    more = right - left
    if left.numel() > 1 and torch.allclose(
        more, more.mean(), rtol=0, atol=4 * torch.finfo(torch.float32).eps * float(right.abs().max())
    ):
        return f"is the old one plus {float(more.mean()):.6g}"
    return None


def _ordered(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> str | None:
    """By an order of rows, of columns or of dimensions; or a few numbers are others."""
    for dim, word in enumerate(("rows are", "columns are")[: left.dim()]):
        if permuted(left, right, dim, tolerance):
            return f"{word} in another order"
    for one, other in combinations(range(left.dim()), 2):
        if same(left.transpose(one, other), right, tolerance):
            return f"is transposed (dimensions {one} and {other})"
    for dim in range(2, left.dim()):
        if same(left.flip(dim), right, tolerance):
            return f"is flipped along dimension {dim}"
    count = int((~torch.isclose(left, right, rtol=tolerance, atol=0, equal_nan=True)).sum())
    return f"has {count} other numbers, of {left.numel()}" if count <= _FEW * left.numel() else None


def permuted(left: torch.Tensor, right: torch.Tensor, dim: int, tolerance: float) -> bool:
    """Whether the slices along a dimension are the same ones in another order."""
    one, other = (value.movedim(dim, 0).reshape(value.shape[dim], -1) for value in (left, right))
    weights = torch.linspace(1, 2, one.shape[1], dtype=one.dtype)
    keys = [(value * weights).sum(1).sort() for value in (one, other)]
    return same(one[keys[0].indices], other[keys[1].indices], tolerance)
