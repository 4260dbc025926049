"""Match the tensors of a checkpoint to those of a target: every name gets a fate and a reason, nothing is guessed in silence.

The stages that names alone decide are here; `answers`, `by_structure` and `values` have the others.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Literal, TypeAlias

from ckpt_tools.edit.renaming import parse_rename
from ckpt_tools.errors import MatchError, NothingMatchedError, UsageError
from ckpt_tools.matching.answers import apply_answers
from ckpt_tools.matching.lexicon import words
from ckpt_tools.matching.pairing import NOT_TRANSPOSED, Pairing
from ckpt_tools.matching.records import Ambiguous, Framework, Match, Matching, Mismatch, Offer, Param, Reason
from ckpt_tools.tree.graphs import Graph
from ckpt_tools.tree.names import LEADING_WRAPPERS, MODULE, check_unique, strip_inner, unwrap
from ckpt_tools.tree.parametrized import part_of

# --- the stages that names alone decide


_AVERAGED = "n_averaged"  # beside the wrapped names of an AveragedModel
_MOST_WRAPPERS = 8  # around one model; a stranger's name may be made of a million
_ROLES = {".weight", ".bias"}  # no suffix: a matrix that is a parameter of its own may be kept as [in, out]


def apply_rules(pairing: Pairing, rules: Sequence[str | tuple[str, str]]) -> None:
    """Rename the checkpoint's tensors by the user's rules; a rule that changes nothing is refused."""
    for rule in rules:
        pattern, replacement = parse_rename(rule)
        renamed = {old: pattern.sub(replacement, name) for old, name in pairing.known.items()}
        if renamed == pairing.known:
            raise NothingMatchedError(f"`rename={rule!r}` changes no name.", fix="ckpt inspect --all FILE lists the names.")
        check_unique(renamed)
        pairing.known = renamed
    pairing.ruled = {old for old, name in pairing.known.items() if name != old}


def match_exact(pairing: Pairing) -> None:
    """Names that are equal, once the user's rules have been applied."""
    free = {param.name for param in pairing.targets_left()}
    for param in pairing.sources_left():
        if (name := pairing.known[param.name]) in free:
            pairing.pair(param.name, name, _said(pairing, param.name, "exact"))


def match_whole_wrapper(pairing: Pairing) -> None:
    """Names under a `module.` that is in front of all of one side, where more names are equal without it than with it."""
    sources = {param.name: strip_inner(pairing.known[param.name]) for param in pairing.sources_left()}
    targets = {param.name: strip_inner(param.name) for param in pairing.targets_left()}
    best = as_they_are = _meet(sources, targets)
    for side in ("source", "target"):
        names = sources if side == "source" else targets
        for _ in range(_MOST_WRAPPERS):
            wanted = [name for name in names.values() if name != _AVERAGED]
            wrapper = next((each for each in LEADING_WRAPPERS if all(name.startswith(each) for name in wanted)), "")
            shorter = {name: known if known == _AVERAGED else known.removeprefix(wrapper) for name, known in names.items()}
            if shorter == names or not all(shorter.values()):
                break
            names = shorter
            found = _meet(names, targets) if side == "source" else _meet(sources, names)
            best = max(best, found, key=len)
    if len(best) > len(as_they_are):
        for old, new in best.items():
            pairing.pair(old, new, _said(pairing, old, "wrapper"))


def _meet(sources: Mapping[str, str], targets: Mapping[str, str]) -> dict[str, str]:
    """Source -> target where both are known by one name; none at all where two of a side are."""
    by_name = {name: new for new, name in targets.items()}
    if len(by_name) < len(targets) or len(set(sources.values())) < len(sources):
        return {}
    return {old: by_name[name] for old, name in sources.items() if name in by_name}


def _as_part(name: str) -> str:
    """A part of weight norm or spectral norm, the same in torch's old form and its new one, as torch's load hooks have it."""
    part = part_of(unwrap(name))
    return f"{part[0]} {part[1]}" if part else unwrap(name)


def _without_module(name: str) -> str:
    """A name without any wrapper at any depth, `module` included."""
    *modules, leaf = strip_inner(name).split(".")
    return ".".join([part for part in modules if f"{part}." != MODULE] + [leaf])


