"""What `load_into` says about every name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_tools.errors import MatchError
from ckpt_tools.text import Report, printable

_SHOWN = 6


@dataclass(slots=True, repr=False)
class LoadReport(Report):
    """The fate of every tensor of a model and of a checkpoint; true when all of both were loaded as they are.

    Attributes:
        path: the checkpoint.
        loaded: names in the model whose values came from the file, in order; adapted ones too.
        renamed: name in the file -> (name in the model, the reason: wrapper, rule, prefix, structure, position, tied).
        missing: names in the model that the file does not have; they stayed as they were.
        unexpected: names in the file that the model does not have.
        mismatched: name -> (shape in the file, shape in the model); they stayed as they were.
        reinitialised: name -> scheme and seed.
        adapted: name -> what was done to make it fit.
        cast: "float32 -> bfloat16": number of tensors.
        notes: what else to know.
    """

    path: str
    loaded: list[str] = field(default_factory=list)
    renamed: dict[str, tuple[str, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    reinitialised: dict[str, str] = field(default_factory=dict)
    adapted: dict[str, str] = field(default_factory=dict)
    cast: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.reinitialised)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded from {self.path}"]
        by_reason: dict[str, list[str]] = {}
        for old, (new, reason) in self.renamed.items():
            by_reason.setdefault(reason, []).append(f"{old} -> {new}")
        for reason, pairs in by_reason.items():
            lines += _lines(f"renamed ({reason})", pairs)
        lines += _lines("missing", self.missing)
        lines += _lines("unexpected", self.unexpected)
        lines += _lines("mismatched", [f"{name}: {list(old)} in the file, {list(new)} in the model"
                                       for name, (old, new) in self.mismatched.items()])  # fmt: skip
        lines += _lines("initialised", [f"{name}: {how}" for name, how in self.reinitialised.items()])
        lines += _lines("adapted", [f"{name}: {what}" for name, what in self.adapted.items()])
        lines += _lines("cast", [f"{move}: {count} tensors" for move, count in self.cast.items()])
        lines += _lines("note", self.notes)
        return "\n".join(map(printable, lines))

    def raise_if_incomplete(self) -> None:
        """Raise MatchError unless every tensor of the model and of the file was loaded."""
        if not self:
            raise MatchError("The checkpoint was not loaded whole.", why="; ".join(str(self).splitlines()[1:]))


def _lines(label: str, rows: Sequence[str]) -> list[str]:
    """The first rows under a label, and how many more there are."""
    shown = rows if len(rows) <= _SHOWN else rows[: _SHOWN // 2]
    head = f"  {label:12}  "
    lines = [f"{head if number == 0 else ' ' * len(head)}{row}" for number, row in enumerate(shown)]
    return lines if len(shown) == len(rows) else [*lines, f"{' ' * len(head)}... {len(rows) - len(shown)} more"]
