"""Seeded inputs of the shapes that the user gave; and what a model draws itself, from a seed too."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt_tools.torch.copying import memory_of
from ckpt_tools.tree.graphs import Input


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


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch, Python and numpy draw from this seed in here; afterwards they go on as if nothing had been."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy and of_numpy is not None:
                numpy.random.set_state(of_numpy)
