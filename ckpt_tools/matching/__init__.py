"""Match the tensors of a checkpoint to those of a target: every name gets a fate and a reason, nothing is guessed in silence.

The stages, each in a file of its own: `by_name` (rules, exact, wrappers, prefixes), `structure`, `by_position`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from ckpt_tools.errors import UsageError
from ckpt_tools.matching.by_name import (
    apply_rules,
    match_affixes,
    match_exact,
    match_parametrized,
    match_whole_wrapper,
    match_wrappers,
)
from ckpt_tools.matching.by_position import match_position
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.params import Framework, Param
from ckpt_tools.matching.records import (
    Ambiguous,
    Match,
    Matching,
    Mismatch,
    Offer,
)
from ckpt_tools.matching.transposed import NOT_TRANSPOSED
from ckpt_tools.tree.graphs import Graph

__all__ = ["Ambiguous", "Framework", "Match", "Matching", "Mismatch", "Offer", "Stages", "match"]

Stages: TypeAlias = Literal["exact+wrappers", "names", "structure", "values", "position"]
STAGES: tuple[Stages, ...] = ("exact+wrappers", "names", "structure", "values", "position")


def match(
    source: Sequence[Param],
    target: Sequence[Param],
    *,
    stages: Stages = "exact+wrappers",
    rename: Sequence[str | tuple[str, str]] = (),
    allow_reshape: bool = False,
    framework: Framework | None = None,
    graphs: tuple[Graph, Graph] | None = None,
    pairs: Sequence[str | tuple[str, str]] = (),
) -> Matching:
    """Find the partner of every tensor.

    Args:
        source: the tensors of the checkpoint, in order. target: those of the target.
        stages: "exact+wrappers"; "names" takes a common prefix or suffix too; "values" compares samples of the numbers, ahead
            of names, and goes on as "structure" does; "structure" also aligns leaf modules by their
            shapes, order and names; "position" zips what names have left, in order.
        rename: the user's `REGEX=REPLACEMENT` rules, applied to the checkpoint's names first.
        allow_reshape: take partners whose shapes differ by sizes of 1 only, or by a flatten before a linear layer.
        framework: whose layers the checkpoint has, where its container says so: "flax" or "keras".
        graphs: what both models compute, with the names of `source` and `target`; it decides what "structure" leaves open.
        pairs: the user's `OLD=NEW` partners, in the checkpoint's own names; they come before everything else.

    Raises:
        UsageError: unknown stages, a rule or a pair that cannot be read. NothingMatchedError: one that does nothing.
        CollisionError: a rule gives two tensors one name. MatchError: "position", and two tensors disagree.
    """
    if stages not in STAGES:
        raise UsageError(f"{stages!r} is not one of {', '.join(STAGES)}.")
    pairing = Pairing(source, target, allow_reshape=allow_reshape)
    pairing.graphs = graphs if framework is None else None
    apply_rules(pairing, rename)
    if framework is None:
        return _staged(pairing, stages, pairs).result()
    from ckpt_tools.matching.frameworks.back import as_in_file
    from ckpt_tools.matching.frameworks.reading import as_in_torch

    reading = as_in_torch(source, pairing.known, framework)
    turned = Pairing(reading.params, target, allow_reshape=allow_reshape)
    turned.known, turned.ruled, turned.oriented = reading.known, pairing.ruled, (NOT_TRANSPOSED, turned.oriented[1])
    return as_in_file(_staged(turned, stages, pairs).result(), reading, target)


def _staged(pairing: Pairing, stages: Stages, pairs: Sequence[str | tuple[str, str]]) -> Pairing:
    """The pairing, with what the user said and every stage found."""
    _start(pairing, stages, pairs)
    match_whole_wrapper(pairing)
    match_exact(pairing)
    match_wrappers(pairing)
    match_parametrized(pairing)
    if stages == "position":
        match_position(pairing)
    elif stages != "exact+wrappers":
        match_affixes(pairing)
    if pairing.graphs is not None:
        from ckpt_tools.matching.evidence.stage import doubt_contradicted

        doubt_contradicted(pairing)
    if stages in ("structure", "values") and pairing.sources_left() and pairing.targets_left():
        from ckpt_tools.matching.by_structure import match_structure

        alone = pairing.anew()
        by_name = bool(pairing.used or pairing.doubts or pairing.offers)  # else both would find the same
        if by_name:
            _start(alone, stages, pairs)
            match_structure(alone)
        match_structure(pairing)
        if by_name:
            pairing.doubt_where_not(alone)
    return pairing


def _start(pairing: Pairing, stages: Stages, pairs: Sequence[str | tuple[str, str]]) -> None:
    """What comes before any name: the user's word, and equal numbers."""
    if pairs:
        from ckpt_tools.matching.left_over.answers import apply_answers

        apply_answers(pairing, pairs)
    if stages == "values":
        from ckpt_tools.matching.sides.values import match_values

        match_values(pairing)
