"""The difference of two matrices as a product of two small ones: the best of their rank, and how much it leaves.

Small differences are decomposed whole; of large ones `torch.svd_lowrank` finds the first singular vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import Literal
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.values.low_rank import Matrix, row_blocks
from ckpt_tools.values.numeric import one_thread, tensor_bytes, torch_dtype

if TYPE_CHECKING:
    import torch

_WHOLE = 1 << 20  # elements of a difference that is decomposed whole
_ITERATIONS = 7  # with twice as many directions as the rank: the error is at most 1.002 of the least


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What a difference is split into."""

    up: Literal
    down: Literal
    size: float
    error: float


def difference_norm(base: Matrix, tuned: Matrix) -> float:
    return math.sqrt(sum(float(block.square().sum()) for _, block in _differences(base, tuned)))


def difference(base: Matrix, tuned: Matrix) -> Literal:
    """A small difference itself, as float32."""
    return Literal(b"".join(bytes(tensor_bytes(block.float())) for _, block in _differences(base, tuned)))


def factors(base: Matrix, tuned: Matrix, rank: int, dtype: DType, *, turned: bool) -> Factors:
    """The factors of `tuned - base`, which have one shape; the rank is at most the smaller side."""
    import torch

    small = base.rows * base.columns <= _WHOLE
    with one_thread():
        whole = torch.cat([block if small else block.float() for _, block in _differences(base, tuned)])
        if small:
            left, values, right = torch.linalg.svd(whole, full_matrices=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                left, values, turned_right = torch.svd_lowrank(whole, min(2 * rank, *whole.shape), _ITERATIONS)
            right = turned_right.T
        del whole
        root = values[:rank].sqrt()
        first, last = (left[:, :rank] * root).to(torch_dtype(dtype)), (root[:, None] * right[:rank]).to(torch_dtype(dtype))
        if not (first.isfinite().all() and last.isfinite().all()):
            raise ConvertError(
                f"The change of {base.name!r} is beyond what {dtype.name} can hold.", fix="Choose another `dtype`."
            )
        size, error = _measured(base, tuned, first.double(), last.double())
    up, down = (last.T, first.T) if turned else (first, last)
    return Factors(Literal(bytes(tensor_bytes(up))), Literal(bytes(tensor_bytes(down))), size, error)


def _measured(base: Matrix, tuned: Matrix, left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    size = error = 0.0
    for start, block in _differences(base, tuned):
        size += float(block.square().sum())
        block -= left[start : start + len(block)] @ right
        error += float(block.square().sum())
    return size**0.5, error**0.5


def _differences(base: Matrix, tuned: Matrix) -> Iterator[tuple[int, torch.Tensor]]:
    """Some rows of the difference at a time, as float64."""
    for (start, one), (_, other) in zip(row_blocks(base), row_blocks(tuned), strict=True):
        block = other.double() - one.double()
        if not block.isfinite().all():
            raise ConvertError(f"{base.name!r} holds NaN or infinite values, or its change does: no product gives those.")
        yield start, block
