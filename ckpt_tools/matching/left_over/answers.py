"""`--pair OLD=NEW`: partners that the user names; by name, module or glob, or by number: `layers.{i}.wq=blocks.{i}.q`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.errors import NothingMatchedError, UsageError
from ckpt_tools.matching.pairing import Pairing

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
        """Read `OLD=NEW`.

        Raises:
            UsageError: it is not that, or its two sides have different places.
        """
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
    """Pair what the user named, before everything else.

    Raises:
        UsageError: an answer that cannot be read, or two that name one tensor. NothingMatchedError: one that pairs nothing.
    """
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
