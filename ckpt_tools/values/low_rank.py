"""A weight plus the product of two small factors, a block of rows at a time: what merging a low-rank adapter comes to.

The operations, their dtypes and their order are PEFT's on the CPU (peft/tuners/lora/layer.py, `get_delta_weight` and `merge`;
peft/tuners/lora/variants.py for DoRA), so that the roundings are: factors of 16 bits are multiplied in float32, the product is
rounded to their dtype, and the sum to the base's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import Computed, Content, Literal, equal_chunks, read
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import is_finite, one_thread, row_major, tensor_bytes, torch_dtype
from ckpt_tools.values.pytorch import torch
from ckpt_tools.values.quantised import runs

BLOCK = 1 << 17  # elements of the base that are worked on at once: few enough for a cache
_NARROW = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A tensor as a matrix: its first dimension, and all others together; row-major, little-endian."""

    name: str
    content: Content
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, entry: Entry) -> Matrix:
        return cls(name, row_major(entry), entry.dtype, entry.shape)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        return prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What one adapter adds to one weight: scale * up @ down."""

    down: Matrix
    up: Matrix
    scale: float
    turned: bool = False
    narrow: bool = False
    by_down: bool = False
    magnitude: Matrix | None = None
    mid: Matrix | None = None
    experts: int = 0  # that the factors are for, one [rows, columns] below the other; 0 for a plain weight
    first: int = 0  # the row of those at which the weight begins
    read: Callable[[Content], bytes] = read

    @property
    def parts(self) -> list[Matrix]:
        return [part for part in (self.down, self.up, self.magnitude, self.mid) if part is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Addend:
    """What is added to a bias, or to a weight of its shape, times a scale."""

    whole: Matrix
    scale: float

    @property
    def parts(self) -> list[Matrix]:
        return [self.whole]


def merged(base: Matrix, pieces: Sequence[Delta | Addend]) -> Computed:
    """The bytes of a tensor after what is added to it, one piece after the other, each sum rounded to the tensor's dtype."""
    if len(base.shape) == 3 and any(isinstance(piece, Delta) and piece.experts for piece in pieces):
        base = replace(base, shape=(base.shape[0] * base.shape[1], base.shape[2]))

    def work() -> Iterator[memoryview]:
        layers = [_Layer(piece, base) if isinstance(piece, Delta) else _Whole(piece, base) for piece in pieces]
        for start, block in row_blocks(base):
            with one_thread():  # others wait for each other where the machine is busy, and sums would depend on their number
                made, before = block, block.clone()
                for layer in layers:
                    made = layer.onto(made, before, start)
                _check_finite(made, before, base.name)
                data = tensor_bytes(made)
            yield data

    return Computed(base.content.length, work, (base.content, *(part.content for piece in pieces for part in piece.parts)))