def _match_by_key(pairing: Pairing, key: Callable[[str], str]) -> None:
    """Names that are equal once they are read in this way."""
    sources: dict[str, list[str]] = defaultdict(list)
    targets: dict[str, list[str]] = defaultdict(list)
    for param in pairing.sources_left():
        sources[key(pairing.known[param.name])].append(param.name)
    for param in pairing.targets_left():
        targets[key(param.name)].append(param.name)
    for name, news in targets.items():
        olds = sources.get(name, [])
        if len(olds) == len(news) == 1:
            pairing.pair(olds[0], news[0], _said(pairing, olds[0], "wrapper"))
        elif olds:
            for new in news:
                pairing.doubt(new, sorted(olds), "without wrappers these names are the same")


def _said(pairing: Pairing, old: str, reason: Reason) -> Reason:
    """A name that a rule has changed was matched by the rule."""
    return "rule" if old in pairing.ruled else reason


# --- a common prefix or suffix

_Pair: TypeAlias = tuple[str, str]  # a name of the checkpoint, one of the target
_Splits: TypeAlias = Callable[[str], Iterator[tuple[str, str]]]
_DIGITS = re.compile(r"[0-9]+")
MAX_PREFIX_PARTS = 4
_MOST_WAYS = 4  # in which a rest may be met, to count; all that ends in `weight` with all else that does would be too many
_MOST_EXCHANGES = 8
_FEWEST_MODULES = 2
_APART = (
    {"encoder", "decoder"}, {"text", "vision", "visual", "image", "audio", "language"}, {"student", "teacher"},
    {"query", "key", "q", "k"}, {"generator", "discriminator"}, {"online", "target"}, {"left", "right"},
)  # fmt: skip
_BESIDES = frozenset({"aux", "auxiliary", "auxlogits"})


def prefixes(name: str) -> Iterator[tuple[str, str]]:
    """The name whole, and without its first parts."""
    yield "", name
    at = 0
    for _ in range(MAX_PREFIX_PARTS):
        at = name.find(".", at) + 1
        if not at:
            return
        yield name[:at], name[at:]


def _suffixes(name: str) -> Iterator[tuple[str, str]]:
    """The name whole, and without its last part, cut at a dot or an underscore."""
    yield "", name
    for mark in ("_", "."):
        at = name.rfind(mark)
        if at > 0:
            yield name[at:], name[:at]


def match_affixes(pairing: Pairing) -> None:
    """Names that become equal when one prefix, or one suffix, is taken from, put before or exchanged in all that are left.

    The pair of affixes under which most names meet; where another would give a name another partner: a doubt.
    """
    for splits in (prefixes, _suffixes):
        olds = [(unwrap(pairing.known[param.name]), param.name) for param in pairing.sources_left()]
        news = [(unwrap(param.name), param.name) for param in pairing.targets_left()]
        found = _one_bare(_by_rest(olds, splits), _by_rest(news, splits))
        if splits is prefixes:
            found.update(_exchanged(dict(olds), dict(news)))
        fitting = [
            [(old, new) for old, new in pairs if pairing.source[old].shape == pairing.target[new].shape]
            for pairs in found.values()
        ]
        most = max(map(len, fitting), default=0)
        said = list(dict.fromkeys(pair for pairs in fitting if len(pairs) == most for pair in pairs))
        counts, candidates = Counter(old for old, _ in said), defaultdict[str, list[str]](list)
        for old, new in said:
            candidates[new].append(old)
        for old, new in said:
            if counts[old] == len(candidates[new]) == 1:
                pairing.pair(old, new, _said(pairing, old, "prefix"))
            elif not pairing.is_settled(new):
                pairing.doubt(new, sorted(candidates[new]), "several prefixes fit equally well")


def _by_rest(names: Iterable[_Pair], splits: _Splits) -> dict[str, list[_Pair]]:
    found: dict[str, list[_Pair]] = defaultdict(list)
    for name, own in names:
        for affix, rest in splits(name):
            found[rest].append((affix, own))
    return found


def _one_bare(olds: Mapping[str, list[_Pair]], news: Mapping[str, list[_Pair]]) -> dict[_Pair, list[_Pair]]:
    """Two affixes, one of them empty -> the pairs of own names that are one under them."""
    found: dict[_Pair, list[_Pair]] = defaultdict(list)
    for rest in olds.keys() & news.keys():
        bare = [row for row in news[rest] if not row[0]]
        for before, old in olds[rest]:
            for after, new in bare if before else news[rest]:
                if not {before, after} & _ROLES:
                    found[before, after].append((old, new))
    return found


