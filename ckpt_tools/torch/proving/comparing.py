"""When numbers count as equal, and what else they may have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_tools.torch.proving.recording import Numbers


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
