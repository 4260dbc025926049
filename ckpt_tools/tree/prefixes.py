"""A plain prefix: the attribute under which a training module holds the model (`model.` in a LightningModule, `backbone.`).

No wrapper puts it there, so nothing takes it away unasked: a model may have an attribute of that name itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckpt_tools.tree.names import strip_leading

# What people call the attribute.
HOLDERS = frozenset((
    "model", "_model", "net", "_net", "network", "_network", "backbone", "base_model", "student", "teacher", "policy", "core",
))  # fmt: skip
_TRIED = 8  # names whose partners are looked for one by one; of two models with one prefix any name shows it


@dataclass(frozen=True, slots=True)
class Prefix:
    """What names have in front of others.

    Attributes:
        text: with its dot. longer: the names that have it. shorter: the same without it.
    """

    text: str
    longer: list[str]
    shorter: list[str]

    @property
    def removal(self) -> str:
        """The argument of `convert` that takes it away, once: `strip_prefix` takes repeated ones too."""
        if all(strip_leading(longer, self.text) == shorter for longer, shorter in zip(self.longer, self.shorter, strict=True)):
            return f"strip_prefix={self.text!r}"
        return f"rename={'^' + self.text.replace('.', chr(92) + '.') + '='!r}"


def between(names: Sequence[str], wanted: Sequence[str]) -> Prefix | None:
    """The prefix under which `names` has most of `wanted`; None where it has fewer than half of them under any."""
    there = frozenset(names)
    candidates = {name.removesuffix(short) for short in wanted[:_TRIED] for name in names if name.endswith(f".{short}")}
    found = [[short for short in wanted if prefix + short in there] for prefix in sorted(candidates, key=len)]
    best = max(zip(map(len, found), sorted(candidates, key=len), found, strict=True), key=lambda row: row[0], default=None)
    if best is None or best[0] * 2 < len(wanted):
        return None
    return Prefix(best[1], [best[1] + short for short in best[2]], best[2])


def of_all(names: Sequence[str], holders: Collection[str] | None = HOLDERS) -> Prefix | None:
    """The first part that all names have, where it is what people call such an attribute (any with None)."""
    part = names[0].partition(".")[0] if names else ""
    prefix = f"{part}."
    if len(names) < 2 or (holders is not None and part not in holders):
        return None
    if not all(name.startswith(prefix) and len(name) > len(prefix) for name in names):
        return None
    return Prefix(prefix, list(names), [name.removeprefix(prefix) for name in names])
