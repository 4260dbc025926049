"""Random numbers drawn from (seed, name): the same bytes on every machine, in any order, a block at a time.

torch does not promise that its generator gives the same numbers in another version, and sums in it depend on the width of
the processor's registers. So nothing here comes from a generator, and nothing depends on a mathematics library: the bits
are SHAKE-128 (FIPS 202) of seed, name and block number, and all that follows is made of float64 additions, products,
quotients and square roots, one operation at a time, which IEEE 754 rounds in one way only. Logarithms are worked out here, and
sums are taken in a fixed order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 16  # numbers that one digest gives
_VERSION = b"ckpt_tools draws 1"
_LN2 = 0.6931471805599453
_HALF = 0.7071067811865476
LARGEST_NORMAL = 8.3  # the quantile of 2**-53, the smallest number drawn, is -8.21


def uniform(seed: int, name: str, start: int, count: int) -> torch.Tensor:
    """Numbers `start` to `start + count` of a name's stream, uniform in (0, 1), as float64."""
    import torch

    first, last = start // BLOCK, (start + count - 1) // BLOCK
    bits = torch.cat([_block(seed, name, index) for index in range(first, last + 1)]) if count else torch.empty(0, device="cpu")
    words = bits[start - first * BLOCK :][:count].to(torch.int64) & ((1 << 52) - 1)
    return words.double().add_(0.5).mul_(2.0**-52)


def _block(seed: int, name: str, index: int) -> torch.Tensor:
    import torch

    key = b"\0".join((_VERSION, b"%d" % seed, b"%d" % index, name.encode("utf-8", "surrogatepass")))
    digest = bytearray(hashlib.shake_128(key).digest(8 * BLOCK))
    if _big_endian():
        digest = bytearray(b"".join(digest[at : at + 8][::-1] for at in range(0, len(digest), 8)))
    return torch.frombuffer(digest, dtype=torch.int64)


def _big_endian() -> bool:
    import sys

    return sys.byteorder == "big"


def normal(seed: int, name: str, start: int, count: int) -> torch.Tensor:
    """The same numbers as quantiles of the normal distribution with mean 0 and standard deviation 1."""
    return quantile(uniform(seed, name, start, count))


# Wichura, Algorithm AS 241: The Percentage Points of the Normal Distribution, Applied Statistics 37 (1988), PPND16:
# relative error about 1e-16. (numerator, denominator), highest power first.
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_TAIL = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)  # fmt: skip


def quantile(p: torch.Tensor) -> torch.Tensor:
    """The quantile function of the normal distribution (AS 241), for p in (0, 1) as float64."""
    import torch

    q = p - 0.5
    result = _ratio(_CENTRE, 0.180625 - q * q) * q
    outside = (q.abs() > 0.425).nonzero().squeeze(1)
    r = _log(torch.minimum(p[outside], 1.0 - p[outside])).neg().sqrt()
    tail = torch.where(r <= 5.0, _ratio(_TAIL, r - 1.6), _ratio(_FAR, r - 5.0))
    result[outside] = torch.where(q[outside] < 0, -tail, tail)
    return result


def _ratio(polynomials: tuple[Sequence[float], Sequence[float]], r: torch.Tensor) -> torch.Tensor:
    above, below = (_polynomial(coefficients, r) for coefficients in polynomials)
    return above / below


def _polynomial(coefficients: Sequence[float], r: torch.Tensor) -> torch.Tensor:
    """Horner's rule, a rounding after each product and after each sum (never fused, which would round once)."""
    result = r.new_full(r.shape, coefficients[0])
    for coefficient in coefficients[1:]:
        result.mul_(r).add_(coefficient)
    return result


def _log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm: x = m * 2**e with m near 1, and log m = 2 artanh((m - 1) / (m + 1)) by its series."""
    import torch

    m, e = torch.frexp(x)
    low = m < _HALF
    m, e = torch.where(low, m * 2.0, m), (e - low.to(e.dtype)).double()
    z = (m - 1.0) / (m + 1.0)  # at most 0.172, so that the terms fall by 34 each
    series = _polynomial([1.0 / (2 * k + 1) for k in range(12, -1, -1)], z * z)
    return e * _LN2 + z * 2.0 * series


def orthogonal(seed: int, name: str, rows: int, columns: int) -> torch.Tensor:
    """A matrix with orthonormal rows, or columns where it has more rows than columns, as float64."""
    import torch

    count, length = sorted((rows, columns))
    numbers = normal(seed, name, 0, count * length).reshape(count, length)
    basis = torch.empty_like(numbers)
    for index, vector in enumerate(numbers):
        for _ in range(2 if index else 0):
            weights = _sum(basis[:index] * vector, 1)
            vector = vector - _sum(weights[:, None] * basis[:index], 0)
        basis[index] = vector / _sum(vector * vector, 0).sqrt()
    return basis if rows <= columns else basis.t()


def _sum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along a dimension by halving: the order of the additions is fixed, and the error is small."""
    while (size := values.shape[dim]) > 1:
        half = size // 2
        folded = values.narrow(dim, 0, half) + values.narrow(dim, half, half)
        if size % 2:
            folded.narrow(dim, 0, 1).add_(values.narrow(dim, size - 1, 1))
        values = folded
    return values.squeeze(dim)