def recast(matrix: Matrix, target: DType) -> Content:
    if matrix.dtype is target:
        return matrix.content

    def work() -> Iterator[memoryview]:
        for _, block in row_blocks(matrix):
            narrow = block.to(torch_dtype(target))
            _check_finite(narrow, block, matrix.name)
            yield tensor_bytes(narrow)

    return Computed(matrix.content.length // matrix.dtype.itemsize * target.itemsize, work, matrix.content)


class _Whole:
    def __init__(self, addend: Addend, base: Matrix) -> None:
        self.values = _load(addend.whole, base.dtype).reshape(base.rows, base.columns) * addend.scale

    def onto(self, block: torch.Tensor, before: torch.Tensor, start: int) -> torch.Tensor:
        block += self.values[start : start + len(block)]
        return block


class _Layer:
    def __init__(self, delta: Delta, base: Matrix) -> None:
        self.delta = delta
        self.dtype = _in_memory((delta.down if delta.by_down else delta.up).dtype, base.dtype)
        self.wide = self.dtype if self.dtype.itemsize > 2 else torch.float32  # in which factors are multiplied
        self.base_dtype = torch_dtype(base.dtype)
        self.down, self.up = (_load(one, base.dtype, delta.read) for one in (delta.down, delta.up))
        if not delta.experts:  # of those some rows are wanted at a time
            self.down, self.up = self.down.to(self.wide), self.up.to(self.wide)
        if delta.mid is not None:
            # The factor of a convolution whose kernel is between two 1x1 ones: [rank, rank * kernel] and [rank, in]
            rank, mid = len(self.down), _load(delta.mid, base.dtype).to(self.wide)
            self.down = torch.einsum("ijk,jp->ipk", mid.reshape(rank, rank, -1), self.down).reshape(rank, -1)
        self.factor: torch.Tensor | None = None
        self.magnitude = None if delta.magnitude is None else _load(delta.magnitude, base.dtype).reshape(-1)
        if self.magnitude is not None and delta.turned:
            self.measure(base)

    def change(self, start: int, count: int) -> torch.Tensor:
        """What is added to `count` rows of the weight, in the factors' dtype."""
        rows = slice(start, start + count)
        if self.delta.experts:
            product = self.of_experts(self.delta.first + start, count)
            product = product.to(self.dtype) if self.delta.experts > 1 else product
        elif self.delta.turned:
            product = (self.up @ self.down[:, rows].contiguous()).T
        else:
            product = self.up[rows] @ self.down
        made = (product * self.delta.scale).to(self.dtype)
        return made.to(self.base_dtype) if self.delta.narrow and self.magnitude is None else made

    def of_experts(self, start: int, count: int) -> torch.Tensor:
        delta, products = self.delta, []
        rank = delta.down.rows // delta.experts
        for expert, row, taken in runs(start, count, delta.down.columns if delta.turned else delta.up.rows):
            rows = slice(row, row + taken)
            down = self.down[expert * rank : (expert + 1) * rank].to(self.wide)
            up = self.up[:, expert :: delta.experts].to(self.wide)
            products.append(down[:, rows].T @ up.T if delta.turned else up[rows] @ down)
        return torch.cat(products)

    def onto(self, block: torch.Tensor, before: torch.Tensor, start: int) -> torch.Tensor:
        """The rows of the weight after this delta; `before` is what they were before all."""
        change = self.change(start, len(block))
        if self.magnitude is None:
            block += change
            return block
        if self.delta.turned:
            assert self.factor is not None
            factor = self.factor.reshape(1, -1)
        else:
            norm = torch.linalg.norm(before + change, dim=1)
            factor = (self.magnitude[start : start + len(block)] / norm).reshape(-1, 1)
        return (factor * (block + change)).to(self.base_dtype)

    def measure(self, base: Matrix) -> None:
        """Where the outputs are columns their norms need the whole weight: it is read once more, ahead."""
        assert self.magnitude is not None
        if base.rows * base.columns <= BLOCK:  # PEFT's own sum of squares, to the last bit
            norms = [torch.linalg.norm((block + self.change(0, len(block))).T, dim=1) for _, block in row_blocks(base)]
            self.factor = self.magnitude / norms[0] if norms else self.magnitude
            return
        squares = torch.zeros(base.columns, dtype=torch.float64)
        for start, block in row_blocks(base):
            squares += (block + self.change(start, len(block))).double().square().sum(dim=0)
        self.factor = self.magnitude / squares.sqrt().to(torch.promote_types(self.base_dtype, self.dtype))


def _in_memory(dtype: DType, base: DType) -> torch.dtype:
    """The dtype of an adapter's tensors as PEFT has them beside a base: the base's, but 16 bits only where both are so."""
    if base.name not in _NARROW:
        return torch_dtype(base)
    return torch_dtype(base) if dtype is base else torch.float32


def _load(matrix: Matrix, base: DType, reading: Callable[[Content], bytes] = read) -> torch.Tensor:
    shape, dtype = (matrix.rows, matrix.columns), _in_memory(matrix.dtype, base)
    if not (data := bytearray(reading(matrix.content))):
        return torch.empty(shape, dtype=dtype)
    values = torch.frombuffer(data, dtype=torch_dtype(matrix.dtype)).reshape(shape)
    if not values.isfinite().all():
        raise ConvertError(f"The adapter's {matrix.name!r} holds NaN or infinite values.", why="Merged, it would spread them.")
    return values.to(dtype)


def row_blocks(base: Matrix) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of a matrix, a few at a time: the first one's number, and a tensor that is the caller's own."""
    width = base.columns
    step = max(1, BLOCK // max(1, width))
    dtype = torch_dtype(base.dtype)
    size = step * width * base.dtype.itemsize
    if not size:
        return
    for number, data in enumerate(equal_chunks(base.content, size)):
        yield number * step, torch.frombuffer(bytearray(data), dtype=dtype).reshape(-1, width)


def _check_finite(after: torch.Tensor, before: torch.Tensor, name: str) -> None:
    if not is_finite(after) and (lost := int((before.isfinite() & ~after.isfinite()).sum())):
        dtype = str(after.dtype).removeprefix("torch.")
        raise ConvertError(
            f"{name!r} would have {lost} values beyond what {dtype} can hold once the adapter is merged.",
            why="They would be infinite or NaN, and so would what the model computes.",
            fix="Convert the base first, `dtype='fp32'` or bf16, and merge into that; or check the adapter's scale.",
        )


# --- the difference of two matrices as a product of two small ones, the best of their rank


_WHOLE = 1 << 20  # elements of a difference that is decomposed whole
_ITERATIONS = 7  # with twice as many directions as the rank: the error is at most 1.002 of the least


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    up: Literal
    down: Literal
    size: float
    error: float


def difference_norm(base: Matrix, tuned: Matrix) -> float:
    return math.sqrt(sum(float(block.square().sum()) for _, block in _differences(base, tuned)))


def difference(base: Matrix, tuned: Matrix) -> Literal:
    return Literal(b"".join(bytes(tensor_bytes(block.float())) for _, block in _differences(base, tuned)))


def factors(base: Matrix, tuned: Matrix, rank: int, dtype: DType, *, turned: bool) -> Factors:
    """The factors of `tuned - base`, which have one shape; the rank is at most the smaller side."""
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
        size, error, left, right = 0.0, 0.0, first.double(), last.double()
        for start, block in _differences(base, tuned):
            size += float(block.square().sum())
            block -= left[start : start + len(block)] @ right
            error += float(block.square().sum())
    up, down = (last.T, first.T) if turned else (first, last)
    return Factors(Literal(bytes(tensor_bytes(up))), Literal(bytes(tensor_bytes(down))), size**0.5, error**0.5)


def _differences(base: Matrix, tuned: Matrix) -> Iterator[tuple[int, torch.Tensor]]:
    for (start, one), (_, other) in zip(row_blocks(base), row_blocks(tuned), strict=True):
        block = other.double() - one.double()
        if not block.isfinite().all():
            raise ConvertError(f"{base.name!r} holds NaN or infinite values, or its change does: no product gives those.")
        yield start, block
