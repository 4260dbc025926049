"""The structural stage on tensors: units are aligned, checked, and written down tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from ckpt_tools.matching.fused import Cuts, split_fused
from ckpt_tools.matching.order import in_order_of_names
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.records import Offer, Reason
from ckpt_tools.matching.resolve import UnitPair, meaning
from ckpt_tools.matching.structure import align
from ckpt_tools.matching.units import Unit, units_of, untied

CONFIDENCE = {"unique": 0.98, "names": 0.95, "order": 0.9, "graph": 0.93}
FUSED = 0.05  # that the parts of a fused layer lie in the usual order is not seen, but known


def match_structure(pairing: Pairing) -> None:
    """Align what names have left."""
    olds = in_order_of_names(pairing.sources_left(), pairing.known.__getitem__)
    news = in_order_of_names(pairing.targets_left(), str)
    olds, news = untied(olds, news)
    left = units_of(olds, pairing.known.__getitem__)
    right = units_of(news, str)
    _turn(left, pairing.oriented[0].transposed)
    _turn(right, pairing.oriented[1].transposed)
    cuts: tuple[Cuts, Cuts] = ({}, {})
    if pairing.graphs is not None:
        from ckpt_tools.matching.stage import evidence_of

        if (evidence := evidence_of(pairing)) is not None:
            cuts = evidence.cuts
    alignment = align(split_fused(left, right, cuts[0]), split_fused(right, left, cuts[1]))
    if pairing.graphs is not None:
        from ckpt_tools.matching.stage import settle

        settle(pairing, alignment)
    fused: dict[int, list[UnitPair]] = defaultdict(list)
    for pair in alignment.pairs:
        whole = pair.old.fused or pair.new.fused
        if why := _hidden_difference(pair):
            _doubt(pairing, _whole(pair.new), [_whole(pair.old)], why)
        elif whole is None:
            _write_down(pairing, pair)
        else:
            fused[id(whole[0])].append(pair)
    for parts in fused.values():
        _offer(pairing, parts)
    for candidates, undecided in alignment.undecided:
        whole_candidates = list(map(_whole, candidates))
        for unit in undecided:
            _doubt(pairing, _whole(unit), whole_candidates, _why(candidates))
    _pair_heads(pairing, left, right)


def _pair_heads(pairing: Pairing, left: Sequence[Unit], right: Sequence[Unit]) -> None:
    """The last layers of both sides, when each has one without partner: of another number of classes, so a mismatch."""
    sides = {param.name for param in pairing.sources_left()}, {param.name for param in pairing.targets_left()}
    olds, news = (
        [unit for unit in units if names.issuperset(unit.roles.values()) and ("last", "last") in meaning(unit.path)]
        for units, names in zip((left, right), sides, strict=True)
    )
    if len(olds) == len(news) == 1 and _same_but_rows(olds[0], news[0]):
        _write_down(pairing, UnitPair(olds[0], news[0], "names", 0, frozenset()))


def _same_but_rows(old: Unit, new: Unit) -> bool:
    shapes = [{role: shape[1:] for role, shape in unit.shapes.items()} for unit in (old, new)]
    return shapes[0] == shapes[1] and old.shapes.keys() == new.shapes.keys() and "weight" in old.shapes


def _turn(units: list[Unit], transposed: frozenset[str]) -> None:
    """Compare matrices that are kept as [in, out] as what they are."""
    for unit in units:
        if unit.roles.get("weight") in transposed:
            unit.shapes["weight"] = unit.shapes["weight"][::-1]


def _write_down(pairing: Pairing, pair: UnitPair) -> None:
    for role in pair.old.roles:
        if (partner := pair.new.partner_of(role, pair.old)) is not None:
            pairing.pair(pair.old.roles[role], partner, _reason([pair]), CONFIDENCE[pair.how])
    if pair.old.counter is not None and pair.new.counter is not None:
        pairing.pair(pair.old.counter, pair.new.counter, _reason([pair]), CONFIDENCE[pair.how])


def _reason(pairs: Iterable[UnitPair]) -> Reason:
    return "graph" if any(pair.how == "graph" for pair in pairs) else "structure"


def _hidden_difference(pair: UnitPair) -> str:
    """What equal shapes hide: why two units that are one may still hold their numbers in different places."""
    if pair.old.roles.keys() != pair.new.roles.keys():  # a parameter of its own, and the weight of a module
        shape = next(iter(pair.old.shapes.values()))
        if len(shape) == 2 and shape[0] == shape[1]:
            return "a square matrix that is a parameter of its own here and a layer there: it may be transposed"
    ends = {unit.path[-1:] for unit in (pair.old, pair.new)}
    if ends in ({("wq",), ("q_proj",)}, {("wk",), ("k_proj",)}):
        return "with rotary positions, libraries that say wq and q_proj keep the rows in different orders"
    return ""


def _whole(unit: Unit) -> Unit:
    """The fused unit that a part belongs to; else the unit itself."""
    return unit.fused[0] if unit.fused is not None else unit


def _doubt(pairing: Pairing, unit: Unit, candidates: Sequence[Unit], why: str) -> None:
    for role, name in unit.roles.items():
        partners = (other.partner_of(role, unit) for other in candidates)
        pairing.doubt(name, _each_once(partners), why)
    if unit.counter is not None:
        pairing.doubt(unit.counter, _each_once(other.counter for other in candidates), why)


def _each_once(names: Iterable[str | None]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name is not None and name not in seen:
            seen.add(name)
            yield name


def _why(candidates: Sequence[Unit]) -> str:
    if len(candidates) == 1:
        return "the shapes fit, but names or order speak against it"
    return "they have one shape, and neither names nor order tell them apart"


def _offer(pairing: Pairing, parts: list[UnitPair]) -> None:
    """All parts of a fused unit have partners: a split or a concat for each of its tensors. Some have not: a doubt."""
    is_split = parts[0].old.fused is not None
    parts.sort(key=lambda pair: _part(pair.old if is_split else pair.new)[1])
    whole = _part(parts[0].old if is_split else parts[0].new)[0]
    singles = [pair.new if is_split else pair.old for pair in parts]
    sizes = [pair.old if is_split else pair.new for pair in parts]
    rows = sum(unit.shapes["weight"][0] for unit in sizes)
    if rows != whole.shapes["weight"][0] or any(unit.fused for unit in singles):
        for pair in parts:
            _doubt(pairing, _whole(pair.new), [whole] if is_split else singles, "some parts of a fused layer have no partner")
        return
    for role, name in whole.roles.items():
        names, shapes = tuple(unit.roles[role] for unit in singles), tuple(unit.shapes[role] for unit in singles)
        one, several = ((name,), (whole.shapes[role],)), (names, shapes)
        (old, old_shapes), (new, new_shapes) = (one, several) if is_split else (several, one)
        confidence = min(CONFIDENCE[pair.how] for pair in parts) - FUSED
        labels = tuple(unit.path[-1] for unit in sizes)
        step: Literal["split", "concat"] = "split" if is_split else "concat"
        pairing.offer(Offer(step, _reason(parts), old, new, old_shapes, new_shapes, round(confidence, 2), labels))
    for pair in parts:
        for role in pair.old.roles.keys() & pair.new.roles.keys() - whole.roles.keys():  # a bias that is a part's own
            pairing.pair(pair.old.roles[role], pair.new.roles[role], _reason([pair]), CONFIDENCE[pair.how])


def _part(unit: Unit) -> tuple[Unit, int]:
    assert unit.fused is not None
    return unit.fused
