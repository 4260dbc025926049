"""The structural stage on tensors: units are aligned, checked, and written down tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from ckpt_tools.matching.align import Alignment, align
from ckpt_tools.matching.fused import Cuts, split_fused
from ckpt_tools.matching.order import in_order_of_names
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.records import Offer, Reason
from ckpt_tools.matching.resolve import Pair, UnitPair, meaning
from ckpt_tools.matching.units import Unit, units_of, untied

CONFIDENCE = {"unique": 0.98, "names": 0.95, "order": 0.9, "graph": 0.93}
FUSED = 0.05  # that the parts of a fused layer lie in the usual order is not seen, but known


def match_structure(pairing: Pairing) -> None:
    """Align what names have left."""
    known = pairing.known.__getitem__
    olds, news = in_order_of_names(pairing.sources_left(), known), in_order_of_names(pairing.targets_left(), str)
    olds, news = untied(olds, news)
    left, right = units_of(olds, known), units_of(news, str)
    _turn(left, pairing.oriented[0].transposed)
    _turn(right, pairing.oriented[1].transposed)
    alignment = _aligned(pairing, left, right)
    fused: dict[int, list[UnitPair]] = defaultdict(list)
    for pair in alignment.pairs:
        whole = pair.old.fused or pair.new.fused
        if why := _hidden_difference(pair):
            _doubt(pairing, pair.new, [pair.old], why)
        elif whole is None:
            _write_down(pairing, pair)
        else:
            fused[id(whole[0])].append(pair)
    for parts in fused.values():
        _offer(pairing, parts)
    for candidates, undecided in alignment.undecided:
        why = "they have one shape, and neither names nor order tell them apart"
        if len(candidates) == 1:
            why = "the shapes fit, but names or order speak against it"
        for unit in undecided:
            _doubt(pairing, unit, candidates, why)
    _pair_heads(pairing, left, right)


def _turn(units: list[Unit], transposed: frozenset[str]) -> None:
    """Compare matrices that are kept as [in, out] as what they are."""
    for unit in units:
        if unit.roles.get("weight") in transposed:
            unit.shapes["weight"] = unit.shapes["weight"][::-1]


def _aligned(pairing: Pairing, left: list[Unit], right: list[Unit]) -> Alignment:
    """The units aligned, and what both models compute listened to where that is known."""
    if pairing.graphs is None:
        return align(split_fused(left, right), split_fused(right, left))
    from ckpt_tools.matching.stage import evidence_of, settle

    evidence = evidence_of(pairing)
    cuts: tuple[Cuts, Cuts] = ({}, {}) if evidence is None else evidence.cuts
    alignment = align(split_fused(left, right, cuts[0]), split_fused(right, left, cuts[1]))
    if evidence is not None:
        settle(pairing, evidence, alignment)
    return alignment


def _pair_heads(pairing: Pairing, left: Sequence[Unit], right: Sequence[Unit]) -> None:
    """The last layers of both sides, when each has one without partner: of another number of classes, so a mismatch."""
    sides = {param.name for param in pairing.sources_left()}, {param.name for param in pairing.targets_left()}
    olds, news = (
        [unit for unit in units if names.issuperset(unit.roles.values()) and ("last", "last") in meaning(unit.path)]
        for units, names in zip((left, right), sides, strict=True)
    )
    if len(olds) == len(news) == 1:
        rows = [{role: shape[1:] for role, shape in unit.shapes.items()} for unit in (olds[0], news[0])]
        if rows[0] == rows[1] and "weight" in rows[0]:
            _write_down(pairing, Pair(olds[0], news[0], "names"))


def _write_down(pairing: Pairing, pair: UnitPair) -> None:
    names = [(name, pair.new.partner_of(role, pair.old)) for role, name in pair.old.roles.items()]
    for old, new in [*names, (pair.old.counter, pair.new.counter)]:
        if old is not None and new is not None:
            pairing.pair(old, new, _reason([pair]), CONFIDENCE[pair.how])


def _reason(pairs: Iterable[UnitPair]) -> Reason:
    return "graph" if any(pair.how == "graph" for pair in pairs) else "structure"


def _hidden_difference(pair: UnitPair) -> str:
    """What equal shapes hide: why two units that are one may still hold their numbers in different places."""
    if pair.old.roles.keys() != pair.new.roles.keys():  # a parameter of its own, and the weight of a module
        shape = next(iter(pair.old.shapes.values()))
        if len(shape) == 2 and shape[0] == shape[1]:
            return "a square matrix that is a parameter here and a layer there: it may be transposed"
    ends = {unit.path[-1:] for unit in (pair.old, pair.new)}
    if ends in ({("wq",), ("q_proj",)}, {("wk",), ("k_proj",)}):
        return "with rotary positions, libraries that say wq and q_proj keep the rows in different orders"
    return ""


def _whole(unit: Unit) -> Unit:
    """The fused unit that a part belongs to; else the unit itself."""
    return unit.fused[0] if unit.fused is not None else unit


def _doubt(pairing: Pairing, unit: Unit, candidates: Iterable[Unit], why: str) -> None:
    unit, others = _whole(unit), list(map(_whole, candidates))
    for role, name in unit.roles.items():
        partners = (other.partner_of(role, unit) for other in others)
        pairing.doubt(name, dict.fromkeys(partner for partner in partners if partner is not None), why)
    if unit.counter is not None:
        pairing.doubt(unit.counter, dict.fromkeys(other.counter for other in others if other.counter is not None), why)


def _offer(pairing: Pairing, parts: list[UnitPair]) -> None:
    """All parts of a fused unit have partners: a split or a concat for each of its tensors. Some have not: a doubt."""
    is_split = parts[0].old.fused is not None
    rows = [(pair.old, pair.new) if is_split else (pair.new, pair.old) for pair in parts]  # a part, and what is split
    rows.sort(key=lambda row: row[0].fused[1] if row[0].fused is not None else 0)
    whole, singles = _whole(rows[0][0]), [single for _, single in rows]
    if sum(part.shapes["weight"][0] for part, _ in rows) != whole.shapes["weight"][0] or any(unit.fused for unit in singles):
        for pair in parts:
            _doubt(pairing, pair.new, [whole] if is_split else singles, "some parts of a fused layer have no partner")
        return
    confidence = round(min(CONFIDENCE[pair.how] for pair in parts) - FUSED, 2)
    labels = tuple(part.path[-1] for part, _ in rows)
    step: Literal["split", "concat"] = "split" if is_split else "concat"
    for role, name in whole.roles.items():
        names, shapes = tuple(unit.roles[role] for unit in singles), tuple(unit.shapes[role] for unit in singles)
        one, several = ((name,), (whole.shapes[role],)), (names, shapes)
        (old, old_shapes), (new, new_shapes) = (one, several) if is_split else (several, one)
        pairing.offer(Offer(step, _reason(parts), old, new, old_shapes, new_shapes, confidence, labels))
    for pair in parts:
        for role in pair.old.roles.keys() & pair.new.roles.keys() - whole.roles.keys():  # a bias that is a part's own
            pairing.pair(pair.old.roles[role], pair.new.roles[role], _reason([pair]), CONFIDENCE[pair.how])
