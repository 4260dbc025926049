"""What a matching says: a fate and a reason for every name on both sides. Frozen records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Reason: TypeAlias = Literal["exact", "wrapper", "rule", "pair", "values", "prefix", "structure", "graph", "position", "tied"]
Step: TypeAlias = Literal["copy", "reshape", "transpose", "permute"]


@dataclass(frozen=True, slots=True)
class Match:
    """One tensor of the checkpoint is one tensor of the target.

    Attributes:
        old, new: its name in the checkpoint and in the target.
        reason: which stage found it. confidence: 1.0 for what names prove; less for what structure says, see docs/matching.md.
        source_shape, target_shape: the same, if step is "copy".
        step: "copy"; "reshape" (the same numbers in the same order, sizes of 1 added or removed); of a checkpoint of Flax or
            Keras "transpose" (a matrix) or "permute" (a kernel, by `axes`, written as in a plan).
    """

    old: str
    new: str
    reason: Reason
    confidence: float
    source_shape: Shape
    target_shape: Shape
    step: Step = "copy"
    axes: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two tensors that are partners by name or place, of different shapes.

    Attributes:
        old, new: its name in the checkpoint and in the target. reason: which stage found it.
        source_shape, target_shape: what they are.
    """

    old: str
    new: str
    reason: Reason
    source_shape: Shape
    target_shape: Shape


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A name of the target that several tensors of the checkpoint fit equally well, or one fits doubtfully.

    Attributes:
        new: the name. candidates: the tensors of the checkpoint, the first 100 of them. why: what keeps it from being decided.
    """

    new: str
    candidates: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Fused tensors against split ones, [in, out] against [out, in]: what a plan can do, and nothing does unasked.

    Attributes:
        step: "split" (one old name, several new), "concat" (several old names, one new) or "transpose" (one of each).
        old, new: the names in the order in which their parts lie along the first dimension.
        source_shapes, target_shapes: in the same order.
        reason, confidence: as in `Match`. parts: what the parts are, in order: ("q", "k", "v").
    """

    step: Literal["split", "concat", "transpose"]
    reason: Reason
    old: tuple[str, ...]
    new: tuple[str, ...]
    source_shapes: tuple[Shape, ...]
    target_shapes: tuple[Shape, ...]
    confidence: float
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Matching:
    """Every name of both sides, each once: matched, or in one of the lists of what is left over.

    Attributes:
        matched: in the target's order. A tied tensor of the target has a match of its own, which may share its old name.
        offers: fused against split tensors, and transposed ones. Their names are in `missing` and `unexpected` as well, since
            only a plan does them.
        missing: names of the target without a partner. unexpected: names of the checkpoint without one.
        mismatched: partners of different shapes; in neither of the two lists before.
        ambiguous: names of the target with several possible partners; in no other list. Their candidates are in `unexpected`
            unless they are matched elsewhere.
        source_names, target_names: how many tensors there are on each side.
    """

    matched: tuple[Match, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    ambiguous: tuple[Ambiguous, ...] = ()
    offers: tuple[Offer, ...] = ()
    source_names: int = 0
    target_names: int = 0

    @property
    def complete(self) -> bool:
        """Whether every tensor on both sides has its partner, without an offer."""
        return not (self.missing or self.unexpected or self.mismatched or self.ambiguous)

    @property
    def left_over(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names (of the target, of the checkpoint) that neither a match nor an offer takes, mismatched ones left out."""
        new = {name for offer in self.offers for name in offer.new}
        old = {name for offer in self.offers for name in offer.old}
        missing = (*self.missing, *(row.new for row in self.ambiguous))
        return _without(missing, new), _without(self.unexpected, old)

    @property
    def complete_with_offers(self) -> bool:
        """Whether nothing is left over once a plan has done the offers too."""
        return not (any(self.left_over) or self.mismatched)

    def to_json(self) -> dict[str, Any]:
        """The matching as plain data."""
        return {**asdict(self), "complete": self.complete_with_offers}


def _without(names: Iterable[str], taken: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in taken)


Framework: TypeAlias = Literal["flax", "keras"]  # whose layers the tensors may be of, beside torch's


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor of a model: a parameter or a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    tie: object = None
    module: str | None = None
    kind: str = "tensor"
    sample: tuple[float, ...] | None = None
    digest: bytes | None = None
