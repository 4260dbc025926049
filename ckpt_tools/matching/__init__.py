"""Match the tensors of a checkpoint to those of a target: every name gets a fate and a reason, nothing is guessed in silence.

The stages, each in a file of its own: `by_name` (rules, exact, wrappers, prefixes), `structure`, `by_position`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeAlias

from ckpt_tools.edit.renaming import parse_rename
from ckpt_tools.errors import MatchError, NothingMatchedError, UsageError
from ckpt_tools.matching.lexicon import words
from ckpt_tools.matching.pairing import NOT_TRANSPOSED, Pairing
from ckpt_tools.matching.records import Ambiguous, Framework, Match, Matching, Mismatch, Offer, Param, Reason
from ckpt_tools.tree.graphs import Graph
from ckpt_tools.tree.names import LEADING_WRAPPERS, MODULE, check_unique, strip_inner, unwrap
from ckpt_tools.tree.parametrized import part_of

# --- the stages that names alone decide


_AVERAGED = "n_averaged"  # beside the wrapped names of an AveragedModel
_MOST_WRAPPERS = 8  # around one model; a stranger's name may be made of a million
_Affixed: TypeAlias = tuple[str, str]  # what was taken from a name, and the name
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
            wrapper = _around(names.values()) if names else ""
            if not wrapper:
                break
            shorter = {name: known if known == _AVERAGED else known.removeprefix(wrapper) for name, known in names.items()}
            if shorter == names or not all(shorter.values()):
                break
            names = shorter
            found = _meet(names, targets) if side == "source" else _meet(sources, names)
            best = max(best, found, key=len)
    if len(best) > len(as_they_are):
        for old, new in best.items():
            pairing.pair(old, new, _said(pairing, old, "wrapper"))


def _around(names: Iterable[str]) -> str:
    """The wrapper that every name starts with, or the empty text."""
    wanted = [name for name in names if name != _AVERAGED]
    return next((wrapper for wrapper in LEADING_WRAPPERS if all(name.startswith(wrapper) for name in wanted)), "")


def _meet(sources: Mapping[str, str], targets: Mapping[str, str]) -> dict[str, str]:
    """Source -> target where both are known by one name; none at all where two of a side are."""
    by_name = {name: new for new, name in targets.items()}
    if len(by_name) < len(targets) or len(set(sources.values())) < len(sources):
        return {}
    return {old: by_name[name] for old, name in sources.items() if name in by_name}


def match_wrappers(pairing: Pairing) -> None:
    """Names that are equal without wrappers: at the front and known ones anywhere first, then `module.` anywhere."""
    for key in (unwrap, without_module):
        _match_by_key(pairing, key, "wrapper")


def match_parametrized(pairing: Pairing) -> None:
    """The parts of weight norm and spectral norm in torch's old form and its new one, as torch's own load hooks rename them."""

    def key(name: str) -> str:
        part = part_of(unwrap(name))
        return f"{part[0]} {part[1]}" if part else unwrap(name)

    _match_by_key(pairing, key, "wrapper")


def without_module(name: str) -> str:
    """A name without any wrapper at any depth, `module` included."""
    *modules, leaf = strip_inner(name).split(".")
    return ".".join([part for part in modules if f"{part}." != MODULE] + [leaf])


def _match_by_key(pairing: Pairing, key: Callable[[str], str], reason: Reason) -> None:
    sources: dict[str, list[str]] = defaultdict(list)
    targets: dict[str, list[str]] = defaultdict(list)
    for param in pairing.sources_left():
        sources[key(pairing.known[param.name])].append(param.name)
    for param in pairing.targets_left():
        targets[key(param.name)].append(param.name)
    for name, news in targets.items():
        olds = sources.get(name, [])
        if len(olds) == len(news) == 1:
            pairing.pair(olds[0], news[0], _said(pairing, olds[0], reason))
        elif olds:
            for new in news:
                pairing.doubt(new, sorted(olds), "without wrappers these names are the same")


def _said(pairing: Pairing, old: str, reason: Reason) -> Reason:
    """A name that a rule has changed was matched by the rule."""
    return "rule" if old in pairing.ruled else reason


# --- a common prefix or suffix


def match_affixes(pairing: Pairing) -> None:
    """Names that become equal when one prefix, or one suffix, is taken from, put before or exchanged in all that are left."""
    for ends in (prefixes, _suffixes):
        _match_affix(pairing, ends)


def _match_affix(pairing: Pairing, ends: Callable[[str], Iterator[tuple[str, str]]]) -> None:
    """Take the pair of affixes under which most names meet; where another would give a name another partner: a doubt."""
    olds = [(param.name, unwrap(pairing.known[param.name])) for param in pairing.sources_left()]
    news = [(param.name, unwrap(param.name)) for param in pairing.targets_left()]
    sources, targets = _by_rest(olds, ends), _by_rest(news, ends)
    found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for rest in sources.keys() & targets.keys():
        for (before, old), (after, new) in _one_bare(sources[rest], targets[rest]):
            if not {before, after} & _ROLES and _same_shape(pairing, old, new):
                found[before, after].append((old, new))
    if ends is prefixes:
        for exchange, pairs in exchanged(olds, news).items():
            found[exchange] = [pair for pair in pairs if _same_shape(pairing, *pair)]
    most = max(map(len, found.values()), default=0)
    _pair_best(pairing, [pairs for pairs in found.values() if pairs and len(pairs) == most])


def _same_shape(pairing: Pairing, old: str, new: str) -> bool:
    return pairing.source[old].shape == pairing.target[new].shape


def _pair_best(pairing: Pairing, best: list[list[tuple[str, str]]]) -> None:
    """Pair what the best affixes say; a doubt where they say different things."""
    said = list(dict.fromkeys(pair for pairs in best for pair in pairs))
    olds, news = (Counter(pair[side] for pair in said) for side in (0, 1))
    candidates: dict[str, list[str]] = defaultdict(list)
    for old, new in said:
        candidates[new].append(old)
    for old, new in said:
        if olds[old] == news[new] == 1:
            pairing.pair(old, new, _said(pairing, old, "prefix"))
        elif not pairing.is_settled(new):
            pairing.doubt(new, sorted(candidates[new]), "several prefixes fit equally well")


def _one_bare(sources: list[_Affixed], targets: list[_Affixed]) -> Iterator[tuple[_Affixed, _Affixed]]:
    """Pairs of which one is the whole name; all that end in `weight` with all others would be too many to look at."""
    bare = [row for row in targets if not row[0]]
    for row in sources:
        for other in bare if row[0] else targets:
            yield row, other


def _by_rest(names: Iterable[tuple[str, str]], ends: Callable[[str], Iterator[tuple[str, str]]]) -> dict[str, list[_Affixed]]:
    """What remains of a name -> (affix, the name) for each of its affixes."""
    found: dict[str, list[_Affixed]] = defaultdict(list)
    for own, name in names:
        for affix, rest in ends(name):
            found[rest].append((affix, own))
    return found


def _suffixes(name: str) -> Iterator[tuple[str, str]]:
    """The name whole, and without its last part, cut at a dot or an underscore."""
    yield "", name
    for mark in ("_", "."):
        at = name.rfind(mark)
        if at > 0:
            yield name[at:], name[:at]


Rows: TypeAlias = Iterable[tuple[str, str]]  # a tensor's own name, and the name that is compared
Exchange: TypeAlias = tuple[str, str]
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


def exchanged(sources: Rows, targets: Rows) -> dict[Exchange, list[tuple[str, str]]]:
    """Two prefixes, neither of them empty -> the pairs of own names that are one when one stands for the other."""
    olds, news = ({name: own for own, name in rows} for rows in (sources, targets))
    found: dict[Exchange, list[tuple[str, str]]] = {}
    for before, after in _likely(olds, news):
        pairs = [
            (own, news[after + name[len(before) :]])
            for name, own in olds.items()
            if name.startswith(before) and after + name[len(before) :] in news
        ]
        modules = {new.rpartition(".")[0] for _, new in pairs}
        if len(modules) >= _FEWEST_MODULES and 2 * len(pairs) > min(len(olds), len(news)):
            found[before, after] = pairs
    return found


def _likely(olds: Iterable[str], news: Iterable[str]) -> list[Exchange]:
    """The exchanges that most names speak for."""
    left, right = _prefixes_by_rest(olds), _prefixes_by_rest(news)
    votes: Counter[Exchange] = Counter()
    for rest in sorted(left.keys() & right.keys()):
        if len(left[rest]) * len(right[rest]) <= _MOST_WAYS:
            votes.update((before, after) for before in left[rest] for after in right[rest] if _may_be_one(before, after))
    return [exchange for exchange, _ in sorted(votes.items(), key=lambda row: (-row[1], row[0]))[:_MOST_EXCHANGES]]


def _prefixes_by_rest(names: Iterable[str]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for prefix, rest in prefixes(name):
            if prefix:
                found[rest].append(prefix)
    return found


def _may_be_one(before: str, after: str) -> bool:
    """Whether two prefixes do not say that they are two things: `layer1.` and `layer2.`, `text.` and `vision.`."""
    mine, theirs = ({word for part in prefix.split(".") for word in words(part)} for prefix in (before, after))
    counts = [_DIGITS.findall(prefix) for prefix in (before, after)]
    if before == after or (all(counts) and counts[0] != counts[1]) or bool(mine & _BESIDES) != bool(theirs & _BESIDES):
        return False
    return all(not (mine & group and theirs & group) or mine & group == theirs & group for group in _APART)


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
