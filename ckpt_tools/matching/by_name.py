"""The stages that names alone decide: the user's rules, exact names, wrappers, a common prefix or suffix."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ckpt_tools.edit.renaming import parse_rename
from ckpt_tools.errors import NothingMatchedError
from ckpt_tools.matching.lexicon import words
from ckpt_tools.matching.pairing import Pairing
from ckpt_tools.matching.records import Reason
from ckpt_tools.tree.names import (
    LEADING_WRAPPERS,
    MODULE,
    check_unique,
    strip_inner,
    unwrap,
)
from ckpt_tools.tree.parametrized import part_of

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
