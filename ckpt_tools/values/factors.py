"""The difference of two matrices as a product of two small ones: the best of their rank, and how much it leaves.

Small differences are decomposed whole. Of large ones the singular vectors are found from a few random directions and three
power iterations (Halko, Martinsson and Tropp, SIAM Review 53, 2011, algorithm 4.4): no more than some rows are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import Literal
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.values.low_rank import Matrix, as_bytes, row_blocks
from ckpt_tools.values.numeric import one_thread, torch_dtype

if TYPE_CHECKING:
    import torch

_WHOLE = 1 << 20  # elements of a difference that is decomposed whole
_MORE = 10  # directions beyond the rank
_ITERATIONS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What a difference is split into."""

    up: Literal
    down: Literal
    size: float
    error: float


def difference_norm(base: Matrix, tuned: Matrix) -> float:
    """The Frobenius norm of a difference."""
    return math.sqrt(sum(float(block.square().sum()) for _, block in _differences(base, tuned)))


def difference(base: Matrix, tuned: Matrix) -> Literal:
    """A small difference itself, as float32."""
    return Literal(b"".join(bytes(as_bytes(block.float())) for _, block in _differences(base, tuned)))


def factors(base: Matrix, tuned: Matrix, rank: int, dtype: DType, *, turned: bool) -> Factors:
    """The factors of `tuned - base`, which have one shape; the rank is at most the smaller side."""
    import torch

    with one_thread():
        if base.rows * base.columns <= _WHOLE:
            whole = torch.cat([block for _, block in _differences(base, tuned)])
            left, values, right = torch.linalg.svd(whole, full_matrices=False)
        else:
            left, values, right = _found(base, tuned, rank)
        root = values[:rank].sqrt()
        first, last = (left[:, :rank] * root).to(torch_dtype(dtype)), (root[:, None] * right[:rank]).to(torch_dtype(dtype))
        if not (first.isfinite().all() and last.isfinite().all()):
            raise ConvertError(
                f"The change of {base.name!r} is beyond what {dtype.name} can hold.", fix="Choose another `dtype`."
            )
        size, error = _measured(base, tuned, first.double(), last.double())
    up, down = (last.T, first.T) if turned else (first, last)
    return Factors(Literal(bytes(as_bytes(up))), Literal(bytes(as_bytes(down))), size, error)


def _measured(base: Matrix, tuned: Matrix, left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """The norms of the difference, and of what is left of it."""
    size = error = 0.0
    for start, block in _differences(base, tuned):
        size += float(block.square().sum())
        block -= left[start : start + len(block)] @ right
        error += float(block.square().sum())
    return size**0.5, error**0.5


def _found(base: Matrix, tuned: Matrix, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first singular vectors and values, from the space that the difference turns random directions into."""
    import torch

    from ckpt_tools.values.random_bits import uniform

    count = min(rank + _MORE, base.rows, base.columns)
    right = uniform(0, "directions", 0, base.columns * count).sub_(0.5).reshape(base.columns, count)
    left = _times(base, tuned, right)
    for _ in range(_ITERATIONS):
        left = torch.linalg.qr(left)[0]
        left = _times(base, tuned, torch.linalg.qr(_turned_times(base, tuned, left))[0])
    left = torch.linalg.qr(left)[0]
    inner, values, rows = torch.linalg.svd(_turned_times(base, tuned, left).T, full_matrices=False)
    return left @ inner, values, rows


def _times(base: Matrix, tuned: Matrix, right: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([block @ right for _, block in _differences(base, tuned)])


def _turned_times(base: Matrix, tuned: Matrix, left: torch.Tensor) -> torch.Tensor:
    import torch

    total = torch.zeros(base.columns, left.shape[1], dtype=torch.float64)
    for start, block in _differences(base, tuned):
        total += block.T @ left[start : start + len(block)]
    return total


def _differences(base: Matrix, tuned: Matrix) -> Iterator[tuple[int, torch.Tensor]]:
    """Some rows of the difference at a time, as float64."""
    for (start, one), (_, other) in zip(row_blocks(base), row_blocks(tuned), strict=True):
        block = other.double() - one.double()
        if not block.isfinite().all():
            raise ConvertError(f"{base.name!r} holds NaN or infinite values, or its change does: no product gives those.")
        yield start, block
