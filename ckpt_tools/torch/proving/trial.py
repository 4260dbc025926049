"""Both models on all sets of inputs, in one precision: how far apart they are, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_tools.errors import ConvertError
from ckpt_tools.operations.proved import Fault
from ckpt_tools.torch.proving.faults import first_apart
from ckpt_tools.torch.proving.inputs import Done, Given, RaisedError, run, run_alone
from ckpt_tools.torch.proving.precision import Precision, cast
from ckpt_tools.torch.proving.reach import Reach
from ckpt_tools.torch.proving.recording import Gap, Paired, gap, pair

_TOLERANCE = 1e-9  # in float64: sums in another order, with room
_LEAST, _MOST, _ROOM = 1e-6, 1e-4, 8  # in float32: so many times what rounding every weight does to the outputs
_SIDES = ("OLD", "NEW")


@dataclass(frozen=True, slots=True)
class Trial:
    """What two models did."""

    models: tuple[torch.nn.Module, torch.nn.Module]
    sets: Sequence[Given]
    precision: Precision
    seed: int
    done: list[tuple[Done, Done]]
    paired: Paired
    gaps: list[Gap]
    tolerance: float

    @classmethod
    def run(
        cls, old: torch.nn.Module, new: torch.nn.Module, sets: Sequence[Given], precision: Precision, seed: int,
        tolerance: float | None,
    ) -> Trial:  # fmt: skip
        """Run both."""
        for model in (old, new):
            try:
                cast(model, precision)
            except Exception as error:  # a class of weights that has no such dtype
                raise RaisedError(model, None) from error
        done = [(run(old, given, precision, seed), run(new, given, precision, seed)) for given in sets]
        paired = pair(done[0][0].outputs, done[0][1].outputs)
        gaps = [gap(left.outputs, right.outputs, paired) for left, right in done]
        if tolerance is None:
            tolerance = _TOLERANCE if precision is not Precision.FLOAT32 else _rounding(old, sets[0], done[0][0], seed)
        return cls((old, new), sets, precision, seed, done, paired, gaps, tolerance)

    @property
    def largest(self) -> float:
        """The largest difference of two outputs."""
        return max(gap.largest for gap in self.gaps)

    @property
    def relative(self) -> float:
        """The largest difference by the largest output."""
        return max(gap.relative for gap in self.gaps)

    @property
    def is_equal(self) -> bool:
        """Whether the outputs are equal."""
        return self.relative <= self.tolerance

    @property
    def worst(self) -> int:
        """Which set shows the difference best."""
        return max(range(len(self.gaps)), key=lambda index: self.gaps[index].relative)

    def reach(self) -> Reach:
        """Looks for tensors of the new model on which the outputs do not depend."""
        return Reach(self.models[1], self.sets, self.precision, self.seed, {new for _, new in self.paired.pairs})

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
        given = [(*one.by_position, *one.by_name.values()) for one in self.sets]
        varied = others and any(not torch.equal(*pair) for one in given[1:] for pair in zip(given[0], one, strict=True))
        if varied and floats and all(torch.equal(first[path], other[path]) for path in floats for other in others):
            raise ConvertError(
                "Nothing is proved: the outputs are the same for all sets of inputs.",
                why="What is before them does not show: weights that are zero, an input that is not used.",
            )

    def refuse_random(self, fault: Fault) -> None:
        """Raise where models differ in random numbers, and perhaps in nothing else. Raises ConvertError."""
        given = self.sets[self.worst]
        for side, model, before, where in zip(
            _SIDES, self.models, self.done[self.worst], (fault.where, fault.new_where), strict=True
        ):
            again = run(model, given, self.precision, self.seed)
            if not self._is_same(before, again):
                raise ConvertError(
                    f"{side} gives other numbers when it runs again on the same inputs, from {_where(before, again)} on.",
                    why="What it draws or remembers follows no seed of torch, Python or numpy; it cannot be compared.",
                )
            other = run(model, given, self.precision, self.seed + 1)
            if not self._is_same(before, other) and first_apart(before.root, other.root)[0] == where:
                raise ConvertError(
                    f"{side} is random in {_where(before, other)}: with another seed it gives other numbers.",
                    why="The models draw different random numbers, so that their outputs tell nothing of their weights.",
                    fix="Dropout as a function needs training=self.training.",
                )

    @staticmethod
    def _is_same(one: Done, other: Done) -> bool:
        shared = one.outputs.keys() == other.outputs.keys()
        return shared and all(_equal(one.outputs[path], other.outputs[path]) for path in one.outputs)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _where(one: Done, other: Done) -> str:
    path, kind = first_apart(one.root, other.root)
    return f"{path or '(the model)'} ({kind})"


def _rounding(model: torch.nn.Module, given: Given, before: Done, seed: int) -> float:
    """How far float32's rounding may move the outputs, as that of the weights does."""
    floats = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    kept = [tensor.detach().clone() for tensor in floats]
    try:
        for index, tensor in enumerate(floats):
            noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(index)) * 2 - 1
            tensor.data.mul_(1 + noise * torch.finfo(torch.float32).eps)
        after = run_alone(model, given, Precision.FLOAT32, seed)
    finally:
        for tensor, values in zip(floats, kept, strict=True):
            tensor.data.copy_(values)
    paired = pair(before.outputs, after)
    return min(max(_ROOM * gap(before.outputs, after, paired).relative, _LEAST), _MOST)
