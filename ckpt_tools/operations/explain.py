"""`ckpt explain`: what the message on a screen, or the code of a finding, means, and the command. It needs no network.

messages.toml has the messages, as patterns; explained.json what the codes mean.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.tree.options import natural

MOST = 1 << 17  # characters of a message that are read; the last ones, where the error stands
_COLOUR, _RANK = re.compile(r"\x1b\[[\d;]*m"), re.compile(r"^\[\w*\d\]: ?", re.MULTILINE)
_LONG = re.compile(r"(\S{400})\S+")  # no word of a message, and slow
# Of a traceback, a notebook's too: where it was, and the code there.
_PLACES = re.compile(
    r"Traceback \(most recent call last\):"
    r"|^ *File \"[^\"\n]*\", line \d+(?:, in \S+)?$"
    r"(?:\n {4,}(?! *[\w.]*(?:Error|Exception)\b).*)*"
    r"|^ *(?:-+> *)?\d+ .*$",
    re.MULTILINE,
)
_QUOTE = re.compile("(?<![A-Za-z])['\"`\u2018\u2019\u201c\u201d]+|['\"`\u2018\u2019\u201c\u201d]+(?![A-Za-z])")
# Who lists names that the model or the file lacks: torch, mmcv, Lightning, transformers, and what scripts print.
_LISTS = (
    ("unexpected: ", r"unexpected[ _]keys?(?:\(s\))?(?: in (?:source )?state_dict)?[:=] ?\[?"
     r"|unexpected key (?=\S+ in state_dict)"
     r"|keys that are not in the model state dict but in the checkpoint: \[?|were not used when initializing \w+: \[?"),
    ("missing: ", r"missing[ _]keys?(?:\(s\))?(?: in (?:source )?state_dict)?[:=] ?\[?"
     r"|keys that are in the model state dict but not in the checkpoint: \[?|and are newly initialized: \[?"
     r"|the following keys are missing: "),
)  # fmt: skip
# Of unexpected names before missing ones: both, in the order in which torch has them.
_TURNED = re.compile(r"(unexpected: (?:\S+, )*\S+) (?:\S+ ){0,9}?(missing: (?:\S+, )*\S+)")
_MACROS = {
    "UNEXPECTED ": r"unexpected: (?:\S+, )*?",
    "MISSING ": r"missing: (?:\S+, )*?",
    "END": r"(?=, |[.\]]+(?: |$)|$)",
    "NEVER": "(?!)",
    "LOADING": r"\bload\(|load_\w+\(|serialization\.py|find_class|pickle\.py|unpickl"
    r"|from_pretrained\(|safe_open\(|_load\w*\(|restore\w*\(",
}
_FILLED = re.compile(r"\{(\w+)=([^}]*)\}")
_WORD = re.compile(r"[a-z_]{3,}")
_FEW = 2  # guesses


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a message or a code means.

    Attributes:
        name: the row of the table, or the code; `explain` takes it too.
        title: the message in the words of the program that prints it, or the code and its severity.
        text: what happened, and what helps, in two or three plain lines.
        command: the command, a line each where there are two; names that the message has are filled in.
        page: where more stands in the documentation.
    """

    name: str
    title: str
    text: str
    command: str
    page: str


@natural
def explain(words: str) -> list[Explanation]:
    """What a message, or a finding's code, means: the best first; empty where none of what is known has the message's words.

    Args:
        words: the code, or the message as it stands on the screen, a whole traceback too.

    Raises:
        UsageError: no words.
    """
    if not words.strip():
        raise UsageError("There are no words to explain.", fix="Give a message, or the code of a finding.")
    name = words.strip().strip("[]")
    if (code := codes().get(name)) is not None:
        command = code.get("command", "ckpt check FILE")
        return [Explanation(name, f"{name} ({code['severity']})", code["text"], command, "docs/check.md")]
    shown = _LONG.sub(r"\1", _RANK.sub("", _COLOUR.sub("", words[-MOST:])))
    message = plain(shown)
    for row in _rows():
        if name in (row["name"], row["says"]):
            match = _match(row, message, shown)
            return [_explanation(row, match.groupdict() if match else {})]
    found = [(row, match.groupdict()) for row in _rows() if (match := _match(row, message, shown))]
    sure = [pair for pair in found if not pair[0].get("last")] or found
    return [_explanation(*pair) for pair in sure]


