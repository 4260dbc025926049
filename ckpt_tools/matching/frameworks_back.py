"""A matching of what was read as in torch, said of the tensors as the file has them: steps that exchange dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.matching.frameworks import LINEAR, Reading, why_not
from ckpt_tools.matching.order import in_order_of_names
from ckpt_tools.matching.records import Ambiguous, Match, Matching, Mismatch, Offer, Param, Shape

_TWO_STEPS = "its dimensions are exchanged, and it is split, joined or reshaped besides: no one step does that"
_SIZES = "its sizes are others, once its dimensions are exchanged"


def as_in_file(matching: Matching, reading: Reading, target: Sequence[Param]) -> Matching:
    """Matches of what was turned get the step that turns it; what needs more than one step becomes ambiguous."""
    turned = {name for name, turn in reading.turns.items() if turn.axes}
    flattened, wanted = Flattened(target), {param.name: param for param in target}
    fates: list[Match | Ambiguous] = [_fate(row, reading, flattened, wanted[row.new]) for row in matching.matched]
    fates += [_as_it_is(offer, reading) for offer in matching.offers if _is_back(offer, reading)]
    for offer in matching.offers:
        if not _is_back(offer, reading) and not turned.isdisjoint(offer.old):
            fates += [Ambiguous(new, offer.old, _TWO_STEPS) for new in offer.new]
    fates += [Ambiguous(row.new, (row.old,), _SIZES) for row in matching.mismatched if row.old in turned]
    offers = tuple(offer for offer in matching.offers if turned.isdisjoint(offer.old))
    kept = tuple(row for row in matching.mismatched if row.old not in turned)
    return _result(matching, fates, offers, kept, reading, target)


def _result(
    matching: Matching,
    fates: Sequence[Match | Ambiguous],
    offers: tuple[Offer, ...],
    mismatched: tuple[Mismatch, ...],
    reading: Reading,
    target: Sequence[Param],
) -> Matching:
    """The matching with these fates: each name in one list."""
    by_name: dict[str, Match | Ambiguous] = {row.new: row for row in (*matching.ambiguous, *fates)}
    rows: list[Match | Ambiguous] = [by_name[param.name] for param in target if param.name in by_name]
    matched = tuple(row for row in rows if isinstance(row, Match))
    used = {*(row.old for row in matched), *(row.old for row in mismatched)}
    return replace(
        matching,
        matched=matched,
        offers=offers,
        mismatched=mismatched,
        ambiguous=tuple(row for row in rows if isinstance(row, Ambiguous)),
        missing=tuple(name for name in matching.missing if name not in by_name),
        unexpected=tuple(name for name in reading.own if name not in used),
    )


def _fate(row: Match, reading: Reading, flattened: Flattened, target: Param) -> Match | Ambiguous:
    """A match with the step that makes it true of the file."""
    turn = reading.turns.get(row.old)
    if turn is None or not turn.axes:
        return row
    if row.step != "copy":
        return Ambiguous(row.new, (row.old,), _TWO_STEPS)
    shape = reading.own[row.old].shape
    if turn.axes != LINEAR and reading.framework == "flax" and (why := why_not(row.old, target)):
        return Ambiguous(row.new, (row.old,), why)
    if turn.axes != LINEAR:
        return replace(row, step="permute", source_shape=shape, axes=turn.axes)
    if why := flattened.why(row.new):
        return Ambiguous(row.new, (row.old,), why)
    return replace(row, step="transpose", source_shape=shape)


def _is_back(offer: Offer, reading: Reading) -> bool:
    """Whether the target keeps a matrix as [in, out] too: exchanged twice, it is as it was."""
    turn = reading.turns.get(offer.old[0])
    return offer.step == "transpose" and turn is not None and turn.axes == LINEAR


def _as_it_is(offer: Offer, reading: Reading) -> Match:
    shape = reading.own[offer.old[0]].shape
    return Match(offer.old[0], offer.new[0], offer.reason, offer.confidence, shape, shape)


class Flattened:
    """The weights of a target in the order in which its module registers them; of a file, in the order that names say."""

    def __init__(self, target: Sequence[Param]) -> None:
        is_module = any(param.module is not None for param in target)
        self.rows = [param for param in (target if is_module else in_order_of_names(target, str)) if param.shape]
        self.at = {param.name: number for number, param in enumerate(self.rows)}
        self.convolutions = [number for number, param in enumerate(self.rows) if len(param.shape) > 2]

    def why(self, name: str) -> str:
        """Why the order of a dense layer's inputs or outputs cannot be known; else the empty text."""
        at = self.at[name]
        outputs, inputs = self.rows[at].shape
        before = [number for number in self.convolutions if number < at] or self.convolutions
        after = [number for number in self.convolutions if number > at]
        if before and inputs not in self._beside(at, -1)[:1] and _is_image(inputs, channels := self.rows[before[-1]].shape[0]):
            return _INPUTS.format(channels=channels)
        if after and outputs not in self._beside(at, 1)[:2]:
            return _OUTPUTS if any(_is_image(outputs, count) for count in self.rows[after[0]].shape[:2]) else ""
        return ""

    def _beside(self, at: int, step: int) -> Shape:
        """The shape of the next tensor of another layer."""
        own = self.rows[at].name.rpartition(".")[0]
        while 0 <= (at := at + step) < len(self.rows):
            if self.rows[at].name.rpartition(".")[0] != own:
                return self.rows[at].shape
        return ()


_INPUTS = (
    "its inputs may be a flattened image, whose channels come last there and first here: a plan says which: "
    'a transpose, or a permute with axes = "(height width {channels}) out -> out ({channels} height width)", height as a number'
)
_OUTPUTS = "its outputs may be an image, whose channels come last there and first here: a plan says which"


def _is_image(size: int, channels: int) -> bool:
    """Whether so many numbers may be an image of several places with so many channels."""
    return 1 < channels < size and size % channels == 0
