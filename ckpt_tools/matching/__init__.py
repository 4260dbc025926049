"""Match the tensors of a checkpoint to those of a target: every name gets a fate and a reason, nothing is guessed in silence.

The stages, each in a file of its own: `by_name` (rules, exact, wrappers, prefixes), `structure`, `by_position`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeAlias

from ckpt_tools.errors import MatchError, NothingMatchedError, UsageError
from ckpt_tools.matching.by_name import (
    apply_rules,
    match_affixes,
    match_exact,
    match_parametrized,
    match_whole_wrapper,
    match_wrappers,
)
from ckpt_tools.matching.pairing import NOT_TRANSPOSED, Pairing
from ckpt_tools.matching.records import (
    Ambiguous,
    Framework,
    Match,
    Matching,
    Mismatch,
    Offer,
    Param,
)
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
        ConvertError: a rule gives two tensors one name. MatchError: "position", and two tensors disagree.
    """
    if stages not in STAGES:
        raise UsageError(f"{stages!r} is not one of {', '.join(STAGES)}.")
    pairing = Pairing(source, target, allow_reshape=allow_reshape)
    pairing.graphs = graphs if framework is None else None
    apply_rules(pairing, rename)
    if framework is None:
        return _staged(pairing, stages, pairs).result()
    from ckpt_tools.matching.frameworks import as_in_torch
    from ckpt_tools.matching.frameworks_back import as_in_file

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
        from ckpt_tools.matching.stage import doubt_contradicted

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
        apply_answers(pairing, pairs)
    if stages == "values":
        from ckpt_tools.matching.values import match_values

        match_values(pairing)


CONFIDENCE = 0.5  # equal shapes say little where many tensors have the same


def match_position(pairing: Pairing) -> None:
    """Pair what names have left, in order."""
    olds, news = pairing.sources_left(), pairing.targets_left()
    rows = list(enumerate(zip_longest(olds, news)))
    body = len(rows) - _head_size(olds, news)
    for number, (old, new) in rows[:body]:
        if old is None or new is None or not pairing.fits(old.name, new.name):
            raise MatchError(
                f"By position, tensor {number + 1} of {len(rows)} disagrees.",
                why=f"The checkpoint has {_text(old)}, the target {_text(new)}.",
                fix="`match='structure'` looks for partners in any order.",
            )
    for _, (old, new) in rows:
        pairing.pair(old.name, new.name, "position", CONFIDENCE)


def _head_size(olds: list[Param], news: list[Param]) -> int:
    """How many tensors the last module has, where it is the same but for its outputs: the first size of all of its tensors."""
    count = _last_module(olds)
    if not count or count != _last_module(news) or len(olds) != len(news) or count == len(olds):
        return 0
    rows = [(old.shape, new.shape) for old, new in zip(olds[-count:], news[-count:], strict=True)]
    outputs = {(old[:1], new[:1]) for old, new in rows}
    return count if len(outputs) == 1 and all(old and new and old[1:] == new[1:] for old, new in rows) else 0


def _last_module(params: list[Param]) -> int:
    """How many tensors at the end are of one module."""
    paths = [param.name.rpartition(".")[0] for param in params]
    count = 0
    while count < len(paths) and paths[-1 - count] == paths[-1]:
        count += 1
    return count


def _text(param: Param | None) -> str:
    return "none left" if param is None else f"{param.name!r} {list(param.shape)}"


_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}|\*")
_FIX = "For example: `pair='layers.{i}.wq=blocks.{i}.q'`"


@dataclass(frozen=True, slots=True)
class _Answer:
    """One pair as it was given: what it matches on the checkpoint's side, and the target's name with places to fill."""

    text: str
    old: re.Pattern[str]
    new: str

    @classmethod
    def read(cls, given: str | tuple[str, str]) -> _Answer:
        """Read `OLD=NEW`."""
        old, equals, new = given.partition("=") if isinstance(given, str) else (given[0], "=", given[1])
        if not (old and equals and new):
            raise UsageError(f"`pair={given!r}` is not OLD=NEW.", fix=_FIX)
        sides = [[found[1] or "*" for found in _PLACE.finditer(side)] for side in (old, new)]
        if set(sides[0]) != set(sides[1]) or sides[0].count("*") != sides[1].count("*"):
            raise UsageError(f"`pair={given!r}`: its two sides have different placeholders.", fix=_FIX)
        return cls(f"{old}={new}", re.compile(_expression(old)), new)

    def partner_of(self, name: str) -> Iterator[str]:
        """The target's names for one of the checkpoint: by the whole name, then by that of its module."""
        for own, leaf in _with_leaves(name):
            if (found := self.old.fullmatch(own)) is not None:
                named = set(self.old.groupindex.values())
                stars = iter([text for number, text in enumerate(found.groups(), 1) if number not in named])
                yield _filled(self.new, found.groupdict(), stars) + leaf


def _filled(new: str, numbers: Mapping[str, str], stars: Iterator[str]) -> str:
    return _PLACE.sub(lambda place: numbers[place[1]] if place[1] else next(stars), new)


def _with_leaves(name: str) -> Iterator[tuple[str, str]]:
    """A name and each of its modules, with what follows."""
    at = len(name)
    while at > 0:
        yield name[:at], name[at:]
        at = name.rfind(".", 0, at)


def _expression(text: str) -> str:
    """The regular expression of one side: `{i}` is a whole number, the same everywhere; `*` is any text."""
    parts, at, seen = [], 0, set()
    for found in _PLACE.finditer(text):
        parts.append(re.escape(text[at : found.start()]))
        at = found.end()
        if found[1] is None:
            parts.append("(.*)")
        elif found[1] in seen:
            parts.append(f"(?P={found[1]})")
        else:
            seen.add(found[1])
            parts.append(f"(?P<{found[1]}>[0-9]+)")
    return "".join([*parts, re.escape(text[at:])])


def apply_answers(pairing: Pairing, given: Iterable[str | tuple[str, str]]) -> None:
    """Pair what the user named, before everything else."""
    for answer in map(_Answer.read, given):
        rows = list(_pairs(answer, pairing))
        if not rows:
            raise NothingMatchedError(
                f"`pair={answer.text!r}` pairs nothing: no tensor of the checkpoint and of the target have these names.",
                fix="ckpt match --all lists the names of both.",
            )
        for old, new in rows:
            if old in pairing.used or pairing.is_settled(new) or new in pairing.offered:
                raise UsageError(f"`pair={answer.text!r}` names {old!r} or {new!r}, which another `pair` has.")
            pairing.pair(old, new, "pair")


def _pairs(answer: _Answer, pairing: Pairing) -> list[tuple[str, str]]:
    found = []
    for old in pairing.source:
        new = next((name for name in answer.partner_of(old) if name in pairing.target), None)
        if new is not None:
            found.append((old, new))
    return found