def guesses(words: str) -> list[Explanation]:
    """The two nearest by likeness of words alone; fewer where nothing is like them."""
    near = difflib.get_close_matches(words.strip()[:80], [*codes(), *(row["name"] for row in _rows())], n=_FEW)
    if near:
        return [explanation for name in near for explanation in explain(name)]
    texts = [frozenset(_WORD.findall(f"{row['name']} {row['says']} {row['text']}".lower())) for row in _rows()]
    counts = Counter(word for text in texts for word in text)
    given = frozenset(_WORD.findall(words.lower()))
    fits = [math.fsum(math.log(len(texts) / counts[word]) for word in sorted(text & given)) for text in texts]
    best = sorted(range(len(texts)), key=lambda number: -fits[number])[:_FEW]
    return [_explanation(_rows()[number], {}) for number in best if fits[number]]


def meanings() -> dict[str, str]:
    """What each code of a finding means, as plain text."""
    return {code: row["text"].replace("`", "") for code, row in codes().items()}


def topics() -> list[tuple[str, str]]:
    """Everything that `explain` knows: (name or code, the message or what it means), the messages first."""
    return [(row["name"], row["says"]) for row in _rows()] + list(meanings().items())


def plain(message: str) -> str:
    """A message without the places and code lines of its traceback, quotes and line breaks, its lists of names by one name."""
    text = " ".join(_QUOTE.sub("", _PLACES.sub("", message)).split())
    for name, words in _LISTS:
        text = re.sub(words, name, text, flags=re.IGNORECASE)
    return _TURNED.sub(r"\2. \1", text)


def _match(row: Mapping[str, Any], message: str, shown: str) -> re.Match[str] | None:
    found = next((match for one in row["patterns"] if (match := _pattern(one).search(message))), None)
    if found is None or "near" not in row:
        return found
    is_near = _pattern(row["near"]).search(shown) or (row.get("bare", True) and "Traceback" not in shown)
    return found if is_near and "from_parent" not in shown else None  # of that one process pickled it for another; no file


def _explanation(row: Mapping[str, Any], names: Mapping[str, str | None]) -> Explanation:
    command = _FILLED.sub(lambda found: shlex.quote(names.get(found[1]) or found[2]), row["command"])
    return Explanation(row["name"], row["says"], fill(row["text"], names), command, f"docs/messages.md#{row['name']}")


def fill(text: str, names: Mapping[str, str | None]) -> str:
    """A text of the table with the names that a message has; else with those of the table."""
    return _FILLED.sub(lambda found: names.get(found[1]) or found[2], text).strip()


@cache
def _pattern(text: str) -> re.Pattern[str]:
    for word, meant in _MACROS.items():
        text = text.replace(word, meant)
    return re.compile(text, re.IGNORECASE)


def _read(name: str) -> str:
    return files("ckpt_tools.operations").joinpath(name).read_text("utf-8")


def sections() -> list[dict[str, Any]]:
    """The table, as messages.toml has it."""
    found: list[dict[str, Any]] = tomllib.loads(_read("messages.toml"))["section"]
    return found


@cache
def _rows() -> list[dict[str, Any]]:
    return [row for section in sections() for row in section["row"]]


@cache
def codes() -> dict[str, dict[str, str]]:
    """What the code of each finding means, with its severity."""
    found: dict[str, dict[str, str]] = json.loads(_read("explained.json"))
    return found
