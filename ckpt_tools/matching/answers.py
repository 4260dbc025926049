"""Pairs that the user names: `layers.{i}.wq=blocks.{i}.q`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ckpt_tools.errors import NothingMatchedError, UsageError
from ckpt_tools.matching.pairing import Pairing

_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}|\*")
_FIX = "For example: `pair='layers.{i}.wq=blocks.{i}.q'`"


def apply_answers(pairing: Pairing, given: Iterable[str | tuple[str, str]]) -> None:
    """Pair what the user named, before everything else."""
    for answer in given:
        old_text, equals, new_text = answer.partition("=") if isinstance(answer, str) else (answer[0], "=", answer[1])
        if not (old_text and equals and new_text):
            raise UsageError(f"`pair={answer!r}` is not OLD=NEW.", fix=_FIX)
        sides = [[found[1] or "*" for found in _PLACE.finditer(side)] for side in (old_text, new_text)]
        if set(sides[0]) != set(sides[1]) or sides[0].count("*") != sides[1].count("*"):
            raise UsageError(f"`pair={answer!r}`: its two sides have different placeholders.", fix=_FIX)
        pattern, said = re.compile(_expression(old_text)), f"`pair={f'{old_text}={new_text}'!r}`"
        found = [(old, _named(pattern, new_text, old, pairing.target)) for old in pairing.source]
        rows = [(old, new) for old, new in found if new is not None]
        if not rows:
            raise NothingMatchedError(
                f"{said} pairs nothing: no tensor of the checkpoint and of the target have these names.",
                fix="ckpt match --all lists the names of both.",
            )
        for old, new in rows:
            if old in pairing.used or pairing.is_settled(new) or new in pairing.offered:
                raise UsageError(f"{said} names {old!r} or {new!r}, which another `pair` has.")
            pairing.pair(old, new, "pair")


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


def _named(pattern: re.Pattern[str], new: str, old: str, target: Collection[str]) -> str | None:
    """The target's name for one of the checkpoint: by the whole name, then by that of its module, with what follows."""
    at = len(old)
    while at > 0:
        if (found := pattern.fullmatch(old[:at])) is not None:
            stars = iter([text for number, text in enumerate(found.groups(), 1) if number not in pattern.groupindex.values()])
            filled = _PLACE.sub(lambda place: found[place[1]] if place[1] else next(stars), new) + old[at:]  # noqa: B023
            if filled in target:
                return filled
        at = old.rfind(".", 0, at)
    return None
