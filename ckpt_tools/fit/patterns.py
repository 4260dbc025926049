"""Names with placeholders: in `layers.{i}.attn.wq.weight` one is a whole number; `{part:weight|bias}` is one of these words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from ckpt_tools.errors import MatchError

Binding: TypeAlias = tuple[tuple[str, str], ...]  # (placeholder, its digits), by placeholder
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_DIGITS = re.compile(r"[0-9]+")
_PLACEHOLDER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*):([^{}]*)\}")
_MOST_WORDS = 64  # ways to write out the words of one step
_MOST_DIGITS = 18
_MOST_WAYS = 16  # in which patterns of one text write down some numbers and leave others open: a name is looked up in each


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A name with placeholders for whole numbers."""

    text: str
    pieces: tuple[str, ...]
    placeholders: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> NamePattern:
        pieces, placeholders, at = [""], [], 0
        for part in _PART.finditer(text):
            pieces[-1] += text[at : part.start()]
            at = part.end()
            if part[0] in ("{{", "}}"):
                pieces[-1] += part[0][0]
            elif part[1] is None or not _PLACEHOLDER.fullmatch(part[1]):
                why = "One is {i}, a whole number, or {part:weight|bias}; a brace itself is written twice."
                raise MatchError(f"{text!r}: {part[0]!r} is not a placeholder.", why=why)
            else:
                placeholders.append(part[1])
                pieces.append("")
        pieces[-1] += text[at:]
        _check_apart(text, pieces)
        return cls(text, tuple(pieces), tuple(placeholders))

    @property
    def key(self) -> str:
        """The name with `#` for every number, written or not."""
        return _DIGITS.sub("#", "0".join(self.pieces))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.placeholders)

    def numbers(self) -> list[str]:
        """What stands at each `#` of the key: digits, or a placeholder in braces."""
        found: list[str] = []
        for piece, placeholder in zip(self.pieces, (*self.placeholders, None), strict=True):
            found += _DIGITS.findall(piece)
            found += [f"{{{placeholder}}}"] if placeholder is not None else []
        return found

    def fill(self, binding: Mapping[str, str]) -> str:
        """The name that has these numbers."""
        filled = [self.pieces[0]]
        for placeholder, piece in zip(self.placeholders, self.pieces[1:], strict=True):
            filled += (binding[placeholder], piece)
        return "".join(filled)


def _check_apart(text: str, pieces: list[str]) -> None:
    """What is a number must be told from the text: two that touch could be cut in several ways."""
    inner = (*((piece, "") for piece in pieces[1:-1]), (pieces[-1], " "))
    for number, (piece, end) in enumerate(inner if len(pieces) > 1 else ()):
        before = pieces[number]
        if (not piece and not end) or piece[:1].isdigit() or before[-1:].isdigit():
            raise MatchError(f"{text!r}: a placeholder touches a digit or another placeholder.")


def written_out(texts: Iterable[str], label: str) -> Iterator[dict[str, str]]:
    """For all words that placeholders in the texts may be: placeholder -> word, every combination."""
    words: dict[str, tuple[str, ...]] = {}
    for text in texts:
        for found in _WORDS.finditer(text):
            listed = tuple(found[2].split("|"))
            if words.setdefault(found[1], listed) != listed or len(set(listed)) < len(listed) or not all(listed):
                raise MatchError(f"{label}: {found[0]!r} must list each word once, and the same words everywhere.")
    count = 1
    for listed in words.values():
        count *= len(listed)
        if count > _MOST_WORDS:
            raise MatchError(f"{label}: its words can be written out in more than {_MOST_WORDS} ways.")
    for chosen in product(*words.values()):
        yield dict(zip(words, chosen, strict=True))


def with_words(text: str, chosen: Mapping[str, str]) -> str:
    """A text with words in the place of their placeholders."""

    def word(found: re.Match[str]) -> str:
        name = (found[1] or "").partition(":")[0]
        return chosen.get(name, found[0])

    return _PART.sub(word, text)


class Index:
    """Patterns by what a name looks like, each with what it stands for."""

    def __init__(self) -> None:
        # the key of a name -> the places of its numbers that a pattern writes down -> these numbers -> all numbers as the
        # pattern has them, and what it stands for
        self._by_key: dict[str, dict[tuple[int, ...], dict[tuple[str, ...], list[tuple[list[str], object]]]]] = {}

    def add(self, pattern: NamePattern, what: object) -> None:
        numbers = pattern.numbers()
        places = tuple(place for place, number in enumerate(numbers) if not number.startswith("{"))
        written = tuple(numbers[place] for place in places)
        by_places = self._by_key.setdefault(pattern.key, {})
        by_places.setdefault(places, {}).setdefault(written, []).append((numbers, what))
        if len(by_places) > _MOST_WAYS:
            raise MatchError(f"More than {_MOST_WAYS} patterns like {pattern.text!r} differ in which numbers they write down.")

    def find(self, name: str) -> list[tuple[Any, Binding]]:
        """What stands for a name, with the numbers in the place of its placeholders."""
        by_places = self._by_key.get(_DIGITS.sub("#", name))
        if by_places is None:
            return []
        numbers = _DIGITS.findall(name)
        found = []
        for places, by_numbers in by_places.items():
            for wanted, what in by_numbers.get(tuple(numbers[place] for place in places), ()):
                if (binding := _bound(wanted, numbers)) is not None:
                    found.append((what, binding))
        return found


def _bound(wanted: list[str], numbers: list[str]) -> Binding | None:
    """The numbers of a name by placeholder; None where one placeholder would be two numbers, or a number is too long."""
    bound: dict[str, str] = {}
    for number, place in zip(numbers, wanted, strict=True):
        if place.startswith("{") and (len(number) > _MOST_DIGITS or bound.setdefault(place[1:-1], number) != number):
            return None
    return tuple(sorted(bound.items()))
