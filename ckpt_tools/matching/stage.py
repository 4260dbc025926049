"""The stage of the computation graphs: it doubts what they contradict, and decides what names and shapes leave open."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.matching.deciding import Evidence, Numbers, pairs_of
from ckpt_tools.matching.flow import FlowTooLargeError
from ckpt_tools.matching.network import layers_of
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.structure import Alignment, take_back

_WHY = "its name, and what feeds it when the models run, say different things"


def doubt_contradicted(pairing: Pairing) -> None:
    """Doubt pairs by name that the computations contradict."""
    if (evidence := evidence_of(pairing)) is None:
        return
    wrong = evidence.contradicted(_by_name(pairing, evidence))
    for new, match in list(pairing.matches.items()):
        if match.reason not in ("pair", "values") and _numbers(evidence, match.old, new) in wrong:
            del pairing.matches[new]
            pairing.used.pop(match.old, None)
            pairing.doubt(new, [match.old], _WHY)


def settle(pairing: Pairing, alignment: Alignment) -> None:
    """Take back what the computations contradict, and pair what they decide among the units that are open."""
    if (evidence := evidence_of(pairing)) is None:
        return
    numbered = {id(pair): evidence.numbers(pair.old, pair.new) for pair in alignment.pairs}
    by_name = [*_by_name(pairing, evidence)]
    wrong = evidence.contradicted([*by_name, *(numbers for numbers in numbered.values() if numbers is not None)])
    take_back(alignment, [pair for pair in alignment.pairs if numbered[id(pair)] in wrong])
    kept = [numbers for pair in alignment.pairs if (numbers := numbered[id(pair)]) is not None]
    decided = evidence.decide(alignment.undecided, [*by_name, *kept])
    alignment.pairs += pairs_of(decided)
    gone = {id(unit) for pair in decided for unit in pair}
    rest = [tuple([unit for unit in units if id(unit) not in gone] for units in group) for group in alignment.undecided]
    alignment.undecided = [(olds, news) for olds, news in rest if olds and news]


def evidence_of(pairing: Pairing) -> Evidence | None:
    """What both models compute, compared; worked out once. None where there is nothing, or too much of it to be followed."""
    if pairing.evidence is None and pairing.graphs is not None:
        try:
            pairing.evidence = Evidence(*layers_of(pairing, pairing.graphs))
        except FlowTooLargeError:
            pairing.graphs = None
    evidence: Evidence | None = pairing.evidence
    return evidence


def _by_name(pairing: Pairing, evidence: Evidence) -> Iterator[Numbers]:
    """The pairs that are there already."""
    for new, match in pairing.matches.items():
        if (numbers := _numbers(evidence, match.old, new)) is not None:
            yield numbers


def _numbers(evidence: Evidence, old: str, new: str) -> Numbers | None:
    found = evidence.sides[0].place.get((old, None)), evidence.sides[1].place.get((new, None))
    return None if found[0] is None or found[1] is None else (found[0], found[1])
