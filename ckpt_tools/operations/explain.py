"""`ckpt explain`: the page for the words on a screen, or for the code of a finding. It needs no network."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ckpt_tools.errors import NothingMatchedError, UsageError
from ckpt_tools.text import did_you_mean
from ckpt_tools.tree.arguments import natural

MOST = 1 << 20  # characters of a message that are read; the last ones, where the error stands
_WORD = re.compile(r"[a-z_]{2,}|'[^']'|'\\{1,2}x[0-9a-f]{2}'|\[0\]")  # a quoted character is an invalid load key, [0] a shape
_PLACES = re.compile(r"^(?:Traceback \(.*|  File .*+(?:\n    .*+)*+)$", re.MULTILINE)  # of a traceback: where it was, not what
_ASIDE, _LINK = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)"), re.compile(r"\[([^\]]*)\]\([^)]*\)")  # Markdown's
# What the models of the pages happen to be called, and words of every sentence, say nothing about a message.
_NAMES = frozenset(
    ("conv", "fc", "weight", "bias", "net", "the", "of", "in", "to", "and", "is", "for", "from", "with", "or", "py",
     "no", "not", "all", "at", "on", "such", "has", "my", "this", "can", "it", "do", "what",
     "you", "are", "was", "were", "be", "been", "trying", "that", "when", "while", "does", "did", "have", "its", "how", "why",
     "file", "load", "pth", "pt", "errno", "directory")
)  # fmt: skip
# Python's own kinds of errors say little about a message, so they weigh little.
_KINDS = frozenset(
    ("error", "exception", "runtimeerror", "keyerror", "valueerror", "typeerror", "attributeerror", "assertionerror",
     "importerror", "filenotfounderror", "oserror", "unpicklingerror", "_pickle", "notimplementederror")
)  # fmt: skip
_KIND_WEIGHT = 0.3
_LEAST = 13.0  # what the words of a page weigh at least: some three rare ones, so that one or two of them are not a page
_ENOUGH = 0.45  # of a page's words, by how rare they are
_NEAR = 0.8  # of the best page's share, for the others that are named
_SHOWN = 4
_FEW = 3  # words of somebody who asks for a subject
_OFTEN = 3  # times that a page about it names it
_SHOWN_BY = "`ckpt inspect FILE` and `ckpt check FILE` say where it is, and give the command where one mends it."


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known about a message or a code.

    Attributes:
        title: the message in PyTorch's own words, or the code.
        text: Markdown: how it comes about, and the command that mends it.
        page: where the text stands in the documentation.
        score: how well the words fit, from 0 to 1; rare words count more.
    """

    title: str
    text: str
    page: str
    score: float = 1.0


@natural
def explain(words: str) -> list[Explanation]:
    """The pages about a message, or about a finding's code: the best first, at least one.

    Args:
        words: the code, or the message as it stands on the screen, a whole traceback too.

    Raises:
        UsageError: no words. NothingMatchedError: no page is about them.
    """
    if not words.strip():
        raise UsageError("There are no words to explain.", fix="Give a message, or the code of a finding.")
    known = _known()
    if (code := words.strip().strip("[]")) in known["findings"]:
        row = known["findings"][code]
        return [Explanation(f"{code} ({row['severity']})", f"{row['text']}\n\n{_SHOWN_BY}", "docs/check.md")]
    found = _ranked(words[-MOST:], known["pages"])
    if not found:
        found = _mentioned(words, known["pages"])
    if not found:
        quoted = words.strip()[:80].replace("`", "'")  # what stands in `...` would be shown as an option
        raise NothingMatchedError(f"No page is about {quoted!r}.", fix=_nearest(words.strip(), known))
    return found


def meanings() -> dict[str, str]:
    """What each code of a finding means, as plain text."""
    return {code: without_links(row["text"]).replace("`", "") for code, row in _known()["findings"].items()}


def without_links(text: str) -> str:
    """Markdown with the words of its links alone: outside the site they lead nowhere."""
    return _LINK.sub(r"\1", _ASIDE.sub("", text))


def topics() -> list[tuple[str, str]]:
    """Everything that `explain` knows: (code or message, where it stands), the messages first."""
    known = _known()
    return [(row["title"], row["page"]) for row in known["pages"]] + [(code, "docs/check.md") for code in known["findings"]]


def _known() -> dict[str, Any]:
    read = json.loads(files("ckpt_tools.operations").joinpath("explained.json").read_text("utf-8"))
    return {"pages": read["pages"], "findings": {row["code"]: row for row in read["findings"]}}


def _ranked(words: str, pages: Sequence[Mapping[str, Any]]) -> list[Explanation]:
    messages = [[_words(text) for text in (page["title"], *page["also"])] for page in pages]
    counts = Counter(word for texts in messages for word in frozenset().union(*texts))
    weights = {word: _KIND_WEIGHT if word in _KINDS else math.log(1 + len(pages) / count) for word, count in counts.items()}
    given = _words(words)
    rows = []
    for page, texts in zip(pages, messages, strict=True):
        shown = [_words(page["shown"])] if "Error" in page["shown"] else []
        rows.append((max(_fit(text, given, weights) for text in (*texts, *shown)), page))
    rows.sort(key=lambda row: row[0], reverse=True)  # of equal ones the first stays first: the index begins with the commonest
    enough = max(_ENOUGH, rows[0][0][0] * _NEAR)
    found = [Explanation(page["title"], page["text"], page["page"], fit[0]) for fit, page in rows if fit[0] >= enough]
    return found[:_SHOWN]


def _mentioned(words: str, pages: Sequence[Mapping[str, Any]]) -> list[Explanation]:
    """For a subject ("deepspeed"): the pages that have all of its words, the one that says them most often first."""
    given = _words(words)
    if not given or len(given) > _FEW or re.search("error|exception", words, re.IGNORECASE):
        return []
    rows = []
    for page in pages:
        counts = Counter(_WORD.findall(f"{page['title']} {' '.join(page['also'])} {page['text']}".lower()))
        rows.append((min(counts[word] for word in given), page))
    rows.sort(key=lambda row: row[0], reverse=True)
    return [Explanation(page["title"], page["text"], page["page"], 0.0) for count, page in rows if count >= _OFTEN][:_SHOWN]


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(_PLACES.sub("", text).lower())) - _NAMES


def _fit(page: Collection[str], given: Collection[str], weights: Mapping[str, float]) -> tuple[float, float]:
    """How well a page fits: the share of its words that are given (of a traceback) or of the given words that it has (of a
    few words, of which one is not enough), each word by its weight; and the weight of those in common. Sums are exact, so that
    equal pages stay equal in whatever order a set gives its words."""
    both = [word for word in page if word in given]
    common = math.fsum(weights.get(word, 0.0) for word in both) if len(both) > 1 or len(given) == 1 else 0.0
    strange = max(weights.values()) / 2  # the weight of a word that is on no page
    wanted = (
        max(_LEAST, math.fsum(weights.get(word, 0.0) for word in page)),
        math.fsum(weights.get(word, strange) for word in given),
    )
    return round(max((common / total for total in wanted if total), default=0.0), 2), common


def _nearest(words: str, known: dict[str, Any]) -> str:
    near = did_you_mean(words, known["findings"]) if " " not in words else ""
    return f"{near} `ckpt explain` without words lists what there is.".strip()
