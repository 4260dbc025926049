"""The state of a matching while its stages run: who has a partner, who is left, what was noticed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tools.match.records import Ambiguous, Match, Matching, Mismatch, Offer, Reason, Shape, Step
from ckpt_tools.targets import Param


def squeezed(shape: Shape) -> Shape:
    """A shape without its sizes of 1."""
    return tuple(size for size in shape if size != 1)


class Pairing:
    """Two lists of tensors and what has been found so far. A stage calls `pair` for what it is sure of.

    `known` is the name of a source tensor as the user's rules made it; stages compare those.
    """

    def __init__(self, source: Sequence[Param], target: Sequence[Param], *, allow_reshape: bool) -> None:
        self.source = {param.name: param for param in source}
        self.target = {param.name: param for param in target}
        self.known = {name: name for name in self.source}
        self.allow_reshape = allow_reshape
        self.matches: dict[str, Match] = {}
        self.mismatches: dict[str, Mismatch] = {}
        self.doubts: dict[str, Ambiguous] = {}
        self.offers: list[Offer] = []
        self.used: dict[str, str] = {}

    def sources_left(self) -> list[Param]:
        """Tensors of the checkpoint without a partner, in order."""
        return [param for name, param in self.source.items() if name not in self.used]

    def targets_left(self) -> list[Param]:
        """Tensors of the target without a partner or a doubt, in order."""
        return [param for name, param in self.target.items() if not self.is_settled(name)]

    def is_settled(self, new: str) -> bool:
        """Whether a name of the target has its fate already."""
        return new in self.matches or new in self.mismatches or new in self.doubts

    def pair(self, old: str, new: str, reason: Reason, confidence: float = 1.0) -> None:
        """Two partners: a match, or a mismatch where their shapes say so."""
        before, after = self.source[old].shape, self.target[new].shape
        if self.fits(old, new):
            step: Step = "copy" if before == after else "reshape"
            self.matches[new] = Match(old, new, reason, confidence, before, after, step)
        else:
            self.mismatches[new] = Mismatch(old, new, reason, before, after)
        self.used[old] = new

    def fits(self, old: str, new: str) -> bool:
        """Whether two tensors have one shape, or one without sizes of 1 where that is allowed."""
        before, after = self.source[old].shape, self.target[new].shape
        return before == after or (self.allow_reshape and squeezed(before) == squeezed(after))

    def doubt(self, new: str, candidates: Iterable[str], why: str) -> None:
        """A name of the target that cannot be decided."""
        self.doubts[new] = Ambiguous(new, tuple(candidates), why)

    def result(self) -> Matching:
        """Everything, in the order of the target and of the checkpoint."""
        settled = (self.matches, self.mismatches, self.doubts)
        missing = tuple(name for name in self.target if not any(name in fates for fates in settled))
        unexpected = tuple(name for name in self.source if name not in self.used)
        return Matching(
            tuple(self.matches[name] for name in self.target if name in self.matches), missing, unexpected,
            tuple(self.mismatches[name] for name in self.target if name in self.mismatches),
            tuple(self.doubts[name] for name in self.target if name in self.doubts),
            tuple(self.offers), len(self.source), len(self.target),
        )  # fmt: skip
