"""One tensor of a model as the matcher sees it: name, shape, dtype, tie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Framework: TypeAlias = Literal["flax", "keras"]  # whose layers the tensors may be of, beside torch's


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor of a model: a parameter or a buffer.

    Attributes:
        name: its dotted name. shape: its sizes. dtype: torch's name for its type, or None.
        tie: equal for tensors that are the same view on the same bytes; None where that cannot be told.
        module: the type name of the module that holds it ("Conv2d"), where the target is a module.
        sample: some of its numbers, where values are compared (see `places_of`); else None.
        digest: of all its bytes, where its sample is on the other side too and is not the whole tensor; else None.
        kind: "tensor", or what makes it unusual ("sparse", "quantized" ...); the shape of such a one may be unknown, ().
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    tie: object = None
    module: str | None = None
    kind: str = "tensor"
    sample: tuple[float, ...] | None = None
    digest: bytes | None = None
