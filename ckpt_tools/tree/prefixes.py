"""A plain prefix: the attribute under which a training module holds the model (`model.` in a LightningModule, `backbone.`).

No wrapper puts it there, so nothing takes it away unasked: a model may have an attribute of that name itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ckpt_tools import limits
from ckpt_tools.frozen import frozen

# What people call the attribute.
HOLDERS = frozenset((
    "model", "_model", "net", "_net", "network", "_network", "backbone", "base_model", "student", "teacher", "policy", "core",
))  # fmt: skip


@frozen
class Prefix:
    """What names have in front of others.

    Attributes:
        text: with its dot. longer: the names that have it. shorter: the same without it.
    """

    text: str
    longer: list[str]
    shorter: list[str]


def between(names: Sequence[str], wanted: Sequence[str]) -> Prefix | None:
    """The prefix under which `names` has most of `wanted`; None where it has fewer than half of them under any."""
    there, shorts = frozenset(names), frozenset(wanted)
    dots = min(max((name.count(".") for name in shorts), default=0), limits.NAME_PARTS.value)
    counts = Counter(name.removesuffix(short) for name in there for short in _ends(name, dots) if short in shorts)
    best = max(counts, key=lambda prefix: (counts[prefix], -len(prefix), prefix), default=None)
    if best is None or counts[best] * 2 < len(shorts):
        return None
    found = [short for short in wanted if best + short in there]
    return Prefix(best, [best + short for short in found], found)


def _ends(name: str, dots: int) -> Iterator[str]:
    """What a name has behind each of its dots, as far as there are so many dots in it at most."""
    at = name.rfind(".")
    while at >= 0 and dots >= 0:
        yield name[at + 1 :]
        at, dots = name.rfind(".", 0, at), dots - 1


def of_all(names: Sequence[str], holders: Collection[str] | None = HOLDERS) -> Prefix | None:
    """The first part that all names have, where it is what people call such an attribute (any with None)."""
    part = names[0].partition(".")[0] if names else ""
    prefix = f"{part}."
    if len(names) < 2 or (holders is not None and part not in holders):
        return None
    if not all(name.startswith(prefix) and len(name) > len(prefix) for name in names):
        return None
    return Prefix(prefix, list(names), [name.removeprefix(prefix) for name in names])
