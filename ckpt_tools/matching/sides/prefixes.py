"""Names that are equal but for the prefix, which each side has: `model.layer1.weight` and `net.backbone.layer1.weight`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from ckpt_tools.matching.lexicon import words

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
    """The name whole, and without its first parts.

    >>> list(prefixes("model.fc.weight"))
    [('', 'model.fc.weight'), ('model.', 'fc.weight'), ('model.fc.', 'weight')]
    """
    yield "", name
    at = 0
    for _ in range(MAX_PREFIX_PARTS):
        at = name.find(".", at) + 1
        if not at:
            return
        yield name[:at], name[at:]


def exchanged(sources: Rows, targets: Rows) -> dict[Exchange, list[tuple[str, str]]]:
    """Two prefixes, neither of them empty -> the pairs of own names that are one when one stands for the other.

    Only what pairs most of what is there counts: two heads may both hold an `fc`.
    """
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
    left, right = _by_rest(olds), _by_rest(news)
    votes: Counter[Exchange] = Counter()
    for rest in sorted(left.keys() & right.keys()):
        if len(left[rest]) * len(right[rest]) <= _MOST_WAYS:
            votes.update((before, after) for before in left[rest] for after in right[rest] if _may_be_one(before, after))
    return [exchange for exchange, _ in sorted(votes.items(), key=lambda row: (-row[1], row[0]))[:_MOST_EXCHANGES]]


def _by_rest(names: Iterable[str]) -> Mapping[str, list[str]]:
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
