"""Seeded inputs: `1x3x224x224` are normal numbers, `1x16:30522` integers below 30522, `NAME=...` goes in by name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_tools.errors import UsageError
from ckpt_tools.torch.copying import memory_of

_SPEC = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d++(?:x\d++)*+)(?::(?P<below>\d+))?")


@dataclass(frozen=True, slots=True)
class Input:
    """One input: its keyword (None for one by position), its shape, and below what its integers are (None for floats)."""

    name: str | None
    shape: tuple[int, ...]
    below: int | None


def parse(spec: str) -> Input:
    """An input as text.

    >>> parse("input_ids=1x16:30522")
    Input(name='input_ids', shape=(1, 16), below=30522)

    Raises:
        UsageError: it cannot be read.
    """
    found = _SPEC.fullmatch(spec)
    if found is None or found["below"] == "0":
        fix = "1x3x224x224 for normal numbers, 1x16:30522 for integers below 30522, input_ids=1x16:30522 by name."
        raise UsageError(f"`input={spec!r}` is not an input.", fix=fix)
    shape = tuple(map(int, found["shape"].split("x")))
    return Input(found["name"], shape, None if found["below"] is None else int(found["below"]))


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
    return value.to(dtype) if value.is_floating_point() else value.clone()


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
