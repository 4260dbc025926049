"""Seeded inputs of the shapes that the user gave."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_tools.torch.copying import memory_of
from ckpt_tools.tree.inputs import Input


@dataclass(frozen=True, slots=True)
class Given:
    """What one call of a model is given."""

    by_position: tuple[torch.Tensor, ...]
    by_name: dict[str, torch.Tensor]

    def to(self, dtype: torch.dtype) -> Given:
        """The same with floats of another dtype."""
        return Given(tuple(_to(value, dtype) for value in self.by_position),
                     {name: _to(value, dtype) for name, value in self.by_name.items()})  # fmt: skip


def _to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()


def make(inputs: Sequence[Input], seed: int, runs: int) -> list[Given]:
    """So many sets of inputs, all from one seed."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(runs):
        values = [_values(row, generator) for row in inputs]
        pairs = list(zip(inputs, values, strict=True))
        made.append(Given(tuple(value for row, value in pairs if row.name is None),
                          {row.name: value for row, value in pairs if row.name is not None}))  # fmt: skip
    return made


def _values(row: Input, generator: torch.Generator) -> torch.Tensor:
    if row.below is not None:
        return torch.randint(row.below, row.shape, generator=generator)
    return torch.randn(row.shape, generator=generator, dtype=torch.float32).double()


def digest(sets: Sequence[Given]) -> str:
    """SHA-256 over the bytes of all inputs, in order."""
    total = hashlib.sha256()
    for given in sets:
        for value in (*given.by_position, *given.by_name.values()):
            total.update(memory_of(value))
    return total.hexdigest()
