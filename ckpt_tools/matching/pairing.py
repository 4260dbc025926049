"""The state of a matching while its stages run: who has a partner, who is left, what was noticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

from ckpt_tools.matching.lexicon import concepts
from ckpt_tools.matching.records import Ambiguous, Match, Matching, Mismatch, Offer, Param, Reason, Shape
from ckpt_tools.tree.graphs import Graph
from ckpt_tools.tree.parametrized import part_of

TRANSPOSED = 0.95
_SMALLEST_MAP = 4
_LAST = ("last", "last")  # a head, a classifier: its channels come first, behind a flatten
MOST_CANDIDATES = 100  # of one name: thousands of layers of one shape would each have thousands


def squeezed(shape: Shape) -> Shape:
    """A shape without its sizes of 1."""
    return tuple(size for size in shape if size != 1)


def in_unknown_order(before: Shape, after: Shape) -> bool:
    """Whether one shape holds as many numbers as the other, and more than sizes of 1 differ: nothing says how they lie."""
    return prod(before) == prod(after) and squeezed(before) != squeezed(after)


def flattened(shape: Shape) -> Shape:
    """A shape without its sizes of 1; a convolution over a whole map as the linear layer that it is."""
    is_map = len(shape) == 4 and min(shape[2:]) >= _SMALLEST_MAP and shape[1] > max(shape[2:])
    return (shape[0], prod(shape[1:])) if is_map else squeezed(shape)


def may_be_reshaped(old: str, new: str, before: Shape, after: Shape) -> bool:
    """Whether two tensors of these names differ by sizes of 1 alone, or by a flatten before a last layer."""
    if squeezed(before) == squeezed(after):
        return True
    is_last = any(_LAST in concepts(part) for part in f"{old}.{new}".split("."))
    return is_last and flattened(before) == flattened(after) and "patch" not in f"{old}.{new}".lower()


class Pairing:
    """Two lists of tensors and what has been found so far. A stage calls `pair` for what it is sure of."""

    def __init__(self, source: Sequence[Param], target: Sequence[Param], *, allow_reshape: bool) -> None:
        self.source = {param.name: param for param in source}
        self.target = {param.name: param for param in target}
        self.known = {name: name for name in self.source}
        self.ruled: set[str] = set()
        self.allow_reshape = allow_reshape
        self.matches: dict[str, Match] = {}
        self.mismatches: dict[str, Mismatch] = {}
        self.doubts: dict[str, Ambiguous] = {}
        self.offers: list[Offer] = []
        self.offered: set[str] = set()
        self.spent: set[str] = set()
        self.used: dict[str, str] = {}
        self.oriented = orientation(source), orientation(target)
        self.graphs: tuple[Graph, Graph] | None = None
        self.evidence: Any = None

    def anew(self) -> Pairing:
        """The same two sides, with nothing found."""
        made = Pairing([*self.source.values()], [*self.target.values()], allow_reshape=self.allow_reshape)
        made.known, made.ruled, made.oriented = self.known, self.ruled, self.oriented
        made.graphs, made.evidence = self.graphs, self.evidence
        return made

    def sources_left(self) -> list[Param]:
        return [param for name, param in self.source.items() if name not in self.used and name not in self.spent]

    def targets_left(self) -> list[Param]:
        """Tensors of the target without a partner or a doubt, in order."""
        return [param for name, param in self.target.items() if not self.is_settled(name) and name not in self.offered]

    def is_settled(self, new: str) -> bool:
        """Whether a name of the target has its fate already."""
        return new in self.matches or new in self.mismatches or new in self.doubts

    def pair(self, old: str, new: str, reason: Reason, confidence: float = 1.0) -> None:
        """Two partners: a match, a mismatch where their shapes say so, an offer where one is kept as [in, out]."""
        before, after = self.source[old].shape, self.target[new].shape
        if reason not in ("exact", "wrapper", "rule", "pair"):
            roles = {part[1] if (part := part_of(name)) else "" for name in (old, new)}
            if len(roles) > 1:
                self.doubt(new, [old], "one of them is a part of a weight (weight norm, pruning), which `fold` makes whole")
                return
        match = Match(old, new, reason, confidence, before, after, "copy" if before == after else "reshape")
        if reason == "values":  # the same numbers in the same places, whatever the biases beside say
            self.matches[new] = match
            self.used[old] = new
            return
        if (old in self.oriented[0].unknown) != (new in self.oriented[1].unknown):
            self.doubt(new, [old], "a square matrix next to transposed ones: it may be transposed")
            return
        is_transposed = (old in self.oriented[0].transposed) != (new in self.oriented[1].transposed)
        if is_transposed and before == after[::-1]:
            self.offer(Offer("transpose", reason, (old,), (new,), (before,), (after,), min(confidence, TRANSPOSED)))
            return
        if self.fits(old, new):
            self.matches[new] = match
        else:
            self.mismatches[new] = Mismatch(old, new, reason, before, after)
        self.used[old] = new

    def fits(self, old: str, new: str) -> bool:
        """Whether two tensors have one shape; where that is allowed, but for sizes of 1 and a flatten."""
        before, after = self.source[old].shape, self.target[new].shape
        return before == after or (self.allow_reshape and may_be_reshaped(old, new, before, after))

    def offer(self, offer: Offer) -> None:
        """What only a plan does; later stages leave its tensors alone."""
        self.offers.append(offer)
        self.offered.update(offer.new)
        self.spent.update(offer.old)

    def doubt(self, new: str, candidates: Iterable[str], why: str) -> None:
        """A name of the target that cannot be decided; of many candidates the first are kept."""
        self.doubts[new] = Ambiguous(new, tuple(islice(candidates, MOST_CANDIDATES)), why)

    def doubt_where_not(self, other: Pairing) -> None:
        """Doubt what another matching of the same two sides pairs otherwise."""
        for new, match in list(self.matches.items()):
            if match.reason in ("pair", "values"):
                continue
            found = other.matches.get(new)
            elsewhere = other.used.get(match.old, new)
            if (found is not None and found.old != match.old) or elsewhere != new:
                candidates = dict.fromkeys((match.old, found.old if found is not None else match.old))
                del self.matches[new]
                self.used.pop(match.old, None)
                self.doubt(new, candidates, "its name and its place in the structure say different things")

    def result(self) -> Matching:
        """Everything, in order; names of the target that are tied to matched ones are matched with them."""
        self._match_ties()
        settled = (self.matches, self.mismatches, self.doubts)
        order = {name: number for number, name in enumerate(self.target)}
        missing = tuple(name for name in self.target if not any(name in fates for fates in settled))
        unexpected = tuple(name for name in self.source if name not in self.used)
        return Matching(
            tuple(self.matches[name] for name in self.target if name in self.matches), missing, unexpected,
            tuple(self.mismatches[name] for name in self.target if name in self.mismatches),
            tuple(self.doubts[name] for name in self.target if name in self.doubts),
            tuple(sorted(self.offers, key=lambda offer: order[offer.new[0]])), len(self.source), len(self.target),
        )  # fmt: skip

    def _match_ties(self) -> None:
        """A name of the target that is tied to a matched one is the same tensor, so it is matched too."""
        rows = sorted(self.matches.values(), key=lambda row: row.new)  # by name: the order of a file means nothing
        found = {self.target[row.new].tie: row for row in rows if row.step == "copy"}
        twins: dict[object, list[Param]] = defaultdict(list)
        for param in sorted(self.sources_left(), key=lambda param: param.name, reverse=True):
            twins[param.tie].append(param)
        for param in sorted(self.targets_left(), key=lambda param: param.name):
            row = found.get(param.tie) if param.tie is not None else None
            if row is None or param.shape != row.target_shape:
                continue
            tie = self.source[row.old].tie
            twin = twins[tie].pop() if tie is not None and twins[tie] else None
            old = twin.name if twin is not None and twin.shape == param.shape else row.old
            self.matches[param.name] = replace(row, old=old, new=param.name, reason="tied")
            self.used[old] = param.name


@dataclass(frozen=True, slots=True)
class Orientation:
    """The names of the weights of one side that are kept as [in, out], and of those for which that cannot be told."""

    transposed: frozenset[str]
    unknown: frozenset[str]


NOT_TRANSPOSED = Orientation(frozenset(), frozenset())


def orientation(params: Iterable[Param]) -> Orientation:
    """Look at every matrix that has a bias beside it."""
    shapes = {param.name: param.shape for param in params}
    linear, transposed, square = set(), set(), set()
    for name, shape in shapes.items():
        bias = shapes.get(f"{name[: -len('weight')]}bias") if name.endswith(".weight") else None
        if len(shape) != 2 or bias is None or len(bias) != 1:
            continue
        if shape == (bias[0], bias[0]):
            square.add(name)
        elif shape[1] == bias[0]:
            transposed.add(name)
        elif shape[0] == bias[0]:
            linear.add(name)
    if transposed and not linear:
        return Orientation(frozenset(transposed | square), frozenset())
    return Orientation(frozenset(transposed), frozenset(square if transposed else ()))
