"""The globs that options take: shell patterns (fnmatch) for whole names, and which of them have matched nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from itertools import islice

from ckpt_tools.text import did_you_mean


class Globs:
    """Globs in their order."""

    def __init__(self, globs: Iterable[str]) -> None:
        self._patterns = {glob: re.compile(translate(glob)) for glob in globs}
        self.unused = dict.fromkeys(self._patterns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._patterns)

    def __len__(self) -> int:
        return len(self._patterns)

    def matching(self, *texts: str) -> list[str]:
        """Those that match one of the texts, in order; they count as used."""
        hits = [glob for glob, pattern in self._patterns.items() if any(map(pattern.match, texts))]
        for glob in hits:
            self.unused.pop(glob, None)
        return hits


_LOOKED_AT = 2000  # names; a hint is no reason to wait


def behind_prefix(glob: str, names: Iterable[str]) -> list[str]:
    """The glob as it would match, where names have a prefix that it leaves out: `module.fc.*` for `fc.*`; the first three."""
    pattern = re.compile(translate(glob))
    found: dict[str, None] = {}
    for name in islice(names, _LOOKED_AT):
        parts = name.split(".")
        for place in range(1, len(parts)):
            if pattern.match(".".join(parts[place:])):
                found[".".join([*parts[:place], glob])] = None
                break
    return list(found)[:3]


def meant_by(glob: str, names: Sequence[str], why: str = "") -> str:
    """`Did you mean 'module.fc.*'?` for a glob that matches nothing, or names that are near, or nothing."""
    below = f"{glob}.*"
    if any(name.startswith(f"{glob}.") for name in names):
        return f"Did you mean {below!r}?"
    if found := behind_prefix(glob, names) or behind_prefix(below, names):
        return f"Did you mean {', '.join(map(repr, found))}? {why}".rstrip()
    return did_you_mean(glob, names)
