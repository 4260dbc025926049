"""What `load_into` takes, and what it says about every name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_tools.errors import MatchError, UsageError
from ckpt_tools.fit.options import LeftOverOptions, RunOptions
from ckpt_tools.operations.convert.options import NameOptions, Selection
from ckpt_tools.text import Report, printable
from ckpt_tools.tree.arguments import Renames
from ckpt_tools.tree.options import as_in, flag, record, several

_SHOWN = 6


@record
class LoadOptions(RunOptions, LeftOverOptions):
    """All that `load_into` takes."""

    rename: Renames = as_in(NameOptions, "rename", "Rename tensors of the file first.")
    allow_missing: str | Sequence[str] = several("Names of the model that may be missing in the file.", metavar="GLOB")
    allow_unexpected: str | Sequence[str] = several("Names of the file that the model may lack.", metavar="GLOB")
    assign: bool = flag("Replace the parameters by new tensors with the file's dtypes, as `assign=True` of PyTorch does.")
    select: str | None = as_in(Selection, "select", "Which state dict of the file, if it has several.")
    hooks: bool = flag(
        "Run the model's own load hooks: its load_state_dict then loads the file's tensors under the model's names. If it "
        "raises, what a hook has changed stays changed."
    )

    def check(self) -> None:
        """Raise UsageError for what the model's own `load_state_dict` decides, where its hooks run."""
        super().check()
        with_hooks = ("hooks", "select", "assign", "allow_missing", "allow_unexpected")
        others = [name for name in self.asked() if name not in with_hooks]
        if self.match == "exact+wrappers":  # the default, said
            others.remove("match")
        if self.hooks and others:
            raise UsageError(
                f"`{others[0]}` does not go with `hooks=True`: the model's own load_state_dict decides then.",
                fix=f"With hooks go {', '.join(with_hooks[1:])}.",
            )


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
        lost: what casts lost of a tensor's values: that some became infinite, or zero.
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
    lost: dict[str, str] = field(default_factory=dict)
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
        lines += _lines("lost", [f"{name}: {what}" for name, what in self.lost.items()])
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
