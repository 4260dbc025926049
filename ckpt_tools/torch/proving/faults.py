"""The first place where two runs part: from the model down to the smallest pair of modules whose inputs are still equal."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.operations.proved import Fault
from ckpt_tools.torch.proving.pairing import pair_calls
from ckpt_tools.torch.proving.reasons import Reasons, equal, same_in_another_order
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall


class Search:
    """Looks for the fault; `calls` counts the pairs of calls that were compared."""

    def __init__(self, pairs: Mapping[str, str], reasons: Reasons, tolerance: float) -> None:
        self.pairs, self.reasons, self.tolerance = pairs, reasons, tolerance

    def find(self, old: ModuleCall, new: ModuleCall) -> Fault:
        """Where two calls with equal inputs and other outputs part."""
        last: CallPair | None = None
        moved: CallPair | None = None
        for pair in pair_calls(old, new, self.pairs):
            left, right = pair
            if not equal(left.inputs, right.inputs, self.tolerance):
                if not self._is_moved(left, right):
                    return self._in_code(old, new, last, moved or pair)
                moved = moved or pair
            elif not equal(left.outputs, right.outputs, self.tolerance):
                return self.find(left, right)
            else:
                last = pair
        if last is None and moved is None:
            return self._fault(old, new, "module", reasons=self.reasons.of_modules(old, new))
        return self._in_code(old, new, last, moved)

    def _is_moved(self, left: ModuleCall, right: ModuleCall) -> bool:
        pairs = zip(left.inputs, right.inputs, strict=False)
        return any(same_in_another_order(*pair, self.tolerance) for pair in pairs)

    def _in_code(
        self,
        old: ModuleCall,
        new: ModuleCall,
        after: CallPair | None,
        before: CallPair | None,
    ) -> Fault:
        reasons = self.reasons.of_code(old, new, after, before)
        return self._fault(
            old, new, "code", after[0].path if after else "", before[0].path if before else "", reasons=reasons
        )  # fmt: skip

    @staticmethod
    def _fault(old: ModuleCall, new: ModuleCall, place: str, after: str = "", before: str = "", *, reasons: list[str]) -> Fault:
        kinds = type(old.module).__name__, type(new.module).__name__
        return Fault(old.path, new.path, *kinds, "code" if place == "code" else "module", after, before, tuple(reasons))


def count(old: ModuleCall, new: ModuleCall, pairs: Mapping[str, str]) -> int:
    """How many calls of two runs have partners."""
    return 1 + sum(count(*pair, pairs) for pair in pair_calls(old, new, pairs))


def first_apart(one: ModuleCall, other: ModuleCall) -> tuple[str, str]:
    """Where two runs of one model part: the module's path and class."""
    for left, right in zip(one.calls, other.calls, strict=False):
        if left.path != right.path or not equal(left.inputs, right.inputs, 0):
            break
        if not equal(left.outputs, right.outputs, 0):
            return first_apart(left, right)
    return one.path, type(one.module).__name__
