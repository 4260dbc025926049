"""Names told by patterns that a file says, in time that no pattern makes long.

A pattern is one of `re`, of which only this is read: characters that stand for themselves or behind a backslash, `.`, `\\d`,
and `+` and `*` behind one of those; `^` in front and `$` at the end. It fits a name as `re.match` says it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.errors import PartError

_MOST = 256  # patterns with something else than characters in them
_PLAIN = frozenset("_-/:,@ ")

Token = tuple[str, bool]  # a character, "any" or "digit"; whether it may come any number of times


class Patterns:
    """Patterns of one list.

    Raises:
        PartError: one is written in a way that is not read, or there are too many.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        parsed = [_parsed(pattern) for pattern in patterns]
        self.exact = {"".join(kind for kind, _ in tokens) for tokens, to_end in parsed if to_end and _is_text(tokens)}
        self.others = [row for row in parsed if not (row[1] and _is_text(row[0]))]
        if len(self.others) > _MOST:
            raise PartError(f"universal_checkpoint_info has {len(self.others)} patterns of names in one list.")

    def fit(self, name: str) -> bool:
        """Whether one of them fits the name."""
        return name in self.exact or any(_fits(tokens, to_end, name) for tokens, to_end in self.others)


def _is_text(tokens: Sequence[Token]) -> bool:
    return all(len(kind) == 1 and not repeated for kind, repeated in tokens)


def _parsed(pattern: str) -> tuple[list[Token], bool]:
    """The tokens of a pattern, and whether the name ends where it ends."""
    text = pattern.removeprefix("^")
    to_end = text.endswith("$") and not text.endswith("\\$")
    text = text.removesuffix("$") if to_end else text
    tokens, at = list[Token](), 0
    while at < len(text):
        kind, at = _kind(pattern, text, at)
        tokens.append((kind, False))
        if text[at : at + 1] in ("+", "*"):
            tokens[-1:] = [(kind, True)] if text[at] == "*" else [(kind, False), (kind, True)]
            at += 1
    return tokens, to_end


def _kind(pattern: str, text: str, at: int) -> tuple[str, int]:
    """What a pattern says at a place, and where the next begins."""
    character, after = text[at], text[at + 1 : at + 2]
    if character == "." or character.isalnum() or character in _PLAIN:
        return ("any" if character == "." else character), at + 1
    if character == "\\" and after and (after == "d" or not after.isalnum()):
        return ("digit" if after == "d" else after), at + 2
    raise PartError(f"universal_checkpoint_info tells names by the pattern {pattern[:100]!r}, which is not read.")


def _fits(tokens: Sequence[Token], to_end: bool, name: str) -> bool:
    """All places in the pattern that the name so far may have led to, at once."""
    places = _with_skipped({0}, tokens)
    for character in name:
        if not to_end and len(tokens) in places:
            return True
        places = _with_skipped({
            at if tokens[at][1] else at + 1 for at in places if at < len(tokens) and _takes(tokens[at][0], character)
        }, tokens)  # fmt: skip
        if not places:
            return False
    return len(tokens) in places


def _takes(kind: str, character: str) -> bool:
    return kind == character or kind == "any" or (kind == "digit" and character.isdigit())


def _with_skipped(places: set[int], tokens: Sequence[Token]) -> set[int]:
    found = set(places)
    for at in places:
        while at < len(tokens) and tokens[at][1]:
            at += 1
            found.add(at)
    return found
