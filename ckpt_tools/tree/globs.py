"""The globs that options take: shell patterns (fnmatch) for whole names, and which of them have matched nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate


class Globs:
    """Globs in their order.

    Attributes:
        unused: those that have matched nothing yet, in order.
    """

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
