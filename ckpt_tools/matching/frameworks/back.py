"""A matching of what was read as in torch, said of the tensors as the file has them: steps that exchange dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.matching.frameworks import flax
from ckpt_tools.matching.frameworks.flattened import Flattened
from ckpt_tools.matching.frameworks.reading import Reading
from ckpt_tools.matching.frameworks.turns import LINEAR
from ckpt_tools.matching.params import Param
from ckpt_tools.matching.records import Ambiguous, Match, Matching, Mismatch, Offer

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
    if turn.axes != LINEAR and reading.framework == "flax" and (why := flax.why_not(row.old, target)):
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
