"""Which module of a base an adapter's module is: by the path, under any prefix; one answer, or a refusal. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.tree.names import unwrap

Fits = Callable[[str, str], bool]
_MOST_WAYS = 1000  # prefixes that are tried; a model has one


@dataclass(frozen=True, slots=True)
class Way:
    """What leads from an adapter's paths to those of a base: a prefix less, a prefix more."""

    strip: str = ""
    add: str = ""

    def __call__(self, path: str) -> str | None:
        """The path in the base; None where the adapter's does not begin so."""
        return self.add + path[len(self.strip) :] if path.startswith(self.strip) else None


@dataclass(frozen=True, slots=True)
class Found:
    """What was found.

    Attributes:
        partners: the adapter's path -> the base's. way: how; None where there is none.
        missing: paths without a partner. several: ways that all lead somewhere, where there is more than one.
    """

    partners: Mapping[str, str] = field(default_factory=dict)
    way: Way | None = None
    missing: Sequence[str] = ()
    several: Sequence[Way] = ()


class Modules:
    """The modules of a base, by their paths without wrappers; for an adapter with underscores for dots also by such."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths: dict[str, list[str]] = {}
        for path in paths:
            self.paths.setdefault(unwrap(f"{path}.")[:-1], []).append(path)
        self.flat: dict[str, list[str]] = {}
        for path, own in self.paths.items():
            self.flat.setdefault(path.replace(".", "_"), []).extend(own)

    def find(self, wanted: Sequence[str], *, flat: bool, fits: Fits) -> Found:
        """The partners of all paths by one way; exactly the same paths before any other way.

        Args:
            flat: whether the paths have underscores for dots.
            fits: whether a module of the adapter may be one of the base: by the shapes.
        """
        known = self.flat if flat else self.paths
        if not wanted:
            return Found(way=Way())
        separator = "_" if flat else "."
        ways = [Way(), *_ways(wanted[0], known, separator)][:_MOST_WAYS]
        whole = [way for way in ways if all(way(path) in known for path in wanted)]
        good = [way for way in whole if all(any(fits(path, base) for base in known[way(path) or ""]) for path in wanted)]
        if not whole:
            best = max(ways, key=lambda way: sum(way(path) in known for path in wanted))
            return Found(missing=[path for path in wanted if best(path) not in known])
        chosen = good or whole
        if len(chosen) > 1 and chosen[0] != Way():
            return Found(several=chosen)
        way = chosen[0]
        partners = {path: known[way(path) or ""] for path in wanted}
        if doubled := next((bases for bases in partners.values() if len(bases) > 1), None):
            return Found(several=[Way("", base) for base in doubled])
        return Found({path: bases[0] for path, bases in partners.items()}, way)


def _ways(path: str, known: Iterable[str], separator: str) -> list[Way]:
    """The ways from one path to all that end as it does: the longer the common end the earlier."""
    parts = path.split(separator)
    found: dict[Way, int] = {}
    for base in known:
        common = _common_end(parts, base.split(separator))
        if common and (separator == "." or common == len(parts)):  # of a part with underscores only the whole is meant
            end = len(separator.join(parts[-common:]))
            found[Way(path[: len(path) - end], base[: len(base) - end])] = common
    found.pop(Way(), None)
    return sorted(found, key=lambda way: -found[way])


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        count += 1
    return count