def _exchanged(olds: Mapping[str, str], news: Mapping[str, str]) -> dict[_Pair, list[_Pair]]:
    """Two prefixes, neither of them empty -> the pairs of own names that are one when one stands for the other."""
    left, right = _by_rest(olds.items(), prefixes), _by_rest(news.items(), prefixes)
    votes: Counter[_Pair] = Counter()
    for rest in left.keys() & right.keys():
        sides = [[affix for affix, _ in side[rest] if affix] for side in (left, right)]
        if len(sides[0]) * len(sides[1]) <= _MOST_WAYS:
            votes.update((before, after) for before in sides[0] for after in sides[1] if _may_be_one(before, after))
    found: dict[_Pair, list[_Pair]] = {}
    for before, after in sorted(votes, key=lambda exchange: (-votes[exchange], exchange))[:_MOST_EXCHANGES]:
        others = {name: after + name[len(before) :] for name in olds if name.startswith(before)}
        pairs = [(olds[name], news[other]) for name, other in others.items() if other in news]
        modules = {new.rpartition(".")[0] for _, new in pairs}
        if len(modules) >= _FEWEST_MODULES and 2 * len(pairs) > min(len(olds), len(news)):
            found[before, after] = pairs
    return found


def _may_be_one(before: str, after: str) -> bool:
    """Whether two prefixes do not say that they are two things: `layer1.` and `layer2.`, `text.` and `vision.`."""
    mine, theirs = ({word for part in prefix.split(".") for word in words(part)} for prefix in (before, after))
    counts = [_DIGITS.findall(prefix) for prefix in (before, after)]
    if before == after or (all(counts) and counts[0] != counts[1]) or bool(mine & _BESIDES) != bool(theirs & _BESIDES):
        return False
    return all(not (mine & group and theirs & group) or mine & group == theirs & group for group in _APART)


# --- by position

CONFIDENCE = 0.5  # equal shapes say little where many tensors have the same


def match_position(pairing: Pairing) -> None:
    """Pair what names have left, in order."""
    olds, news = pairing.sources_left(), pairing.targets_left()
    rows = list(enumerate(zip_longest(olds, news)))
    body = len(rows) - _head_size(olds, news)
    for number, (old, new) in rows[:body]:
        if old is None or new is None or not pairing.fits(old.name, new.name):
            sides = ["none left" if param is None else f"{param.name!r} {list(param.shape)}" for param in (old, new)]
            raise MatchError(
                f"By position, tensor {number + 1} of {len(rows)} disagrees.",
                why=f"The checkpoint has {sides[0]}, the target {sides[1]}.",
                fix="`match='structure'` looks for partners in any order.",
            )
    for _, (old, new) in rows:
        pairing.pair(old.name, new.name, "position", CONFIDENCE)


def _head_size(olds: list[Param], news: list[Param]) -> int:
    """How many tensors the last module has, where it is the same but for its outputs: the first size of all of its tensors."""
    counts = []
    for params in (olds, news):
        modules = [param.name.rpartition(".")[0] for param in reversed(params)]
        counts.append(sum(1 for _ in takewhile(modules[0].__eq__, modules)) if modules else 0)
    count = counts[0]
    if not count or count != counts[1] or len(olds) != len(news) or count == len(olds):
        return 0
    rows = [(old.shape, new.shape) for old, new in zip(olds[-count:], news[-count:], strict=True)]
    outputs = {(old[:1], new[:1]) for old, new in rows}
    return count if len(outputs) == 1 and all(old and new and old[1:] == new[1:] for old, new in rows) else 0


# --- all stages

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
    from ckpt_tools.matching.frameworks import as_in_file, as_in_torch

    reading = as_in_torch(source, pairing.known, framework)
    turned = Pairing(reading.params, target, allow_reshape=allow_reshape)
    turned.known, turned.ruled, turned.oriented = reading.known, pairing.ruled, (NOT_TRANSPOSED, turned.oriented[1])
    return as_in_file(_staged(turned, stages, pairs).result(), reading, target)


def _staged(pairing: Pairing, stages: Stages, pairs: Sequence[str | tuple[str, str]]) -> Pairing:
    _start(pairing, stages, pairs)
    match_whole_wrapper(pairing)
    match_exact(pairing)
    for key in (unwrap, _without_module, _as_part):  # known wrappers first, then `module.` anywhere
        _match_by_key(pairing, key)
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
