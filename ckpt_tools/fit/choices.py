"""What a user chose for tensors without a partner, or of another shape; checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.errors import NothingMatchedError, UsageError
from ckpt_tools.fit.initialisers import Rules
from ckpt_tools.fit.options import OnMismatch, RowChoice
from ckpt_tools.tree.globs import Globs

_CHOICES = ("error", "reinit", "overlap", "skip")


class Rows:
    """`--rows`: rows of the source for every head that changes its size, or for the names that a glob matches."""

    def __init__(self, rows: RowChoice | Sequence[str]) -> None:
        self.everywhere: list[int] | None = None
        self.globs: dict[str, list[int]] = {}
        if isinstance(rows, Mapping):
            self.globs = {glob: _whole(given) for glob, given in rows.items()}
        elif rows and isinstance(rows[0], str):
            for text in rows:
                self._add(str(text))
        elif rows is not None and len(rows):
            self.everywhere = _whole(rows)
        self._globs = Globs(self.globs)
        self._everywhere_unused = self.everywhere is not None

    def _add(self, text: str) -> None:
        glob, _, listed = text.rpartition("=")
        try:
            numbers = [int(part) for part in listed.split(",")]
        except ValueError:
            raise UsageError(f"`rows={text!r}` is not a list of row numbers.", fix="For example: `rows=[3, 7, 1]`") from None
        if glob:
            self.globs[glob] = _whole(numbers)
        elif self.everywhere is not None:
            raise UsageError(f"`rows={text!r}`: one list is for everything, and another needs a GLOB=.")
        else:
            self.everywhere = _whole(numbers)

    def __bool__(self) -> bool:
        return self.everywhere is not None or bool(self.globs)

    def named(self, name: str) -> list[int] | None:
        """The rows that a glob chooses for a name, of any shape."""
        hits = self._globs.matching(name)
        return self.globs[hits[-1]] if hits else None

    def of(self, name: str, before: tuple[int, ...], after: tuple[int, ...]) -> list[int] | None:
        """The rows for a tensor whose shape changes; those without a glob are for tensors whose first size does."""
        found = self.named(name)
        if found is None and self.everywhere is not None and before[:1] != after[:1]:
            self._everywhere_unused = False
            return self.everywhere
        return found

    def check_used(self) -> None:
        """Raise NothingMatchedError when rows were chosen for nothing."""
        for glob in [""] * self._everywhere_unused + sorted(self._globs.unused):
            raise NothingMatchedError(
                f"`rows{f'={glob!r}' if glob else ''}`: no tensor changes its number of rows.",
                fix="To reorder the rows of a tensor that keeps its shape, name it: `rows='fc.*=3,7,1'`.",
            )


def _whole(rows: Sequence[object]) -> list[int]:
    found = [row for row in rows if isinstance(row, int) and row >= 0]
    if len(found) < len(rows) or not found:
        raise UsageError(f"`rows={list(rows)!r}` is not a list of row numbers from 0 up.")
    return found


@dataclass(slots=True)
class Choices:
    """What is to happen to tensors without a partner, checked."""

    reinit: Rules
    on_mismatch: OnMismatch = "error"
    rows: Rows = field(default_factory=lambda: Rows(None))
    adapt: bool = False
    seed: int = 0
    allow_missing: Sequence[str] = ()
    allow_unexpected: Sequence[str] = ()
    in_code: bool = False

    def __post_init__(self) -> None:
        if self.on_mismatch not in _CHOICES:
            raise UsageError(f"`on_mismatch={self.on_mismatch!r}` is not one of {', '.join(_CHOICES)}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise UsageError(f"`seed={self.seed!r}` is not a whole number from 0 up.")
        if self.rows and self.on_mismatch != "overlap":
            raise UsageError("`rows` says which rows `on_mismatch='overlap'` keeps; that is missing.")
        if isinstance(self.allow_missing, str) or isinstance(self.allow_unexpected, str):
            raise UsageError("allow_missing and allow_unexpected take a list of globs.", fix='For example: ["fc.*"]')
