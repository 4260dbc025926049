"""Both models on all sets of inputs, in one dtype: how far apart they are, and whether that says anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_tools.errors import ConvertError
from ckpt_tools.operations.proved import Fault
from ckpt_tools.torch.proving.fault import first_apart
from ckpt_tools.torch.proving.outputs import Gap, Paired, gap, pair
from ckpt_tools.torch.proving.running import Done, Given, run

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-6}  # sums in another order, with room
_SIDES = ("OLD", "NEW")


@dataclass(frozen=True, slots=True)
class Trial:
    models: tuple[torch.nn.Module, torch.nn.Module]
    sets: Sequence[Given]
    dtype: torch.dtype
    seed: int
    done: list[tuple[Done, Done]]
    paired: Paired
    gaps: list[Gap]
    tolerance: float

    @classmethod
    def run(
        cls, models: tuple[torch.nn.Module, torch.nn.Module], sets: Sequence[Given], dtype: torch.dtype, seed: int,
        tolerance: float | None,
    ) -> Trial:  # fmt: skip
        """Raises ConvertError where a model raises, or where there is nothing to compare."""
        done = [(run("OLD", models[0], given, dtype, seed), run("NEW", models[1], given, dtype, seed)) for given in sets]
        paired = pair(done[0][0].outputs, done[0][1].outputs)
        gaps = [gap(left.outputs, right.outputs, paired) for left, right in done]
        return cls(models, sets, dtype, seed, done, paired, gaps, _TOLERANCES[dtype] if tolerance is None else tolerance)

    @property
    def relative(self) -> float:
        return max(gap.relative for gap in self.gaps)

    @property
    def is_equal(self) -> bool:
        return self.relative <= self.tolerance

    @property
    def worst(self) -> int:
        """The set of inputs for which they are farthest apart."""
        return max(range(len(self.gaps)), key=lambda index: self.gaps[index].relative)

    def refuse_nothing(self) -> None:
        """Raise where equal outputs prove nothing: they are NaN, or have nothing to do with the inputs. Raises ConvertError."""
        if nan := sum(gap.nan for gap in self.gaps):
            total = sum(gap.numbers for gap in self.gaps)
            raise ConvertError(
                f"Nothing is proved: {nan} of {total} numbers are NaN in the outputs of both models.",
                fix="Other inputs; or the numbers in the checkpoints are damaged: `ckpt check` tells.",
            )
        first, *others = [old.outputs for old, _ in self.done]
        floats = [path for path, _ in self.paired.pairs if first[path].is_floating_point()]
        if others and floats and all(torch.equal(first[path], other[path]) for path in floats for other in others):
            raise ConvertError(
                "Nothing is proved: the outputs are the same for all sets of inputs.",
                why="What is before them does not show: weights that are zero, an input that is not used.",
            )

    def refuse_random(self, fault: Fault) -> None:
        """Raise where a model is random just where they part: perhaps they differ in nothing else. Raises ConvertError."""
        places = fault.where, fault.new_where
        for side, model, before, where in zip(_SIDES, self.models, self.done[self.worst], places, strict=True):
            again = run(side, model, self.sets[self.worst], self.dtype, self.seed + 1)
            is_random = gap(before.outputs, again.outputs, pair(before.outputs, again.outputs)).relative > 0
            if is_random and (apart := first_apart(before.root, again.root)).path == where:
                raise ConvertError(
                    f"{side} is random in {where or '(the model)'} ({apart.kind}): it gives other numbers when it runs again "
                    "on the same inputs.",
                    why="The models draw different random numbers, so that their outputs tell nothing of their weights.",
                    fix="Dropout as a function needs training=self.training.",
                )
